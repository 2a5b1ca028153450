"""ClipSettings: where BAPO may put its clip bounds, and what it aims for.

The search of arXiv:2510.18927 (Algorithm 1) walks one fixed path of candidate pairs (low, high), from the start of both
ranges to their ends, one bound after the other, and stops at the first pair where positive tokens hold `target_share`
of the signal. This module only describes that path; `bounds.py` walks it. It imports no torch, so that configuration
files can be checked without it; the names of objectives and advantages stand here for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, Literal, get_args

Measure = Literal["gradient", "surrogate"]
Weight = Literal["none", "rollout_prob"]
Order = Literal["high_first", "low_first"]
Remainder = Literal["leave", "weigh"]
BrakeOn = Literal["used", "all"]
Preset = Literal["paper", "weak-model", "released-script"]
OBJECTIVE_OPTIONS: dict[str, dict[str, float | None]] = {
    "grpo": {"low": 0.8, "high": 1.2, "used_low": None},
    "clip_higher": {"low": 0.8, "high": 1.28, "used_low": None},
    "dual_clip": {"low": 0.8, "high": 1.2, "cap": 3.0, "used_low": None},
    "push_once": {"low": 0.8, "high": 1.2, "used_low": 1.0},
    "brake": {"low": 0.8, "high": 1.2, "delta": 0.03},
    "brake_all": {"low": 0.8, "high": 1.2, "delta": 0.03},
    "bapo": {"dual_clip": None},
    "dcpo": {"eps_low": 0.16, "eps_high": 0.2, "max_ratio": 10.0},
    "cispo": {"low": 0.0, "high": 5.0},
    "gspo": {"low": 1 - 3e-4, "high": 1 + 4e-4},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "topr": {},
    "asymre": {"shift": -0.1},
    "m2po": {"threshold": 0.04, "low": 0.7, "high": 1.5},
    "dppo": {"delta": 0.15},
    "opsm": {"low": 0.8, "high": 1.2, "delta": 0.1, "used_only": 0},
    "dis": {"low": 0.7, "high": 6.0},
    "vespo": {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
}
"""The keys of OBJECTIVES in objectives.py, which needs torch, with the keyword arguments of each function."""
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "gdpo"]
"""The keys of ADVANTAGES in advantages.py, which needs torch."""

MAX_STEPS = 10_000
DEFAULT_RANGES = {"low": (0.6, 0.9), "high": (1.2, 3.0)}
DEFAULT_TARGET_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class ClipSettings:
    """The candidate bounds, in the order they are tried, and the share of the signal positive tokens should hold."""

    target_share: float = None  # type: ignore[assignment]  # resolved in __post_init__
    """Share P / (P + N) to reach, in [0, 1]. 0.4 unless stated here, as `target_odds` or as `target_signed`."""
    low: tuple[float, float] = (0.6, 0.9)
    """Range of the lower bound on the ratio. The search starts at the first value and raises it."""
    high: tuple[float, float] = (1.2, 3.0)
    """Range of the upper bound on the ratio. The search starts at the first value and raises it."""
    low_step: float = 0.02
    """Distance between candidate lower bounds."""
    high_step: float = 0.05
    """Distance between candidate upper bounds."""
    measure: Measure = "gradient"
    """`gradient`: a clipped token counts nothing (Eq. 5). `surrogate`: it counts at its bound (Eq. 8, literally)."""
    weight: Weight = "none"
    """`rollout_prob` multiplies each token by the probability it was sampled with, as Eq. 8 prints it."""
    used_low: float | None = None
    """The lower bound for tokens that were trained on before; None: the one that the search finds. With 1.0 a negative
    token is pushed down again only while it is more likely than when it was sampled. This is our extension."""
    brake: float | None = None
    """Delta of the brake (`brake.py`): the lower bound of used tokens rises from the one that the search finds to 1, as
    far as used negative tokens have fallen. None turns it off. This is our extension."""
    brake_on: BrakeOn = "used"
    """Which tokens the brake looks at and acts on: those that were trained on before (`used`), or `all`, where nobody
    counts uses."""
    order: Order = "high_first"
    """Which bound moves first: `high_first` as in the paper, `low_first` as in the authors' code."""
    remainder: Remainder = "leave"
    """What to do where even the last candidate misses the target: `leave` the share as it is, like the paper, or
    `weigh` negative tokens down until the target is reached. `weigh` is our extension; see docs/algorithm.md."""
    target_odds: InitVar[float | None] = None
    """P / N, as the authors' code states the target. Becomes target_share = odds / (1 + odds)."""
    target_signed: InitVar[float | None] = None
    """P / (N - P), Eq. 8 read with signed advantages. Becomes target_share = q / (1 + 2q)."""

    def __post_init__(self, target_odds: float | None, target_signed: float | None) -> None:
        object.__setattr__(self, "target_share", _target_share(self.target_share, target_odds, target_signed))
        for name in ("low", "high"):
            object.__setattr__(self, name, _checked_range(name, getattr(self, name), getattr(self, f"{name}_step")))
        if not self.low[1] <= 1 <= self.high[0]:
            raise ValueError(
                f"low={self.low} and high={self.high} do not enclose 1, the ratio of a fresh token. They are ranges of "
                "bounds on the ratio, not epsilons: an epsilon of 0.2 is low=(0.8, 0.8), high=(1.2, 1.2)."
            )
        for name, kind in (
            ("measure", Measure),
            ("weight", Weight),
            ("order", Order),
            ("remainder", Remainder),
            ("brake_on", BrakeOn),
        ):
            require_choice(name, getattr(self, name), get_args(kind))
        if self.brake is not None:
            object.__setattr__(self, "brake", _checked_brake(self.brake, self.used_low))
        elif self.brake_on == "all":
            raise ValueError(
                "brake_on='all' says which tokens the brake looks at, but brake is not set. Set brake, e.g. 0.03, or "
                "leave brake_on out."
            )
        if self.used_low is not None:
            object.__setattr__(self, "used_low", _checked_used_low(self.used_low))

    @classmethod
    def preset(cls, name: Preset) -> ClipSettings:
        """Published settings: `paper` (main experiments), `weak-model` (3B Llama), `released-script` (authors' code).

        The released script also clips negative tokens at ratio 3: pass `dual_clip=3.0` to `policy_loss` for that.
        """
        if name in NOT_PRESETS:
            raise ValueError(f"preset={name!r} does not search for bounds. It is an objective: {NOT_PRESETS[name]!r}.")
        require_choice("preset", name, PRESETS)
        return cls(**PRESETS[name])

    @classmethod
    def from_options(cls, preset: str | None = None, **options: Any) -> ClipSettings:
        """Settings as configuration files state them: a preset, if any, and the options in CLIP_OPTIONS that differ.

        An option that is None has the preset's value.
        """
        for name in options:
            if name not in CLIP_OPTIONS:
                raise ValueError(
                    f"{name}={options[name]!r} is not a clip setting. Choose from preset, {', '.join(CLIP_OPTIONS)}."
                )
        given = {name: value for name, value in options.items() if value is not None}
        return replace(cls() if preset is None else cls.preset(preset), **given)  # type: ignore[arg-type]

    @property
    def low_grid(self) -> tuple[float, ...]:
        """Candidate lower bounds a + i * step, ascending."""
        return _grid(self.low, self.low_step)

    @property
    def high_grid(self) -> tuple[float, ...]:
        """Candidate upper bounds a + i * step, ascending."""
        return _grid(self.high, self.high_step)

    @property
    def depends_on_tokens(self) -> bool:
        """Whether tokens decide anything: which candidate it is, how hard the brake is on, or what negatives weigh."""
        return self.searches or self.brake is not None or self.remainder == "weigh"

    @property
    def searches(self) -> bool:
        """Whether there is more than one candidate."""
        return len(self.path) > 1

    @property
    def rule_of_used(self) -> str | None:
        """The setting for tokens that were trained on before, if there is one: then every token needs its uses."""
        if self.used_low is not None:
            return f"used_low={self.used_low}"
        return None if self.brake is None or self.brake_on == "all" else f"brake={self.brake}"

    @property
    def table_size(self) -> int:
        """Length of a signal table: P at each high, N at each low, the number of tokens with a signal, and the two sums
        of the brake if it is on."""
        return len(self.high_grid) + len(self.low_grid) + 1 + (0 if self.brake is None else 2)

    @property
    def path(self) -> tuple[tuple[int, int], ...]:
        """Index pairs (into low_grid, into high_grid) in the order they are tried."""
        last_low, last_high = len(self.low_grid) - 1, len(self.high_grid) - 1
        if self.order == "high_first":
            return tuple(
                [(0, high) for high in range(last_high + 1)] + [(low, last_high) for low in range(1, last_low + 1)]
            )
        return tuple([(low, 0) for low in range(last_low + 1)] + [(last_low, high) for high in range(1, last_high + 1)])


