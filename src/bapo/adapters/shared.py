"""What adapters have in common: options by the same names, and refusals in the same words.

No framework is imported here. An adapter names its framework's options; the sentences around them are written once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from bapo.core.bounds import StopReason
from bapo.core.settings import ClipSettings, require_choice

SCOPES = ("update", "microbatch")
"""What one pair of bounds is solved from: the whole optimizer step, or each loss call on its own."""
RatioTo = Literal["rollout", "old"]
"""Ratios are to the policy that sampled, or to the log-probs that the trainer recomputed."""
NO_SIGNAL = f"bapo/stop/{StopReason.NO_SIGNAL.name.lower()}"
"""The metric that counts parts without any advantage."""
DEFAULT_EPSILON = 0.2
"""The default of every framework here. Somebody who set another value expects it to be used."""


FIXED: dict[str, dict[str, Any]] = {
    "grpo": {"low": (0.8, 0.8), "high": (1.2, 1.2)},
    "push_once": {"low": (0.8, 0.8), "high": (1.2, 1.2), "used_low": 1.0},
}
"""Objectives that do not search for their bounds -> the bounds, as settings of a search with one candidate."""


def settings_of(objective: str = "bapo", preset: str | None = None, **options: Any) -> ClipSettings:
    """The bounds of an objective as clip settings. An option that is None has the preset's or the objective's value.

    objective   bapo searches. grpo and push_once do not: their options are low and high, each a pair of equal numbers,
                and used_low.
    """
    require_choice("objective", objective, ("bapo", *FIXED))
    if objective == "bapo":
        return ClipSettings.from_options(preset, **options)
    given = {name: value for name, value in {"preset": preset, **options}.items() if value is not None}
    for name, value in given.items():
        if name not in FIXED["push_once"]:
            raise ValueError(
                f"{name}={value!r} is of objective='bapo', which searches, but objective={objective!r} does not. Leave "
                "it out."
            )
    settings = ClipSettings.from_options(**{**FIXED[objective], **given})
    if settings.depends_on_tokens:
        raise ValueError(
            f"low={settings.low} and high={settings.high} are ranges to search, but objective={objective!r} does not "
            "search. Give two equal numbers for each, or objective='bapo'."
        )
    return settings


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
            "used_low, and the objective push_once, which sets it. In a training loop of your own, "
            "bapo.policy_loss(..., uses=...) takes the counts."
        )


def warn_never_used(settings: ClipSettings, prefix: str, passes: str) -> None:
    """Warn if the settings have a bound for used tokens, but `passes`, an option with its value, allows one pass.

    `prefix`: what the framework's options have before our names.
    """
    if settings.used_low is not None:
        warnings.warn(
            f"{prefix}used_low={settings.used_low} (which {prefix}objective=push_once sets, too) does nothing with "
            f"{passes}: it is a bound for tokens that were trained on before, and no token is trained on twice. Raise "
            "that option, or leave the bound out.",
            stacklevel=3,
        )


def just_above(bound: float, dtype: torch.dtype) -> float:
    """The number after a bound: where `torch.clamp` must clip a used token to treat it as the core does.

    A token exactly at its bound has no gradient in the core, but a full one in `min(r A, clamp(r, ...) A)`. With
    used_low=1 this is common: every token that the updates since its sampling left alone has a ratio of 1.
    """
    return _next(bound, math.inf, dtype)


def _next(bound: float, toward: float, dtype: torch.dtype) -> float:
    working = torch.float64 if dtype == torch.float64 else torch.float32
    nearest = torch.tensor(bound, dtype=working, device="cpu")
    return float(torch.nextafter(nearest, torch.full_like(nearest, toward)))


def clamped_at(
    low: float, high: float, *, used: bool, advantages: Tensor, dtype: torch.dtype
) -> tuple[float | Tensor, float | Tensor]:
    """The bounds with which `min(r A, clamp(r, low, high) A)` clips as the core does; `used`: low is the used tokens'.

    Where tokens at the bound itself are common (see `just_above`), the bound moves by one number: that of used tokens,
    and every bound of 1, the ratio of a fresh token. Both may then be out of order, and clamp would take the upper one
    for all tokens; so each token gets only the bound that its sign is clipped at.
    """
    lower = just_above(low, dtype) if used or low == 1 else low
    upper = _next(high, -math.inf, dtype) if high == 1 else high
    if lower <= upper:
        return lower, upper
    negative = advantages < 0
    none = torch.zeros_like(advantages, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return none.masked_fill(negative, lower), (none + upper).masked_fill(negative, math.inf)


def averaged(
    parts: Sequence[dict[str, Tensor]],  # what is known of the bounds of each part of an update, by its metrics' names
    others: dict[str, Tensor],  # further metrics of the whole update
    reduce: Callable[[Tensor], Tensor],  # to the mean over processes
) -> dict[str, float]:
    """All of it as means over parts and processes: one collective, one host read.

    Where no token has an advantage, bounds and share mean nothing: such parts count only in `bapo/stop/*`, and numbers
    that no part has a meaning for are NaN.
    """
    columns = {name: torch.stack([part[name] for part in parts]).double() for name in parts[0]}
    conditional = [name for name in columns if "/stop/" not in name]
    signal = 1 - columns[NO_SIGNAL]
    means = others | {n: (column * signal if n in conditional else column).mean() for n, column in columns.items()}
    numbers = dict(zip(means, reduce(torch.stack(list(means.values()))).tolist(), strict=True))
    with_signal = 1 - numbers[NO_SIGNAL]
    return numbers | {name: numbers[name] / with_signal if with_signal else math.nan for name in conditional}


def as_key(options: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Options in a form that can be the key of a cache: lists become tuples."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in options)
