"""BAPO inside verl: a policy loss named `bapo`, chosen and set up in verl's own configuration.

    actor_rollout_ref.actor.policy_loss._target_=bapo.adapters.verl.BapoPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=bapo
    +actor_rollout_ref.actor.policy_loss.target_share=0.45

Importing this module registers the loss; the first line imports it wherever verl builds its configuration, on the
driver and on every worker. verl calls a policy loss once per micro-batch and averages it with `agg_loss`, which stays
verl's. We choose the two bounds at which the loss of each token is clipped.

    scope update        one pair of bounds for the whole optimizer step, over all its micro-batches and data-parallel
                        ranks, with one all-reduce. verl's engine runs every micro-batch inside one method,
                        `BaseEngine.train_batch`. Before it we run the same micro-batches once without gradients, with
                        the same loss function, which then collects tables instead. If the step is one micro-batch,
                        its own log-probs suffice and no further pass is made; nor is it where the bounds are known
                        without the tokens: fixed ones, and those of the brake in the first epoch.
    scope microbatch    each loss call on its own; no collective and no further pass, but bounds from fewer tokens.

We make two passes rather than carry tables over from the last step, because the bounds are then those of the tokens
that they clip: the same numbers as `bapo.policy_loss` on the whole update, however it is split.

With the brake, the default, and with `used_low`, tokens that were trained on before have another lower bound. verl's
worker trains on what it is sent in `ppo_epochs` passes, all in one call of `TrainingWorker.train_mini_batch`; every
pass covers all rows, so the rows that were trained on since that call began say how often each of them was. We count
them there, and nowhere else: a trainer of verl sends a sample once.

In verl's bypass mode (fully-async training's default) ratios are to the policy that sampled, which is what BAPO wants;
verl then renames the loss to `bypass_mode`, so that name leads here too where the configuration is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.adapters.shared import (
    DEFAULT_EPSILON,
    SCOPES,
    depends_on_tokens_of,
    ignored_epsilons,
    not_importable,
    refuse_nan,
    settings_of,
    warn_never_used,
)
from bapo.core.bounds import ClipBounds, bounds_from_table, bounds_over_ranks
from bapo.core.controller import averageable, floats_of
from bapo.core.entropy_rule import clip_statistics
from bapo.core.loss import clipped_at, update_table
from bapo.core.settings import CLIP_OPTIONS, ClipSettings, require_choice

TESTED_VERSIONS = "0.9.1; its loss alone with 0.8.0 and 0.9.0 too"
"""verl versions the tests ran with; others from 0.8 on are let in as long as the names used here are there."""

try:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss
    from verl.utils.device import get_device_id
    from verl.workers.config.actor import PolicyLossConfig
except ImportError as error:
    raise not_importable("verl", "verl", TESTED_VERSIONS, "'verl>=0.9,<0.11'", error) from error

__all__ = ["TESTED_VERSIONS", "BapoPolicyLossConfig", "bapo_policy_loss"]

NAME = "bapo"
BYPASS = "bypass_mode"
TARGET = "bapo.adapters.verl.BapoPolicyLossConfig"
verl_bypass_mode = POLICY_LOSS_REGISTRY[BYPASS]


@dataclass
class BapoPolicyLossConfig(PolicyLossConfig):
    """verl's `PolicyLossConfig` plus where the clip bounds may be.

    An option left at None has the value of the preset, or of the objective. The fields are those of the core's
    ClipSettings, plus `objective`, `preset`, `scope` and `dual_clip`.
    """

    loss_mode: str = NAME
    objective: str | None = None
    """`bapo`, which searches for the bounds in every update, or `brake`, `brake_all`, `grpo` or `push_once`, which do
    not. None: `bapo` if a preset or an option of the search is given, otherwise `brake`."""
    preset: str | None = None
    """Of the search: `paper`, `weak-model`, `released-script`. Without one: the paper's numbers, measure `gradient`."""
    target_share: float | None = None
    low: list[float] | None = None
    high: list[float] | None = None
    low_step: float | None = None
    high_step: float | None = None
    measure: str | None = None
    weight: str | None = None
    order: str | None = None
    remainder: str | None = None
    used_low: float | None = None
    """The lower bound in every epoch of `ppo_epochs` after the first; None: the one that the search finds."""
    brake: float | None = None
    """Delta of the brake, the mean fall of used negative tokens at which their lower bound is 1: 0.03 in `brake` and
    `brake_all`, none in `bapo`."""
    brake_on: str | None = None
    """With `bapo` and `brake`: the tokens that the brake acts on, `used` (the default) or `all`."""
    scope: str = "update"
    """What one pair of bounds is solved from: `update` or `microbatch`."""
    dual_clip: float | None = None
    """Cap on the ratio of negative tokens (verl's `clip_ratio_c`); the paper has none, the authors' script 3.0."""

    def __post_init__(self) -> None:
        require_choice("policy_loss.scope", self.scope, SCOPES)
        if self.loss_mode not in (NAME, BYPASS):
            raise ValueError(
                f"policy_loss._target_ is {TARGET}, but policy_loss.loss_mode={self.loss_mode!r}: its settings would "
                f"be ignored. Set actor_rollout_ref.actor.policy_loss.loss_mode={NAME}."
            )
        correction = self.rollout_correction
        if correction.get("bypass_mode", False) and correction.get("loss_type", "ppo_clip") != "ppo_clip":
            raise ValueError(
                f"rollout_correction.loss_type={correction.get('loss_type')!r} has no clip, so there are no bounds to "
                "choose. Set algorithm.rollout_correction.loss_type=ppo_clip."
            )
        rule = self.clip_settings.rule_of_used
        if rule is not None:
            count_epochs()
        if self.scope == "update" or rule is not None:
            hook_engine()

    @property
    def clip_settings(self) -> ClipSettings:
        """These options as the core's ClipSettings."""
        try:
            return settings_of(self.objective, self.preset, **{name: getattr(self, name) for name in CLIP_OPTIONS})
        except ValueError as error:
            raise ValueError(f"actor_rollout_ref.actor.policy_loss: {error}") from None