CLIP_OPTIONS = tuple(field.name for field in fields(ClipSettings))
"""Names of the options that `ClipSettings.from_options` takes beside a preset."""
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"target_share": 0.4, "low": (0.6, 0.9), "high": (1.2, 3.0), "measure": "surrogate"},
    "weak-model": {"target_share": 0.45, "low": (0.8, 0.9), "high": (1.2, 2.0), "measure": "surrogate"},
    "released-script": {
        "target_odds": 0.5,
        "low": (0.8, 0.95),
        "high": (1.2, 2.0),
        "low_step": 0.05,
        "high_step": 0.1,
        "measure": "surrogate",
        "order": "low_first",
    },
}


def brake_settings(*, low: float = 0.8, high: float = 1.2, delta: float = 0.03) -> ClipSettings:
    """GRPO's clip, with a lower bound for used tokens that rises as far as used negative ones have fallen (ours).

        d = mean of -log r over used tokens with A < 0,   used_low = low + (1 - low) clip(d / delta, 0, 1)

    Between `grpo` (nothing has fallen) and `push_once` (delta or more). See `brake.py`.
    """
    return ClipSettings(low=(low, low), high=(high, high), brake=_checked_brake(delta, None))


def brake_all_settings(*, low: float = 0.8, high: float = 1.2, delta: float = 0.03) -> ClipSettings:
    """The same for all tokens, where nobody counts how often they were trained on."""
    return ClipSettings(low=(low, low), high=(high, high), brake=_checked_brake(delta, None), brake_on="all")


