"""BAPO inside TRL: a `GRPOTrainer` script changes two names.

    from bapo.adapters.trl import BapoConfig, BapoTrainer

    trainer = BapoTrainer(model, reward_funcs=reward, args=BapoConfig(num_iterations=4), train_dataset=dataset)
    trainer.train()

TRL's loss reads the two epsilons it clips with from the trainer, after it has computed the log-probs. So no code of TRL
is copied: once the log-probs of a loss call are there, `BapoTrainer` solves the bounds and sets the epsilons for the
rest of that call. Generation, rewards, advantages, reduction, logging and hub remain TRL's own.

    scope update        one pair of bounds for the whole optimizer step, over all its micro-batches and processes, with
                        one collective. With gradient accumulation a search needs every log-prob before the first
                        backward pass: one more forward pass, without gradients, per micro-batch after the first.
                        The brake needs it only in updates that train on tokens again, and fixed bounds never do; the
                        share is then summed up as the micro-batches come.
    scope microbatch    each loss call on its own; no collective and no further pass, but bounds from fewer tokens.

With the brake, the default, and with `bapo_used_low`, tokens that were trained on before have another lower bound. TRL
visits a generation once per iteration, in the same slices, so all tokens of a loss call were used equally often, and
TRL's count of steps says how often (`_uses`). The two epsilons of a call are then enough.

Evaluation is left to TRL: there the policy that sampled is the one that is scored, every ratio is 1, and no clip acts.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapo.adapters.shared import averaged, clamped_at, depends_on_tokens_of, refuse_nan, warn_never_used
from bapo.adapters.trl_config import LOSS_TYPES, TESTED_VERSIONS, BapoConfig, GRPOTrainer, check_trl, trl_version
from bapo.core.bounds import ClipBounds, bounds_from_table
from bapo.core.checks import check_mask
from bapo.core.controller import averageable
from bapo.core.entropy_rule import entropy_statistics
from bapo.core.loss import update_table
from bapo.core.tokens import Tokens, retained_by

__all__ = ["LOSS_TYPES", "TESTED_VERSIONS", "BapoConfig", "BapoTrainer", "check_trl"]

FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]
PAPER = "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with \
Adaptive Clipping"
CITATION = f"""\
@article{{xi2025bapo,
    title        = {{{{{PAPER}}}}},
    author       = {{Zhiheng Xi and Xin Guo and Yang Nan and Enyu Zhou and Junrui Shen and Wenxiang Chen and others}},
    year         = 2025,
    eprint       = {{arXiv:2510.18927}},
}}"""
"""For the model card."""


class _Part(NamedTuple):
    """What one loss call leaves behind for the log of its update."""

    bounds: ClipBounds
    columns: tuple[Tensor, ...]  # [tokens] each: log-probs, behaviour log-probs, advantages, mask, entropy, retained


@dataclass
class _Update:
    """One optimizer step under way."""

    batches: list[Any] = field(default_factory=list)  # as the data loader gave them, one per micro-batch
    first: int = 0  # TRL's count of micro-batches when the update began
    inputs: list[dict[str, Any]] = field(default_factory=list)  # the same, generated and scored by TRL
    tables: list[Tensor] = field(default_factory=list)  # of the signal, waiting to be summed
    bounds: ClipBounds | None = None  # once they are solved for all of it
    parts: list[_Part] = field(default_factory=list)  # the loss calls done so far


class BapoTrainer(GRPOTrainer):
    """`GRPOTrainer` with the clip bounds of BAPO (arXiv:2510.18927), solved for every update."""

    epsilon_low: float | Tensor  # what TRL's loss clips with: 1 - epsilon_low and 1 + epsilon_high
    epsilon_high: float | Tensor
    _step: int  # TRL's count of micro-batches, which picks each one's inputs

    _tag_names = ["trl", "grpo", "bapo"]  # noqa: RUF012
    _name = "BAPO"
    _paper = {"title": PAPER, "id": "2510.18927", "citation": CITATION}  # noqa: RUF012

    def __init__(self, model: Any, reward_funcs: Any = None, args: BapoConfig | None = None, *rest: Any, **kwargs: Any):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = BapoConfig(f"{name.rstrip('/').split('/')[-1] or 'model'}-BAPO")
        if not isinstance(args, BapoConfig):
            raise ValueError(
                f"args is a {type(args).__name__}; BapoTrainer needs a BapoConfig, which takes the same options."
            )
        if args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0:
            warnings.warn(
                f"every token is trained on once, by the policy that sampled it (num_iterations={args.num_iterations}, "
                f"steps_per_generation={args.steps_per_generation}, gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}): all ratios are 1, no bound binds, and this run is plain GRPO. "
                "Raise num_iterations or steps_per_generation to reuse samples.",
                stacklevel=2,
            )
        elif args.num_iterations == 1:
            warn_never_used(args.clip_settings, "bapo_", "num_iterations=1")
        self._settings = args.clip_settings
        self._update = _Update()
        self._loss_inputs: dict[str, Any] | None = None  # of the loss call under way
        super().__init__(model, reward_funcs, args, *rest, **kwargs)

    @property
    def _solves_ahead(self) -> bool:
        """Whether the bounds of this update need log-probs that its first loss call does not have."""
        return self.args.bapo_scope == "update" and len(self._update.batches) > 1 and not self._sums_afterwards

    @property
    def _sums_afterwards(self) -> bool:
        """Whether the bounds are known without the tokens, so that only the share of the update waits for all of it."""
        first, count = self._update.first, max(1, len(self._update.batches))
        used = any(self._uses(step) for step in range(first, first + count))
        return self.args.bapo_scope == "update" and not depends_on_tokens_of(self._settings, used=used)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of one optimizer step: the moment an update begins."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._update = _Update(batches, self._step)
        return batches, num_items

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's, but all micro-batches of the update at once where bounds need them; its step counter picks each."""
        if not (self.model.training and self._solves_ahead):
            return super()._prepare_inputs(generation_batch)
        update = self._update
        if not update.inputs:
            for offset, batch in enumerate(update.batches):
                self._step = update.first + offset
                update.inputs.append(super()._prepare_inputs(batch))
            self._step = update.first
        return update.inputs[self._step - update.first]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's; after its last micro-batch, the update is logged."""
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients and self._update.parts:
            self._log_update()
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, with the epsilons of this update's bounds while it runs."""
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        update, configured = self._update, (self.epsilon_low, self.epsilon_high)
        if self._solves_ahead and update.bounds is None:
            update.tables = list(self._tables_ahead(1 if inputs is update.inputs[0] else 0))
        done, self._loss_inputs = len(update.parts), inputs
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None
            self.epsilon_low, self.epsilon_high = configured
        assert len(update.parts) == done + 1, f"TRL {trl_version} computed a loss without asking for log-probs once"
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; inside a loss call this is the last moment before it reads its epsilons."""
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_inputs is not None:
            self._set_epsilons(self._loss_inputs, outputs[0].detach(), outputs[1].detach())
        return outputs

    def _set_epsilons(self, inputs: dict[str, Any], logprobs: Tensor, entropy: Tensor) -> None:
        arguments = self._four_tensors(inputs, logprobs, entropy)
        uses = self._uses(self._step)
        bounds = self._bounds_for(inputs, arguments, uses)
        # The one host read of a solve, as TRL reads its metrics. 1 - (1 - low) is low again: float32 in float64.
        used_low = bounds.low if bounds.used_low is None else torch.zeros_like(bounds.low) + bounds.used_low
        low, high, share, used_low = torch.stack([bounds.low, bounds.high, bounds.share, used_low]).tolist()
        refuse_nan(share, "log-probs, advantages or importance ratios")
        if used := bounds.used_low is not None and uses > 0:
            low = used_low
        lower, upper = clamped_at(low, high, used=used, advantages=arguments[2], dtype=logprobs.dtype)
        self.epsilon_low, self.epsilon_high = 1 - lower, upper - 1
        tokens = Tokens(*arguments[:3], check_mask(arguments[3]))
        retained = retained_by(tokens.ratio, tokens.advantages, low, high) & tokens.within & ~self._capped(tokens)
        columns = (tokens.logprobs, tokens.behavior_logprobs, tokens.advantages, tokens.mask, entropy.float(), retained)
        self._update.parts.append(_Part(bounds, tuple(column.flatten() for column in columns)))

    def _bounds_for(self, inputs: dict[str, Any], arguments: FourTensors, uses: int) -> ClipBounds:
        """The bounds of a loss call, from no more tokens than they need."""
        update = self._update
        if update.bounds is not None:
            return update.bounds
        if self._solves_ahead:
            own = inputs is update.inputs[0]  # unless a subclass computes its loss in several calls
            update.bounds = self._solve([self._table(*arguments, uses)] * own + update.tables)
            return update.bounds
        table = self._table(*arguments, uses)
        if not self._sums_afterwards:
            return self._solve([table])
        update.tables.append(table)
        return bounds_from_table(torch.zeros_like(table, device="cpu"), self._settings)

    def _solve(self, tables: Iterable[Tensor]) -> ClipBounds:
        """Bounds from the sum of the tables, over processes too (one collective) where the scope is the update."""
        table = torch.stack(list(tables)).sum(0)
        if self.args.bapo_scope == "update":
            table = self.accelerator.reduce(table, reduction="sum")
        return bounds_from_table(table, self._settings)

    @torch.no_grad()
    def _tables_ahead(self, start: int) -> Iterator[Tensor]:
        """The signal table of each micro-batch of the update from this position on, before any of them is trained on.

        In eval mode: no dropout, so no random number is drawn, and no gradient checkpointing.
        """
        parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
        needs_entropy = self.top_entropy_quantile < 1.0
        for position, inputs in enumerate(self._update.inputs[start:], start):
            mask, entropy = inputs["completion_mask"], None
            logprobs = torch.zeros(mask.shape, device=mask.device)
            if (
                "old_per_token_logps" in inputs  # otherwise this policy sampled and every ratio is 1, whatever it says
                or self._settings.weight != "none"
                or needs_entropy
                or self.off_policy_mask_threshold is not None
            ):
                self.model.eval()
                try:
                    logprobs, entropy, _ = super()._get_per_token_logps_and_entropies(
                        self.model,
                        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                        torch.cat([inputs["prompt_mask"], mask], dim=1),
                        mask.size(1),
                        compute_entropy=needs_entropy,
                        **{name: inputs[name] for name in parameters if name in inputs},
                    )
                finally:
                    self.model.train()
            yield self._table(*self._four_tensors(inputs, logprobs, entropy), self._uses(self._update.first + position))

    def _uses(self, step: int) -> int:
        """How often the micro-batch at this count of TRL's was trained on before its update.

        TRL keeps a generation in slices and visits each of them once per iteration, `steps_per_generation` calls apart.
        Visits since the first call of this update do not count.
        """
        slices = self.args.steps_per_generation
        visits: int = step % (slices * self.num_iterations) // slices
        return max(0, visits - (step - self._update.first) // slices)

    def _table(
        self, logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor, uses: int
    ) -> Tensor:
        """The signal table of one micro-batch. A token past delta has no gradient and does not count as one."""
        if self.args.delta is not None and self._settings.measure == "gradient":
            tokens = Tokens(logprobs, behavior_logprobs, advantages, check_mask(mask))
            mask = tokens.mask & ~self._capped(tokens)
        counted = None if self._settings.rule_of_used is None else torch.full_like(mask, uses, dtype=torch.int64)
        return update_table(logprobs, behavior_logprobs, advantages, mask, self._settings, uses=counted)

    def _capped(self, tokens: Tokens) -> Tensor:
        """Negative tokens whose loss TRL holds constant: delta |A| where r > delta, which no high bound is above."""
        delta = math.inf if self.args.delta is None else self.args.delta
        return (tokens.advantages < 0) & (tokens.ratio > delta)

    def _four_tensors(self, inputs: dict[str, Any], logprobs: Tensor, entropy: Tensor | None) -> FourTensors:
        """The core's log-probs, behaviour log-probs, advantages and mask, with every mask and weight TRL's loss has."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        behavior_logprobs = inputs.get("old_per_token_logps", logprobs)
        trained = mask
        if self.top_entropy_quantile < 1.0:
            trained = trained * self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile)
        if self.off_policy_mask_threshold is not None:
            trained = trained * self.get_off_policy_mask(
                advantages=advantages,
                per_token_logps=logprobs,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", behavior_logprobs),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if self.use_vllm and self.vllm_importance_sampling_correction:
            advantages = advantages * inputs["importance_sampling_ratio"]
        return logprobs, behavior_logprobs, advantages.expand_as(mask), trained

    def _log_update(self) -> None:
        """The update's bounds, share and Entropy-Clip quadrants, into TRL's metrics: one collective, one host read."""
        parts, solved = self._update.parts, [part.bounds for part in self._update.parts]
        if self._sums_afterwards:
            solved = [self._solve(self._update.tables)]
            refuse_nan(float(solved[0].share), "log-probs, advantages or importance ratios")
        self._update = _Update()
        *tokens, entropy, retained = (
            torch.cat(column) for column in zip(*(part.columns for part in parts), strict=True)
        )
        statistics = averageable(entropy_statistics(Tokens(*tokens), entropy, retained))
        del statistics["bapo/entropy"]  # TRL logs it
        known = [averageable(bounds.metrics()) for bounds in solved]
        numbers = averaged(known, statistics, lambda values: self.accelerator.reduce(values, reduction="mean"))
        for name, value in numbers.items():
            if not math.isnan(value):
                self._metrics["train"][name].append(value)