@dataclass
class _Epochs:
    """A call of `train_mini_batch` under way: passes over the same rows."""

    rows: int
    trained: int = 0  # rows, in all optimizer steps so far

    def start_step(self, rows: int) -> int:
        """How often the rows of the next optimizer step were trained on before it."""
        uses, place = divmod(self.trained, self.rows)
        assert place + rows <= self.rows, f"a mini-batch of {rows} rows holds the end of an epoch and the next one"
        self.trained += rows
        return uses


_epochs_under_way: ContextVar[_Epochs | None] = ContextVar("bapo_epochs_under_way", default=None)


@dataclass
class _Update:
    """One optimizer step under way."""

    group: dist.ProcessGroup
    uses: int | None  # how often its rows were trained on before; None where nobody counts
    known: bool = False  # whether the bounds are the same whatever the tokens
    tables: list[Tensor] = field(default_factory=list)  # of the micro-batches seen so far
    collecting: bool = False  # the pass before the bounds are known
    bounds: ClipBounds | None = None

    def solve(self, settings: ClipSettings) -> ClipBounds:
        """Bounds from the tables of all micro-batches, on all ranks: the one collective of the step."""
        # A pipeline stage without a loss has no table.
        return bounds_over_ranks(self.tables, settings, device=get_device_id(), process_group=self.group)


_update_under_way: ContextVar[_Update | None] = ContextVar("bapo_update_under_way", default=None)


@functools.cache
def count_epochs() -> None:
    """Make `TrainingWorker.train_mini_batch`, verl's loop over `ppo_epochs`, say how many rows it has."""
    from verl.workers.engine_workers import TrainingWorker

    train_mini_batch = TrainingWorker.train_mini_batch

    @functools.wraps(train_mini_batch)
    def train_mini_batch_counting(worker: Any, data: Any) -> Any:
        options = _options_of_loss(worker.loss_fn)
        if options is None:  # a critic's
            return train_mini_batch(worker, data)
        epochs = _Epochs(len(data))
        reset = _epochs_under_way.set(epochs)
        try:
            output = train_mini_batch(worker, data)
        finally:
            _epochs_under_way.reset(reset)
        if epochs.trained == epochs.rows:
            warn_never_used(options.clip_settings, "policy_loss.", "actor.ppo_epochs=1")
        return output

    TrainingWorker.train_mini_batch = train_mini_batch_counting