BRAKES: dict[str, Callable[..., ClipSettings]] = {"brake": brake_settings, "brake_all": brake_all_settings}
"""Objectives whose clip settings follow from their own options."""
NOT_PRESETS = {"fixed": "grpo", "push-once": "push_once"}
"""Clips that do not search, by the names that one may look for among the presets -> the objective that is meant."""


def used_low_of(objective: str, options: Mapping[str, float | None]) -> float | None:
    """The lower bound of used tokens that an objective has with these options, or by default; None: that of all."""
    return {**OBJECTIVE_OPTIONS.get(objective, {}), **options}.get("used_low")


def rule_of_used(objective: str, options: Mapping[str, float | None]) -> str | None:
    """The option for tokens that were trained on before, if there is one: then every token needs its uses."""
    if objective in BRAKES:
        return BRAKES[objective](**options).rule_of_used
    values = {**OBJECTIVE_OPTIONS.get(objective, {}), **options}
    if values.get("used_only"):
        return f"used_only={values['used_only']}"
    return None if values.get("used_low") is None else f"used_low={values['used_low']}"


def require_choice(argument: str, value: object, choices: Any) -> None:
    """Raise unless `value` is one of `choices`; suggest the nearest one."""
    if value in choices:
        return
    import difflib

    near = difflib.get_close_matches(str(value).lower(), list(choices), n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"{argument}={value!r} is not known.{hint} Choose one of: {', '.join(choices)}.")


