"""How often each token was trained on before its update, and what two rules would do to those that were.

The dump says how often, or it shows responses twice. A response that is trained on again has the behaviour log-probs of
the first time, bit for bit. The converse holds if chance cannot produce the same response twice. A second sample is the
same response with the probability of the response itself, exp(sum of its behaviour log-probs), so one that was
improbable enough, and whose log-probs take several values, can be recognised. Short or certain responses cannot: their
uses stay unknown.

    a later use    is as good as certain: an earlier update of the dump trained on the same response
    a first use    is the first in this dump: updates that were not logged, or lie before it, do not show

If no response appears twice, that proves something only if the behaviour log-probs are the sampler's own, which no
trainer recomputes from update to update, and if the learner's are from the updates themselves.

A negative token with r < 1 is already less likely than when it was sampled. If the clip lets it pass, the update pushes
it down further. A fixed clip stops that at its lower bound only, whether the token is used for the first or for the
eighth time. Two rules give tokens that were trained on before a lower bound of their own. That of push once is 1: of
the negative ones, only those that have become more likely keep their gradient. The brake raises it towards 1 as far as
they have fallen in this update (core/brake.py). `Pushes` counts what the rules do beside the fixed clip (0.8, 1.2) that
most trainers start from, because a dump does not say which clip was in use. If only noise moves the learner, about half
of the ratios lie below 1, so that half by itself shows no push.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from bapo.diagnose.dump_files import Array
from bapo.diagnose.dumps import NAMES, Dump, LoggedUpdate

UNKNOWN = -1  # the uses of a token whose response cannot be recognised
SURPRISE = 14.0
"""Least surprise of a response in nats: another sample is the same with a probability of at most one in a million."""
VALUES = 8  # least number of different log-probs in it, so that coarse ones do not make different responses look alike
MOST_TOKENS = 0.5  # uses are inferred only if at least this share of all tokens is in responses that can be recognised
RULES = ("brake", "push_once")
"""The objectives that treat tokens differently which were trained on before."""

Source = Literal["logged", "inferred", "unknown"]


class Uses(NamedTuple):
    """Where the uses of a dump come from."""

    source: Source
    words: str = ""  # how they were inferred, or why they are unknown


class Seen(NamedTuple):
    """What the responses of a dump say about their uses."""

    before: list[Array]
    """One array [tokens] per update: in how many earlier updates a token's response appears, or UNKNOWN."""
    again: int
    """Responses that appear in an earlier update."""
    repeated: int
    """Responses that appear in their own update, too."""

    @property
    def unknown(self) -> float:
        """The share of the tokens whose response cannot be recognised."""
        return float((np.concatenate(self.before) == UNKNOWN).mean())


def with_uses(dump: Dump) -> tuple[Dump, Uses]:
    """The dump with `uses` in every update, or in none; and where they come from."""
    updates, seen = dump.updates, recognise(dump.updates)
    if all(update.uses is not None for update in updates):
        wrong = sum(int((update.uses < found).sum()) for update, found in zip(updates, seen.before, strict=True))
        contradiction = (
            f"uses cannot be right: {wrong} tokens are in responses that appear in more of the earlier updates than "
            "their uses say. Count every update that trained on a response before this one"
        )
        return replace(dump, notes=[*dump.notes, *([contradiction] if wrong else [])]), Uses("logged")
    if doubt := _doubt(dump, seen):
        return replace(dump, updates=[replace(update, uses=None) for update in updates]), Uses("unknown", doubt)
    words = _inferred(updates, seen)
    inferred = [replace(update, uses=uses) for update, uses in zip(updates, seen.before, strict=True)]
    return replace(dump, updates=inferred, notes=[*dump.notes, words]), Uses("inferred", words)


def recognise(updates: Sequence[LoggedUpdate]) -> Seen:
    """In how many earlier updates each response appears. Within one update, copies of a response count once."""
    count: Counter[bytes] = Counter()
    before, again, repeated = [], 0, 0
    for update in updates:
        names = _fingerprints(update)
        uses = np.asarray([UNKNOWN if name is None else count[name] for name in names], dtype=np.int64)
        known = [name for name in names if name is not None]
        again += int((uses > 0).sum())
        repeated += len(known) - len(set(known))
        count.update(set(known))
        ids = update.sequence_ids
        before.append(np.full(len(update.logprobs), UNKNOWN) if ids is None else uses[ids])
    return Seen(before, again, repeated)


def _fingerprints(update: LoggedUpdate) -> list[bytes | None]:
    """A digest of the behaviour log-probs of each response; None if chance could produce them twice."""
    if not update.sequences:
        return []
    order = np.argsort(update.sequence_ids, kind="stable")  # type: ignore[arg-type]
    ends = np.cumsum(np.bincount(update.sequence_ids))  # type: ignore[arg-type]
    responses = np.split(update.behavior_logprobs[order].astype(np.float64), ends[:-1])
    improbable = [-values.sum() >= SURPRISE and len(np.unique(values)) >= VALUES for values in responses]
    return [
        hashlib.sha256(values.tobytes()).digest() if rare else None
        for values, rare in zip(responses, improbable, strict=True)
    ]