@functools.cache
def hook_engine() -> None:
    """Make `BaseEngine.train_batch`, verl's one optimizer step, solve the bounds before it trains."""
    from verl.workers.engine.base import BaseEngine

    train_batch = BaseEngine.train_batch

    @functools.wraps(train_batch)
    def train_batch_within_bounds(engine: Any, data: Any, loss_function: Callable[..., Any]) -> Any:
        options = _options_of_loss(loss_function)
        if options is None:
            return train_batch(engine, data, loss_function)
        epochs = _epochs_under_way.get()
        uses = None if epochs is None else epochs.start_step(len(data))
        one_micro_batch = _is_one_micro_batch(data)
        if options.scope == "update" and options.clip_settings.depends_on_tokens:
            _check_engine(getattr(engine, "engine_config", None), one_micro_batch)
        known = not depends_on_tokens_of(options.clip_settings, used=bool(uses))
        update = _Update(engine.get_data_parallel_group(), uses, known)
        reset = _update_under_way.set(update)
        try:
            if options.scope == "update" and not one_micro_batch and not known:
                update.collecting = True
                engine.infer_batch(data, loss_function)
                update.collecting = False
                update.bounds = update.solve(options.clip_settings)
            return train_batch(engine, data, loss_function)
        finally:
            _update_under_way.reset(reset)

    BaseEngine.train_batch = train_batch_within_bounds


def _check_engine(config: Any, one_micro_batch: bool) -> None:
    """Raise for settings of verl's engines under which bounds would not be those of the update's own tokens."""
    instead = "Set actor_rollout_ref.actor.policy_loss.scope=microbatch, or"
    if getattr(config, "dynamic_context_parallel", False):
        raise ValueError(
            "policy_loss.scope='update' sums its signal over verl's data-parallel group, but with "
            "megatron.dynamic_context_parallel=True that is a group of one rank, so every rank would clip at bounds of "
            f"its own. {instead} leave dynamic_context_parallel out."
        )
    replay = getattr(getattr(config, "router_replay", None), "mode", "disabled")
    if replay == "R2" and getattr(config, "strategy", None) == "veomni" and not one_micro_batch:
        raise ValueError(
            "policy_loss.scope='update' needs a pass without gradients before it trains, but with "
            "router_replay.mode='R2' verl's VeOmni engine records new routes in such a pass instead of replaying those "
            f"that it trains with: the bounds would be those of other log-probs. {instead} router_replay.mode=R3."
        )


def _options_of(config: Any) -> BapoPolicyLossConfig | None:
    """An actor's BAPO options, if it has any."""
    options = config.get("policy_loss", None) if config is not None else None
    return options if isinstance(options, BapoPolicyLossConfig) else None


def _options_of_loss(loss_function: Any) -> BapoPolicyLossConfig | None:
    """The same of a worker's loss function, a partial of one of verl's."""
    return _options_of(getattr(loss_function, "keywords", {}).get("config"))


def _is_one_micro_batch(data: Any) -> bool:
    """Whether verl will make one micro-batch of this step, on every rank. Unknown with dynamic batch sizes."""
    from verl.utils.tensordict_utils import get_non_tensor_data

    if get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        return False
    groups = get_non_tensor_data(data=data, key="force_group_size", default=1)
    return len(data) <= groups * get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=0)


