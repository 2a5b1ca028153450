"""What both views show of a step and of an actor: which numbers, under which labels, and what the labels mean."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["ACTOR_COLUMNS", "NONE", "SHOWN", "ActorLine", "legend"]

SHOWN = {
    "imitation/loss": ("loss", 3),
    "reward": ("reward", 3),
    "eval/avg": ("eval", 3),
    "entropy": ("entropy", 3),
    "length": ("length", 1),
    "grad_norm": ("grad", 3),
    "tokens_per_second": ("tok/s", 0),
    "seconds": ("seconds", 2),
    "share": ("share", 3),
    "clip_low": ("low", 2),
    "clip_high": ("high", 2),
    "clip_fraction_positive": ("clipped+", 3),
    "clip_fraction_negative": ("clipped-", 3),
    "staleness_mean": ("stale", 1),
    "staleness_max": ("stalest", 0),
}
"""Metrics and timings that are shown, in this order, with label and decimals. The log has the others."""
MEANINGS = {
    ("share",): "positive part of the signal",
    ("clip_low", "clip_high"): "bounds of the clip",
    ("clip_fraction_positive", "clip_fraction_negative"): "clipped share of positive and negative tokens",
    ("staleness_mean", "staleness_max"): "mean and largest age of tokens, in updates",
}
"""What labels mean that do not say it themselves."""
NONE = "-"
"""Stands for the speed of an actor that samples and learns nothing now."""


def legend(shown: Collection[str]) -> str:
    """`low, high: bounds of the clip; …` for those of these metrics whose labels need it."""
    told = []
    for keys, meaning in MEANINGS.items():
        labels = [SHOWN[key][0] for key in keys if key in shown]
        told += [f"{', '.join(labels)}: {meaning}"] if labels else []
    return "; ".join(told)


@dataclass(frozen=True)
class ActorLine:
    """What an actor of a cluster does."""

    name: str
    doing: str
    version: int
    """The version of its weights."""
    tokens_per_second: float
    responses: int
    """Responses it is working on."""
    restarts: int

    def cells(self) -> tuple[str, ...]:
        """As columns: name, what it does, version, speed, responses, restarts."""
        version = "" if self.version < 0 else str(self.version)
        rate = f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else NONE
        return self.name, self.doing, version, rate, str(self.responses or ""), str(self.restarts or "")


ACTOR_COLUMNS = ("actor", "does", "version", "tok/s", "responses", "restarts")
