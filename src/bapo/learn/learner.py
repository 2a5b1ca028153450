"""One update: forward, bounds, backward, step. The version counter lives here.

All micro-batches of an update share one pair of clip bounds (scope `update`) and one denominator, so that how it is cut
changes nothing but rounding. With several micro-batches the bounds need every token's ratio before the first
backward pass: one forward pass without gradients comes first. With a single micro-batch it is not needed.

The model stays in eval mode: dropout would make the learner's log-probs differ from the sampler's for no reason. The
learner never samples and does not know who did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds, bounds_from_table
from bapo.core.entropy_rule import diagnose, staleness_histogram
from bapo.core.logprobs import token_logprobs
from bapo.core.loss import PolicyLoss, clean_tokens, policy_loss, update_table
from bapo.core.reduction import Reduction, denominator_of
from bapo.core.settings import ClipSettings
from bapo.types import TokenBatch

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearnerSettings:
    """How updates are taken."""

    objective: str = "bapo"
    clip: ClipSettings = field(default_factory=ClipSettings)
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the objective, such as low and high of grpo."""
    reduction: Reduction = "token_mean"
    length: int | None = None
    """Normaliser of reduction="fixed_length"."""
    temperature: float = 1.0
    """The one tokens were sampled at, so that ratios compare like with like."""
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_updates: int = 0
    schedule: Schedule = "constant"
    total_updates: int = 1
    """Where linear and cosine schedules reach zero."""
    staleness_bins: int = 16
    """Ages counted one by one in the staleness histogram; older tokens share the last bin."""


@dataclass(frozen=True)
class Update:
    """What one update did."""

    version: int
    """The learner's version after it."""
    tokens: int
    """Response tokens trained on."""
    metrics: dict[str, float | list[int]]


def learning_rate(update: int, settings: LearnerSettings) -> float:
    """Linear warm-up, then constant, or linear or cosine decay to zero at total_updates. Updates count from 0."""
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, settings.total_updates - settings.warmup_updates)
    progress = min(1.0, (update - settings.warmup_updates) / span)
    if settings.schedule == "linear":
        return settings.lr * (1 - progress)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))


class Learner:
    """A model, its optimizer and the number of updates taken."""

    def __init__(self, model: Any, settings: LearnerSettings) -> None:
        self.model = model.eval()
        _check_head(model)
        self.settings = settings
        self.version = 0
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=settings.betas,
        )

    def step(self, batches: Sequence[TokenBatch]) -> Update:
        """One optimizer step on the tokens of all micro-batches."""
        settings = self.settings
        if settings.objective == "m2po" and len(batches) > 1:
            raise ValueError(
                f"objective m2po finds its mask over all tokens of an update, but this one is cut into {len(batches)} "
                "micro-batches. Raise learn.micro_tokens until it fits into one."
            )
        denominator = sum(
            denominator_of(
                torch.ones_like(batch.targets, dtype=torch.bool),
                settings.reduction,
                sequence_ids=batch.sequence_ids,
                length=settings.length,
            )
            for batch in batches
        )
        bounds = self._solve_over(batches) if settings.objective == "bapo" and len(batches) > 1 else None
        outputs = [self._backward(batch, bounds, cast(Tensor, denominator)) for batch in batches]

        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm).item()
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"the gradient norm is {grad_norm} at version {self.version}; the weights were not changed. Lower "
                f"learn.lr (now {settings.lr}), or look at the last rollouts for odd responses."
            )
        lr = learning_rate(self.version, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics = self._metrics(batches, outputs) | {"grad_norm": grad_norm, "lr": lr}
        self.version += 1
        return Update(self.version, sum(len(batch.targets) for batch in batches), metrics)

    def logprobs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each response token under the current weights."""
        states = self.model.base_model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        head = self.model.get_output_embeddings()
        return token_logprobs(
            states.last_hidden_state[batch.predicts],
            head.weight,
            batch.targets,
            bias=getattr(head, "bias", None),
            temperature=self.settings.temperature,
        )

    @torch.no_grad()
    def _solve_over(self, batches: Sequence[TokenBatch]) -> ClipBounds:
        """Bounds from the summed tables of all micro-batches."""
        tables = [
            update_table(
                self.logprobs(batch)[0],
                batch.behavior_logprobs,
                batch.advantages,
                torch.ones_like(batch.targets, dtype=torch.bool),
                self.settings.clip,
            )
            for batch in batches
        ]
        return bounds_from_table(torch.stack(tables).sum(0), self.settings.clip)

    def _backward(self, batch: TokenBatch, bounds: ClipBounds | None, denominator: Tensor) -> _Output:
        settings = self.settings
        logprobs, entropy = self.logprobs(batch)
        result = policy_loss(
            logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            torch.ones_like(batch.targets, dtype=torch.bool),
            objective=settings.objective,
            settings=settings.clip if settings.objective == "bapo" and bounds is None else None,
            bounds=bounds,
            reduction=settings.reduction,
            denominator=denominator,
            sequence_ids=batch.sequence_ids,
            **settings.options,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        return _Output(logprobs.detach(), entropy.detach(), result)

    def _metrics(self, batches: Sequence[TokenBatch], outputs: list[_Output]) -> dict[str, float | list[int]]:
        """Diagnostics over the tokens of the whole update."""
        every = torch.ones(
            sum(len(batch.targets) for batch in batches), dtype=torch.bool, device=batches[0].targets.device
        )
        tokens = clean_tokens(
            torch.cat([output.logprobs for output in outputs]),
            torch.cat([batch.behavior_logprobs for batch in batches]),
            torch.cat([batch.advantages for batch in batches]),
            every,
        )
        result = outputs[0].result
        metrics: dict[str, Tensor] = {"loss": torch.stack([output.result.loss.detach() for output in outputs]).sum()}
        metrics |= {name: result.metrics[name] for name in SEARCH if name in result.metrics}
        metrics |= diagnose(
            tokens,
            torch.cat([output.result.retained for output in outputs]),
            settings=self.settings.clip,
            bounds=result.bounds,
            entropy=torch.cat([output.entropy for output in outputs]),
        )
        versions = torch.cat([batch.versions for batch in batches])
        ages = (self.version - versions).double()
        histogram = staleness_histogram(versions, every, version=self.version, bins=self.settings.staleness_bins)
        numbers: dict[str, float | list[int]] = {name: float(value) for name, value in metrics.items()}
        return numbers | {
            "staleness_mean": float(ages.mean()),
            "staleness_max": float(ages.max()),
            "staleness_histogram": histogram.tolist(),
            "tokens": float(len(every)),
        }


@torch.no_grad()
def _check_head(model: Any) -> None:
    """The head is applied here, in chunks: it must be all there is between hidden states and logits."""
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    head = model.get_output_embeddings()
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours = torch.nn.functional.linear(states, head.weight, getattr(head, "bias", None)).float()
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output head (scaling or soft-capping), by up to "
            f"{float((ours - theirs).abs().max()):.3g}; the learner's log-probs would not be the sampler's. Use a "
            "model without logit scaling or soft-capping."
        )


SEARCH = ("clip_low", "clip_high", "share_at_start", "share_at_end", "stop")
"""Metrics of the bounds that the diagnostics do not recompute."""


@dataclass(frozen=True)
class _Output:
    """What one micro-batch left behind."""

    logprobs: Tensor
    entropy: Tensor
    result: PolicyLoss