@register_policy_loss(NAME)
def bapo_policy_loss(
    old_log_prob: Tensor,  # [sequences, tokens]: under the policy that sampled, as far as verl's mode knows it
    log_prob: Tensor,  # same shape; under the learner now, carries grad
    advantages: Tensor,  # same shape
    response_mask: Tensor,  # same shape
    loss_agg_mode: str = "token-mean",
    config: Any = None,  # verl's ActorConfig
    rollout_is_weights: Tensor | None = None,  # same shape, >= 0
) -> tuple[Tensor, dict[str, float]]:
    """verl's policy loss of one micro-batch, clipped at bounds solved by its scope, and what verl's actors log.

        L_t = -w_t min(r_t A_t, clip(r_t, low, high) A_t),   r_t = exp(log_prob_t - old_log_prob_t)

    w, verl's weight for what the rollout engine sampled otherwise, multiplies a token's signal as it does its loss.
    """
    options = _checked_options(config)
    mask = response_mask.bool()
    correction: Any = options.rollout_correction
    rejections: dict[str, float] = {}
    if correction.get("bypass_mode", False) or options.loss_mode == BYPASS:
        rollout_is_weights = None  # the ratio itself is to the policy that sampled
        mask, rejections = _without_rejected(log_prob, old_log_prob, mask, correction)
    if rollout_is_weights is not None:
        advantages = advantages * rollout_is_weights

    settings, update = options.clip_settings, _update_under_way.get()
    uses = _uses_of(mask, settings, update)
    table = update_table(log_prob, old_log_prob, advantages, mask, settings, uses=uses)
    if options.scope == "microbatch" or (update is not None and update.known):
        bounds = bounds_from_table(table, settings)
    elif update is None:
        raise ValueError(
            "policy_loss.scope='update' solves its bounds in verl's BaseEngine.train_batch, but this loss was called "
            "from elsewhere. Set actor_rollout_ref.actor.policy_loss.scope=microbatch."
        )
    elif update.collecting:
        update.tables.append(table)
        return torch.zeros((), device=log_prob.device), {}
    else:
        if update.bounds is None:  # the step's only micro-batch
            update.tables.append(table)
            update.bounds = update.solve(settings)
        bounds = update.bounds

    dual_clip = options.dual_clip
    clipped = clipped_at(bounds, log_prob, old_log_prob, advantages, mask, uses=uses, dual_clip=dual_clip)
    totals = config.global_batch_info  # of the whole step
    loss = agg_loss(loss_mat=clipped.loss, loss_mask=mask, loss_agg_mode=loss_agg_mode, **totals)

    statistics = clip_statistics(clipped.tokens, clipped.retained)
    count = mask.sum().clamp(min=1)
    metrics = averageable({**bounds.metrics(), **statistics}) | {
        "actor/pg_clipfrac": (mask & ~clipped.retained).sum() / count,
        "actor/ppo_kl": -clipped.tokens.log_ratio.detach().sum() / count,
    }
    numbers = floats_of(metrics)
    refuse_nan(numbers["bapo/share"], "log-probs, advantages or rollout_is_weights")
    return loss, numbers | rejections


def _bypass_mode(**arguments: Any) -> Any:
    """verl's loss of this name, unless the actor's options say that it stands for ours."""
    ours = _options_of(arguments.get("config")) is not None
    return (bapo_policy_loss if ours else verl_bypass_mode)(**arguments)


register_policy_loss(BYPASS)(_bypass_mode)


def _uses_of(mask: Tensor, settings: ClipSettings, update: _Update | None) -> Tensor | None:
    """How often each token was trained on before this optimizer step, if there is a bound that needs it."""
    if settings.rule_of_used is None:
        return None
    if update is None or update.uses is None:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.{settings.rule_of_used} needs the epoch, which we count in verl's "
            "TrainingWorker.train_mini_batch, but this loss was called from elsewhere. Set "
            "policy_loss.objective=brake_all or grpo, which do not need it, or train through that method, as verl does."
        )
    return torch.full_like(mask, update.uses, dtype=torch.int64)


def _checked_options(config: Any) -> BapoPolicyLossConfig:
    options = _options_of(config)
    if options is None:
        raise ValueError(
            f"loss_mode={NAME!r} needs its own options, so that verl cannot rename the loss behind its back. Set "
            f"actor_rollout_ref.actor.policy_loss._target_={TARGET}."
        )
    low, high = config.get("clip_ratio_low", None), config.get("clip_ratio_high", None)
    if any(epsilon not in (None, DEFAULT_EPSILON) for epsilon in (low, high, config.get("clip_ratio", None))):
        given = f"actor.clip_ratio={config.get('clip_ratio')}, clip_ratio_low={low}, clip_ratio_high={high}"
        raise ignored_epsilons(given, "policy_loss.low and policy_loss.high")
    return options


def _without_rejected(
    log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, correction: Any
) -> tuple[Tensor, dict[str, float]]:
    """The mask without what verl's rejection sampling takes out, exactly as verl's own bypass loss does it."""
    if correction.get("rollout_rs", None) is None:
        return mask, {}
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    with torch.no_grad():
        _, kept, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=log_prob,
            rollout_log_prob=rollout_log_prob,
            response_mask=mask,
            rollout_rs=correction.get("rollout_rs"),
            rollout_rs_threshold=correction.get("rollout_rs_threshold", None),
        )
    return kept.bool(), metrics
