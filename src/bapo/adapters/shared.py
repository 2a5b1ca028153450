"""What adapters have in common: options by the same names, and refusals in the same words.

No framework is imported here. An adapter names its framework's options; the sentences around them are written once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch

from bapo.core.settings import ClipSettings

SCOPES = ("update", "microbatch")
"""What one pair of bounds is solved from: the whole optimizer step, or each loss call on its own."""
RatioTo = Literal["rollout", "old"]
"""Ratios are to the policy that sampled, or to the log-probs that the trainer recomputed."""
DEFAULT_EPSILON = 0.2
"""The default of every framework here. Somebody who set another value expects it to be used."""


def not_importable(adapter: str, framework: str, tested: str, install: str, error: ImportError) -> ImportError:
    """The error of an adapter whose framework is missing or has changed."""
    return ImportError(
        f"bapo.adapters.{adapter} needs {framework} (tested with {tested}): pip install {install}. It said: {error}"
    )


def ignored_epsilons(given: str, ranges: str, same: str = "") -> ValueError:
    """The error of epsilons that somebody set (`given`), with the options that replace them (`ranges`).

    `same`: these options with the values that clip as the epsilons would.
    """
    fixed = f" To clip at these epsilons, write {same} instead." if same else ""
    return ValueError(
        f"{given} would be ignored: BAPO chooses both bounds. {ranges} say where the bounds may be, and equal numbers "
        f"fix them.{fixed}"
    )


def refuse_nan(share: float, inputs: str) -> None:
    """Raise where the bounds of an update are NaN, which only bad inputs make them."""
    if math.isnan(share):
        raise ValueError(
            f"the {inputs} of this update hold NaN or infinity on some rank. bapo.core.checks.check_tokens names the "
            "token."
        )


def refuse_used_low(settings: ClipSettings, why: str) -> None:
    """Raise if the settings have a bound for used tokens, but the loss cannot know which tokens those are (`why`)."""
    if settings.used_low is not None:
        raise ValueError(
            f"used_low={settings.used_low} is a bound for tokens that were trained on before, but {why}. Leave out "
            "used_low, and the preset push-once, which sets it. In a training loop of your own, bapo.policy_loss(..., "
            "uses=...) takes the counts."
        )


def warn_never_used(settings: ClipSettings, prefix: str, passes: str) -> None:
    """Warn if the settings have a bound for used tokens, but `passes`, an option with its value, allows one pass.

    `prefix`: what the framework's options have before our names.
    """
    if settings.used_low is not None:
        warnings.warn(
            f"{prefix}used_low={settings.used_low} (which {prefix}preset=push-once sets, too) does nothing with "
            f"{passes}: it is a bound for tokens that were trained on before, and no token is trained on twice. Raise "
            "that option, or leave the bound out.",
            stacklevel=3,
        )


def just_above(bound: float, dtype: torch.dtype) -> float:
    """The number after a bound: where `torch.clamp` must clip a used token to treat it as the core does.

    A token exactly at its bound has no gradient in the core, but a full one in `min(r A, clamp(r, ...) A)`. With
    used_low=1 this is common: every token that the updates since its sampling left alone has a ratio of 1.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    nearest = torch.tensor(bound, dtype=working, device="cpu")
    return float(torch.nextafter(nearest, torch.full_like(nearest, math.inf)))


def as_key(options: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Options in a form that can be the key of a cache: lists become tuples."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in options)