def refuse_weighing(settings: ClipSettings, trainer: str) -> None:
    """Raise if the settings ask for a weight on negative tokens: the trainer's own loss has no place for one."""
    if settings.remainder != "leave":
        raise ValueError(
            f"remainder={settings.remainder!r} would be ignored: {trainer}'s own loss takes two bounds, but no weight "
            "on negative tokens. Leave it out (remainder='leave'); losses through bapo.policy_loss can weigh."
        )


def _target_share(share: float | None, odds: float | None, signed: float | None) -> float:
    """The one target that was given, as a share."""
    stated = {
        name: value
        for name, value in (("target_share", share), ("target_odds", odds), ("target_signed", signed))
        if value is not None
    }
    if len(stated) > 1:
        raise ValueError(
            f"{' and '.join(f'{name}={value}' for name, value in stated.items())} all state the same target. Give one "
            "of them; with dataclasses.replace, also pass target_share=None."
        )
    for name, value in stated.items():
        if not _is_number(value) or not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"{name}={value} must be a finite number >= 0: it compares two sums of absolute values. "
                "The paper's target is target_share=0.4."
            )
    if odds is not None:
        return odds / (1 + odds)
    if signed is not None:
        return signed / (1 + 2 * signed)
    share = DEFAULT_TARGET_SHARE if share is None else float(share)
    if share > 1:
        raise ValueError(
            f"target_share={share} exceeds 1, which no share can reach. Use a value in [0, 1], such as 0.4; odds P/N "
            "go into target_odds."
        )
    return share


def _checked_range(name: str, bounds: Any, step: float) -> tuple[float, float]:
    """The range as two floats, or an error that says what is wrong with it or with its step."""
    try:
        start, end = (float(value) for value in bounds)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}={bounds!r} must be a pair (start, end) of numbers, such as {DEFAULT_RANGES[name]}."
        ) from None
    if not (math.isfinite(start) and math.isfinite(end)) or start < 0:
        raise ValueError(f"{name}={bounds} must hold finite ratios >= 0; ratios of probabilities are never negative.")
    if start > end:
        raise ValueError(f"{name}={bounds} is not ordered. Write the range as (start, end) with start <= end.")
    if not (math.isfinite(step) and step > 0):
        raise ValueError(
            f"{name}_step={step} must be positive: the search could not advance. To fix the bound, keep the step and "
            f"give a range of zero width, {name}=({start}, {start})."
        )
    if (end - start) / step > MAX_STEPS or step < 1e-5 * end:
        raise ValueError(
            f"{name}_step={step} is too fine for {name}={bounds}. Use at most {MAX_STEPS} steps, each at least 1e-5 of "
            "the bound: float32 cannot tell closer bounds apart. The published steps are 0.02 and 0.05."
        )
    return start, end


def _checked_used_low(used_low: Any) -> float:
    """A bound that leaves a ratio of 1 inside, like every other one of the search."""
    if not _is_number(used_low) or not 0 <= used_low <= 1:
        raise ValueError(
            f"used_low={used_low!r} must be a number between 0 and 1: it is the lower bound on the ratio of tokens "
            "that were trained on before. 1.0 pushes a negative token once; None turns the rule off."
        )
    return float(used_low)


def _checked_brake(delta: Any, used_low: float | None) -> float:
    """A mean fall at which the brake is fully on, with no other bound for the same tokens beside it."""
    if used_low is not None:
        raise ValueError(
            f"brake={delta} and used_low={used_low} both set the lower bound of tokens that were trained on before. "
            "Leave one of them out."
        )
    if not _is_number(delta) or not 1e-6 <= delta < math.inf:
        raise ValueError(
            f"brake={delta!r} must be a finite number of at least 1e-6: the mean fall of used negative tokens, in "
            "nats, at which it is fully on, such as 0.03. To be so however little they have fallen is push_once."
        )
    return float(delta)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _grid(bounds: tuple[float, float], step: float) -> tuple[float, ...]:
    """a + i * step up to the end, never by repeated addition; an end missed by rounding alone is reached."""
    start, end = bounds
    steps = math.floor((end - start) / step + 1e-9)
    return tuple(start + i * step for i in range(steps + 1))
