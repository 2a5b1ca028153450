"""What adapters have in common: options by the same names, and refusals in the same words.

No framework is imported here. An adapter names its framework's options; the sentences around them are written once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from bapo.core.bounds import StopReason
from bapo.core.settings import BRAKES, ClipSettings, require_choice

SCOPES = ("update", "microbatch")
"""What one pair of bounds is solved from: the whole optimizer step, or each loss call on its own."""
RatioTo = Literal["rollout", "old"]
"""Ratios are to the policy that sampled, or to the log-probs that the trainer recomputed."""
NO_SIGNAL = f"bapo/stop/{StopReason.NO_SIGNAL.name.lower()}"
"""The metric that counts parts without any advantage."""
DEFAULT_EPSILON = 0.2
"""The default of every framework here. Somebody who set another value expects it to be used."""


FIXED: dict[str, ClipSettings] = {
    "grpo": ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2)),
    "push_once": ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2), used_low=1.0),
    **{name: build() for name, build in BRAKES.items()},
}
"""Objectives that do not search for their bounds -> the bounds, as settings of a search with one candidate."""


def settings_of(objective: str | None = "bapo", preset: str | None = None, **options: Any) -> ClipSettings:
    """The bounds of an objective as clip settings. An option that is None has the preset's or the objective's value.

    objective   bapo searches. The others do not: their options are low and high, each a pair of equal numbers, and
                used_low (grpo, push_once) or brake, its delta (brake, brake_all). None: bapo if a preset or an option
                other than brake is given, else brake
    """
    given = {name: value for name, value in {"preset": preset, **options}.items() if value is not None}
    if objective is None:
        objective = "brake" if given.keys() <= {"brake"} else "bapo"
    require_choice("objective", objective, ("bapo", *FIXED))
    if objective == "bapo":
        return ClipSettings.from_options(**given)
    taken = ("low", "high", "brake" if objective in BRAKES else "used_low")
    for name, value in given.items():
        if name not in taken:
            raise ValueError(
                f"{name}={value!r} is of objective='bapo', which searches, but objective={objective!r} does not: it "
                f"takes {', '.join(taken)}. Leave it out."
            )
    settings = replace(FIXED[objective], **given)
    if settings.searches:
        raise ValueError(
            f"low={settings.low} and high={settings.high} are ranges to search, but objective={objective!r} does not "
            "search. Give two equal numbers for each, or objective='bapo'."
        )
    return settings


def depends_on_tokens_of(settings: ClipSettings, *, used: bool) -> bool:
    """Whether the bounds of an update depend on its tokens; `used`: whether some of them were trained on before.

    A brake on used tokens does nothing in an update that has none.
    """
    acts = used or settings.brake_on == "all"
    return (settings if acts else replace(settings, brake=None)).depends_on_tokens


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


def refuse_uses(settings: ClipSettings, why: str) -> None:
    """Raise if the settings have a rule for used tokens, but the loss cannot know which tokens those are (`why`)."""
    if settings.rule_of_used is not None:
        raise ValueError(
            f"{settings.rule_of_used} sets a bound for tokens that were trained on before, but {why}. Leave it out, "
            "and the objectives brake and push_once, which set it: brake_all is a brake that needs no counts. In a "
            "training loop of your own, bapo.policy_loss(..., uses=...) takes the counts."
        )


def warn_never_used(settings: ClipSettings, prefix: str, passes: str) -> None:
    """Warn if the settings have a rule for used tokens, but `passes`, an option with its value, allows one pass.

    `prefix`: what the framework's options have before our names.
    """
    if settings.rule_of_used is not None:
        warnings.warn(
            f"{prefix}{settings.rule_of_used} (which {prefix}objective=brake, the default, or push_once sets, too) "
            f"does nothing with {passes}: it is for tokens that were trained on before, and no token is trained on "
            f"twice. Raise that option, or set {prefix}objective=grpo.",
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


def for_clamp(low: Tensor, *, used: bool, dtype: torch.dtype) -> Tensor:
    """A lower bound, 0-d, where `torch.clamp` must clip to treat a token as the core does; `used`: it is the used
    tokens'. See `just_above`, which is for every bound of 1, too."""
    low = low.to(torch.float64 if dtype == torch.float64 else torch.float32)
    above = torch.nextafter(low, torch.full_like(low, math.inf))
    return above if used else torch.where(low == 1, above, low)


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
