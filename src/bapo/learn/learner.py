"""One update: forward, bounds, backward, step. The version counter lives here.

All micro-batches of an update share one denominator and, unless scope is `microbatch`, one pair of clip bounds, so that
how it is cut changes nothing but rounding. With several micro-batches the bounds need every token's ratio before the
first backward pass: one forward pass without gradients comes first. With a single micro-batch it is not needed.

The model stays in eval mode: dropout would make the learner's log-probs differ from the sampler's for no reason. The
learner never samples and does not know who did.

On a GPU the host waits once per update, for the gradient norm and all metrics together. Passes and loss use
deterministic algorithms only, so that the same update gives the same weights, bit for bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds, bounds_from_table
from bapo.core.entropy_rule import ratio_profile, staleness_histogram, update_statistics
from bapo.core.logprobs import token_logprobs
from bapo.core.loss import PolicyLoss, clean_tokens, policy_loss, update_table, weigh_negatives
from bapo.core.objectives import Tokens
from bapo.core.reduction import Reduction, denominator_of
from bapo.core.settings import ClipSettings
from bapo.learn.forward import can_pack, compiled_layers, hidden_states, layers_of
from bapo.learn.optimizer import Optimizer
from bapo.types import TokenBatch

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearnerSettings:
    """How updates are taken."""

    objective: str = "bapo"
    clip: ClipSettings = field(default_factory=ClipSettings)
    scope: Literal["update", "microbatch"] = "update"
    """Which tokens share one pair of clip bounds."""
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
    activation_checkpointing: bool = False
    """Whether layers keep only their inputs for the backward pass and are computed again there."""
    staleness_bins: int = 16
    """Ages counted one by one in the staleness histogram; older tokens share the last bin."""
    compile: bool = False
    """Run the layers compiled by torch."""


@dataclass(frozen=True)
class Update:
    """What one update did."""

    version: int
    """The learner's version after it."""
    tokens: int
    """Response tokens trained on."""
    metrics: dict[str, float | list[float]]


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
        # Without it, deterministic matrix products are refused; some versions of torch look once, at the first of all.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.model = model.eval()
        _check_head(model)
        self.settings = settings
        self.version = 0
        self.packed = can_pack(model)
        if settings.activation_checkpointing and not layers_of(model):
            raise ValueError(
                f"learn.activation_checkpointing=True, but {type(model).__name__} has no layers that transformers can "
                "checkpoint. Set it to False and lower learn.micro_tokens to save memory."
            )
        if settings.compile and not layers_of(model):
            raise ValueError(
                f"learn.compile=True, but {type(model).__name__} has no layers to compile. Set it to False."
            )
        self.compiled = compiled_layers(model) if settings.compile else None
        self.optimizer = Optimizer(
            model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )

    @property
    def device(self) -> torch.device:
        """Where batches are expected."""
        device: torch.device = self.model.device
        return device

    @property
    def padded(self) -> bool:
        """Whether forward passes pad; `pack` cuts micro-batches accordingly."""
        return not self.packed

    def step(self, batches: Sequence[TokenBatch]) -> Update:
        """One optimizer step on the tokens of all micro-batches."""
        settings = self.settings
        self.optimizer.forget_gradients()  # of a step that failed half-way
        if settings.objective == "m2po" and len(batches) > 1:
            raise ValueError(
                f"objective m2po finds its bounds over all tokens of an update, but this one is cut into "
                f"{len(batches)} micro-batches. Raise learn.micro_tokens until it fits into one."
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
        solves_once = settings.objective == "bapo" and settings.scope == "update" and len(batches) > 1
        bounds = self._solve_over(batches) if solves_once else None
        outputs = [self._backward(batch, bounds, cast(Tensor, denominator)) for batch in batches]
        return self.descend(batches, partial(self._metrics, batches, outputs))

    def descend(
        self,
        batches: Sequence[TokenBatch],
        metrics: Callable[[Tensor], dict[str, float | list[float]]],  # gradient norm -> what to log of the update
    ) -> Update:
        """The end of every update, whatever its loss: clip the gradients, and step if they are finite."""
        settings = self.settings
        lr = learning_rate(self.version, settings)
        logged = metrics(self.optimizer.clip(settings.clip_norm)) | {"lr": lr}
        if not math.isfinite(cast(float, logged["grad_norm"])):
            self.optimizer.forget_gradients()
            raise FloatingPointError(
                f"the gradient norm is {logged['grad_norm']} at version {self.version}; the weights were not changed. "
                f"Lower learn.lr (now {settings.lr}), or look at the last responses for odd ones."
            )
        self.optimizer.step(lr)
        self.version += 1
        return Update(self.version, sum(len(batch.targets) for batch in batches), logged)

    def states(self, batch: TokenBatch) -> Tensor:
        """The hidden state that predicts each response token, [tokens, width]."""
        recompute = self.settings.activation_checkpointing
        with deterministic(self.device):  # compiled layers must see the same switch as in the backward pass
            states = hidden_states(self.model, batch, packed=self.packed, recompute=recompute, compiled=self.compiled)
        return states.index_select(0, batch.predicts)

    def logprobs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each response token under the current weights."""
        head = self.model.get_output_embeddings()
        return token_logprobs(
            self.states(batch),
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
        with deterministic(self.device):
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
        with deterministic(self.device):
            result.loss.backward()  # type: ignore[no-untyped-call]
        return _Output(logprobs.detach(), entropy.detach(), result)

    def _metrics(
        self, batches: Sequence[TokenBatch], outputs: list[_Output], grad_norm: Tensor
    ) -> dict[str, float | list[float]]:
        """Diagnostics over the tokens of the whole update, read from the device in one transfer."""
        every = torch.ones(
            sum(len(batch.targets) for batch in batches), dtype=torch.bool, device=batches[0].targets.device
        )
        tokens = clean_tokens(
            torch.cat([output.logprobs for output in outputs]),
            torch.cat([batch.behavior_logprobs for batch in batches]),
            torch.cat([batch.advantages for batch in batches]),
            every,
        )
        entropy = torch.cat([output.entropy for output in outputs])
        result = outputs[0].result
        versions = torch.cat([batch.versions for batch in batches])
        ages = (self.version - versions).double()
        scalars: dict[str, Tensor] = {"loss": torch.stack([output.result.loss.detach() for output in outputs]).sum()}
        searched = {name: result.metrics[name] for name in SEARCH if name in result.metrics}
        if self.settings.objective == "bapo" and self.settings.scope == "microbatch" and len(outputs) > 1:
            searched.pop("stop")  # each part has a reason of its own; of the rest, the mean
            searched = {n: torch.stack([o.result.metrics[n] for o in outputs]).double().mean() for n in searched}
        scalars |= searched
        scalars |= update_statistics(
            tokens,
            torch.cat([output.result.retained for output in outputs]),
            settings=self.settings.clip,
            bounds=result.bounds and replace(result.bounds, low=scalars["clip_low"], high=scalars["clip_high"]),
            entropy=entropy,
            trained=self._trained_on(tokens, batches, outputs),
        )
        scalars |= {"staleness_mean": ages.mean(), "staleness_max": ages.max()}
        vectors = {
            "staleness_histogram": staleness_histogram(
                versions, every, version=self.version, bins=self.settings.staleness_bins
            ),
            **ratio_profile(tokens, entropy),
        }
        # float64 holds each of them exactly, the counts too.
        stacked = torch.stack([value.double() for value in [*scalars.values(), grad_norm]])
        *values, norm = torch.cat([*(vector.double() for vector in vectors.values()), stacked]).tolist()
        numbers: dict[str, float | list[float]] = {}
        for name, vector in vectors.items():
            head, values = values[: len(vector)], values[len(vector) :]
            numbers[name] = [int(count) for count in head] if name.endswith("_histogram") else head
        return numbers | dict(zip(scalars, values, strict=True)) | {"tokens": float(len(every)), "grad_norm": norm}

    def _trained_on(self, tokens: Tokens, batches: Sequence[TokenBatch], outputs: list[_Output]) -> Tokens | None:
        """The tokens with the advantages that the loss saw; None where those are the advantages themselves."""
        if self.settings.objective != "bapo" or self.settings.clip.remainder == "leave":
            return None
        weights = [cast(ClipBounds, output.result.bounds).negative_weight for output in outputs]
        return weigh_negatives(
            tokens,
            torch.cat([cast(Tensor, w).expand(len(batch.targets)) for w, batch in zip(weights, batches, strict=True)]),
        )


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Inside, CUDA operations add in a fixed order. FlashAttention's backward pass would not, by default.

    One process-wide switch, so it is on no longer than needed. An operation that has no deterministic form raises.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # for debugging, and not free
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling


@torch.no_grad()
def _check_head(model: Any) -> None:
    """The head is applied here, in chunks: it must be all there is between hidden states and logits."""
    config = model.config.get_text_config()
    ids = torch.arange(4, device=model.device)[None] % config.vocab_size
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise ValueError(
            f"the output head of {type(model).__name__} is a {type(head).__name__}; the learner multiplies by a plain "
            "Linear and would leave out what it adds. Keep adapters off the head."
        )
    cap = getattr(config, "final_logit_softcapping", None)  # a few small logits would not show it
    if cap is not None:
        raise ValueError(
            f"{type(model).__name__} soft-caps its logits after the output head (final_logit_softcapping={cap:g}); the "
            "learner's log-probs would not be the sampler's. Use a model without soft-capping: Gemma 2 has it, Gemma 3 "
            "has not."
        )
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours = torch.nn.functional.linear(states, head.weight, getattr(head, "bias", None)).float()
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output head (scaling or soft-capping), by up to "
            f"{float((ours - theirs).abs().max()):.3g}; the learner's log-probs would not be the sampler's. Use a "
            "model without logit scaling or soft-capping."
        )


SEARCH = ("clip_low", "clip_high", "share_at_start", "share_at_end", "stop", "negative_weight")
"""Metrics of the bounds that the diagnostics do not recompute."""


@dataclass(frozen=True)
class _Output:
    """What one micro-batch left behind."""

    logprobs: Tensor
    entropy: Tensor
    result: PolicyLoss