def _doubt(dump: Dump, seen: Seen) -> str:
    """Why uses cannot be inferred; empty if they can."""
    if len(dump.updates) == 1:
        return "there is only one update"
    if any(update.sequence_ids is None for update in dump.updates):
        return "it does not say which response a token belongs to"
    if 1 - seen.unknown < MOST_TOKENS:
        known = "responses that are long and uncertain enough to be recognised when they appear again"
        return f"only {1 - seen.unknown:.0%} of the tokens are in {known}"
    if seen.again:
        return ""
    if (behavior := dump.columns["behavior_logprobs"]) in NAMES["anchor"]:
        recomputed = f"if {behavior} is recomputed for every update, a response that is used again cannot be recognised"
        return f"no response appears in two updates, but {recomputed}"
    if dump.columns.get("logprobs") in NAMES["anchor"]:
        return "it was written before the first step on each rollout batch, so further passes over it do not show"
    return ""


def _inferred(updates: Sequence[LoggedUpdate], seen: Seen) -> str:
    """What was inferred, in words."""
    responses = sum(update.sequences or 0 for update in updates)
    text = (
        f"the dump has no column for uses, so they are inferred: {seen.again} of {responses} responses have, bit for "
        "bit, the behaviour log-probs of a response in an earlier update. Updates that are not in the dump do not count"
    )
    if seen.unknown:
        text += f"; {seen.unknown:.1%} of the tokens are in responses too short or too certain to be recognised"
    if seen.repeated:
        text += (
            f"; {seen.repeated} responses appear more than once within one update, which counts as one use. If its "
            "number covers several optimizer steps, number the steps"
        )
    return text


@dataclass(frozen=True)
class Pushes:
    """What becomes of some negative tokens at (0.8, 1.2), and what brake and push once keep of them. Adds up."""

    negative: float = 0.0  # negative tokens, A < 0
    log_ratio: float = 0.0  # sum of log r over them
    below: float = 0.0  # those that are less likely than when they were sampled, r < 1
    pushed: float = 0.0  # those among them that (0.8, 1.2) lets pass: the update pushes them further down
    brake: float = 0.0  # negative tokens that the brake lets pass
    push_once: float = 0.0  # those that push once lets pass
    gradient: float = 0.0  # sum of r|A| over what (0.8, 1.2) lets pass
    pushed_gradient: float = 0.0  # the same over those that are pushed further down
    brake_gradient: float = 0.0
    push_once_gradient: float = 0.0

    def __add__(self, other: Pushes) -> Pushes:
        return Pushes(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Pushes)))

    @cached_property
    def shares(self) -> dict[str, float]:
        """The sums as shares of the negative tokens, and of their gradient at (0.8, 1.2); NaN where uses are unknown.

        log_ratio: how far they have moved since they were sampled, in nats; below 0 if they are less likely.
        """
        counts = {name: (getattr(self, name), self.negative) for name in ("log_ratio", "below", "pushed", *RULES)}
        masses = {f"{name}_of_gradient": getattr(self, f"{name}_gradient") for name in ("pushed", *RULES)}
        parts = counts | {name: (mass, self.gradient) for name, mass in masses.items()}
        return {name: part / whole if whole > 0 else math.nan for name, (part, whole) in parts.items()}


def pushes_by_use(
    uses: Array | None,  # [tokens] how often each was trained on before, or UNKNOWN
    log_ratio: Array,  # [tokens]
    advantages: Array,  # [tokens]
    retained: Mapping[str, Array],  # objective -> [tokens] which it lets pass
    gradients: Mapping[str, Array],  # objective -> [tokens] |dL / d log pi|
) -> dict[int, Pushes]:
    """The pushes of tokens that were trained on 0, 1, 2, … times before. Without uses, of all tokens as UNKNOWN.

    `retained` and `gradients` are those of grpo at (0.8, 1.2), and of the rules that could be tried.
    """
    below, unknown = log_ratio < 0, np.full(len(log_ratio), math.nan)
    columns = {
        "negative": np.ones(len(log_ratio)),
        "log_ratio": log_ratio,
        "below": below,
        "pushed": below & retained["grpo"],
        "gradient": gradients["grpo"],
        "pushed_gradient": below * gradients["grpo"],
        **{rule: retained.get(rule, unknown) for rule in RULES},
        **{f"{rule}_gradient": gradients.get(rule, unknown) for rule in RULES},
    }
    known, place = np.unique(np.full(len(log_ratio), UNKNOWN) if uses is None else uses, return_inverse=True)
    sums = {name: np.bincount(place, np.where(advantages < 0, values, 0.0)) for name, values in columns.items()}
    return {int(use): Pushes(**{name: float(of[i]) for name, of in sums.items()}) for i, use in enumerate(known)}


def joined(parts: Sequence[Mapping[int, Pushes]]) -> dict[int, Pushes]:
    """The pushes of several updates, added up by use."""
    found: dict[int, Pushes] = {}
    for use, pushes in chain(*(part.items() for part in parts)):
        found[use] = found.get(use, Pushes()) + pushes
    return dict(sorted(found.items()))


def of_uses(pushes: Mapping[int, Pushes], chosen: Callable[[int], bool] = lambda use: True) -> Pushes:
    """The pushes of all tokens whose use is chosen, added up; of all tokens if nothing is said."""
    return sum((part for use, part in pushes.items() if chosen(use)), Pushes())


def first(pushes: Mapping[int, Pushes]) -> Pushes:
    """Tokens that were never trained on before."""
    return of_uses(pushes, lambda use: use == 0)


def later(pushes: Mapping[int, Pushes]) -> Pushes:
    """Tokens that were trained on before."""
    return of_uses(pushes, lambda use: use > 0)
