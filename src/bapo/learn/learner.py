"""One update: pack, forward, bounds, backward, step. The version counter lives here.

All micro-batches of an update share one denominator and, unless scope is `microbatch`, one pair of clip bounds, so the
way an update is cut changes nothing but rounding. With several micro-batches the bounds need every token's ratio before
the first backward pass, so all but the first are passed through the model once more, without gradients.
Several ranks can take an update together (`fsdp.py`). The sums over ranks that this needs are taken here; without a
process group, this process is the only rank.

The model stays in eval mode: dropout would make the learner's log-probs differ from the sampler's for no reason. The
learner never samples and does not know what did.

On a GPU the host waits once per update, for the gradient norm and all metrics together. An update whose loss or
gradient is not finite is skipped (`health.py`): it changes no weight, but counts as a version. So is one whose fresh
tokens show that sampler and learner do not mean the same policy (`health.py`). Passes and loss use deterministic
algorithms only, so that the same update gives the same weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds, bounds_from_table, with_brake
from bapo.core.brake import DRIFT_SUMS
from bapo.core.checks import check_finite
from bapo.core.loss import policy_loss, update_table
from bapo.core.objectives import OBJECTIVES
from bapo.core.peers import has_fallen
from bapo.core.reduction import denominator_of
from bapo.core.settings import BRAKES
from bapo.core.tokens import Tokens
from bapo.learn.diagnostics import Output, of_all_ranks, response_ess, update_metrics
from bapo.learn.forward import allow_deterministic_products, can_pack, deterministic
from bapo.learn.head import Predicted, WholeModel
from bapo.learn.health import Drift, NotFinite, Skipped, cause_of, check_logprobs, drift, logged_tokens
from bapo.learn.learner_settings import LearnerSettings, ess_factor, learning_rate
from bapo.learn.optimizer import optimizer_for
from bapo.learn.packing import ALL, Part, empty_batch, pack, pack_contexts
from bapo.learn.ranks import CANNOT, Ranks, failing_together, largest, summed
from bapo.learn.reference import Reference, mean_gap
from bapo.learn.state import fingerprint, load_state, save_state
from bapo.learn.terms import EntropyBonus, added_terms
from bapo.types import Group, Metrics, TokenBatch

DECIDE = {"grad_norm": "the gradient norm", "loss": "the loss", "imitation/loss": "the loss"}
"""Metrics that must be finite for an update to be taken."""


@dataclass(frozen=True)
class Update:
    """What one update did."""

    version: int
    """The learner's version after the update."""
    tokens: int
    """How many response tokens it trained on, on all ranks."""
    metrics: Metrics
    """Of the whole update, the same on all ranks."""
    skipped: Skipped | None = None
    """Why the update was not taken, if its numbers are not finite, or if sampler and learner have drifted apart."""
    drift: str = ""
    """How far sampler and learner are apart on fresh tokens, and why, if that is more than rounding explains."""


class Learns(Protocol):
    """What the loop and checkpoints need of a learner, wherever it is."""

    version: int

    def step(self, groups: Sequence[Group]) -> Update:
        """One optimizer step on the responses of these groups."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights as they are now, for an engine to load."""

    def save(self, directory: Path) -> None:
        """Write the state that `load` restores."""

    def load(self, directory: Path, *, version: int) -> None:
        """Restore what `save` wrote at this version."""

    def saved(self, checkpoint: Path) -> None:
        """Called when a checkpoint of the present version is complete."""


class Learner:
    """A model, its optimizer and the number of updates taken."""

    ranks: Ranks = None
    """The processes that take every update together; None: this one alone."""
    part: Part = ALL
    """Which part of every update's responses this rank takes."""
    reference: Reference | None = None
    """The weights that a KL penalty keeps the policy near; None without one."""
    first_gap: float | None = None
    """The mean gap of the first fresh tokens that this process has compared."""
    drift: Tensor | None = None
    """[1] float64, how far the tokens that the brake looks at had fallen in the last update that had any; None without
    a brake, and with sensor="update"."""

    def __init__(self, model: Any, settings: LearnerSettings, *, whole: WholeModel | None = None) -> None:
        """`whole`: the same model, made ready for passes; None to do that here."""
        allow_deterministic_products()
        self.model = model
        self.whole = whole or WholeModel(model, settings, packed=can_pack(model))
        self.settings = settings
        self.version = 0
        if settings.has_brake and settings.sensor == "previous":
            self.drift = torch.zeros(1, dtype=torch.float64)
        self.bonus = EntropyBonus(settings)
        self.optimizer = optimizer_for(
            model.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            offload=settings.offload_optimizer,
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.whole.device

    @property
    def precision(self) -> torch.dtype:
        """The coarsest precision that passes compute in."""
        kinds: set[torch.dtype] = {parameter.dtype for parameter in self.model.parameters()}
        return max(kinds, key=lambda kind: torch.finfo(kind).eps)

    @property
    def packed(self) -> bool:
        """Whether passes do without padding."""
        return self.whole.packed

    def step(self, groups: Sequence[Group]) -> Update:
        """One optimizer step on the responses of these groups."""
        settings = self.settings
        options: dict[str, Any] = {"estimator": settings.advantages, "weights": settings.reward_weights}
        options |= {"micro_tokens": settings.micro_tokens, "padded": not self.packed}
        options |= {"truncated": settings.truncated, "kl_in_reward": settings.kl_in_reward}
        with self.telling_others():
            if self.reference is not None:
                self.reference.add_logprobs(groups)
            batches = pack(groups, device=self.device, part=self.part, **options)
        update = self.step_on(batches)
        if self.reference is not None:
            self.reference.follow(update.version)
            update.metrics["kl_response"] = mean_gap(groups, settings)
        update.metrics["groups"] = float(len(groups))
        return update

    def step_on(self, batches: Sequence[TokenBatch]) -> Update:
        """One optimizer step on the tokens of all micro-batches."""
        self.optimizer.forget_gradients()  # left by a step that failed half-way
        with self.telling_others():
            self._check(batches)
        batches = self.filled_up(batches)
        settings = self._settings_of(batches)
        denominator = sum(
            denominator_of(_every(batch), settings.reduction, sequence_ids=batch.sequence_ids, length=settings.length)
            for batch in batches
        )
        denominator = summed(cast(Tensor, denominator), self.ranks)
        with failing_together(self.ranks):
            together = settings.solves_over_update and len(batches) > 1
            try:
                bounds, first = self._solve_over(batches, settings) if together else (None, None)
                outputs = [
                    self._backward(batch, settings, bounds, denominator, first if index == 0 else None)
                    for index, batch in enumerate(batches)
                ]
            except NotFinite:
                return self.skip(batches, "log-probs are not finite")
        metrics = partial(self._metrics, outputs, settings)
        update = self.descend(metrics, batches, partial(self._drift, outputs, batches))
        if self.drift is not None and "drift" in update.metrics:
            self.drift.fill_(cast(float, update.metrics["drift"]))
        self.bonus.follow(update.metrics)
        return update

    def _settings_of(self, batches: Sequence[TokenBatch]) -> LearnerSettings:
        """The settings of this update: with a fixed clip where the brake needs no look at its tokens.

        That is so where an earlier update decides, and where no token was trained on before. The second is looked for
        only if it saves a pass.
        """
        settings = self.settings
        if settings.objective not in BRAKES:
            return settings
        if self.drift is not None:
            return settings.at_drift(float(self.drift))
        if settings.clip.brake_on == "all" or settings.scope == "microbatch" or len(batches) == 1:
            return settings
        used = any(bool(batch.uses.any()) for batch in batches)
        return settings if largest(used, self.ranks, self.device) else settings.at_drift(0.0)

    def _check(self, batches: Sequence[TokenBatch]) -> None:
        """Refuse an update that this rank cannot take, before the ranks begin it together."""
        name = self.settings.objective
        if OBJECTIVES[name].whole_update and (len(batches) > 1 or self.ranks is not None):
            where = f"cut into {len(batches)} micro-batches" if self.ranks is None else "spread over several ranks"
            raise ValueError(
                f"objective {name} finds its bounds over all tokens of an update, but this one is {where}. Raise "
                "learn.micro_tokens until it fits into one, on one rank."
            )
        for batch in batches if self.ranks is not None else ():
            for name in ("behavior_logprobs", "advantages"):
                check_finite(name, getattr(batch, name), _every(batch), batch.sequence_ids)

    @contextmanager
    def telling_others(self) -> Iterator[None]:
        """Inside, an error of this rank also ends the update on the others, which are about to agree on its size."""
        try:
            yield
        except Exception:
            largest(CANNOT, self.ranks, self.device)
            raise

    def filled_up(self, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """These micro-batches, plus empty ones until there are as many as on the rank with the most."""
        missing = largest(len(batches), self.ranks, self.device) - len(batches)
        return [*batches, *(empty_batch(self.device) for _ in range(missing))]

    def descend(
        self,
        metrics: Callable[[Tensor], Metrics],  # gradient norm -> what to log about the update
        batches: Sequence[TokenBatch],
        compare: Callable[[Metrics], Drift | None] = lambda logged: None,
    ) -> Update:
        """Finish an update, whatever its loss: clip the gradients, and step if they and the loss are finite.

        `compare`: says from what is logged whether sampler and learner have drifted apart.
        """
        settings = self.settings
        logged = metrics(self.optimizer.clip(settings.clip_norm))
        for name, words in DECIDE.items():
            if not math.isfinite(value := cast(float, logged.get(name, 0.0))):
                with failing_together(self.ranks):
                    return self.skip(batches, f"{words} is {value}")
        with failing_together(self.ranks):
            drifted = compare(logged)
        if drifted is not None and drifted.refused:
            return self._refuse(drifted, logged)
        lr = learning_rate(self.version, settings)
        if settings.ess_reference is not None and "response_ess" in logged:  # a supervised update has none
            lr *= ess_factor(cast(float, logged["response_ess"]), settings.ess_reference)
        logged["lr"] = lr
        self.optimizer.step(lr)
        self.version += 1
        words = "" if drifted is None else drifted.words
        return Update(self.version, int(cast(float, logged["tokens"])), logged, drift=words)

    def _refuse(self, drifted: Drift, logged: Metrics) -> Update:
        """Count an update that is not taken, because its ratios mean nothing."""
        self.optimizer.forget_gradients()
        self.version += 1
        kept = {name: value for name, value in logged.items() if name == "tokens" or name.startswith("anchor_")}
        skipped = Skipped(drifted.words, drifted.tokens, drifted=True)
        return Update(self.version, len(drifted.tokens["logprobs"]), kept, skipped, drifted.words)

    @torch.no_grad()
    def skip(self, batches: Sequence[TokenBatch], seen: str) -> Update:
        """Count an update that is not taken; its tokens pass once more, for a dump. `seen`: what is not finite."""
        self.optimizer.forget_gradients()
        predicted = [self.logprobs(batch) for batch in batches]
        tokens = logged_tokens(batches, predicted, self.ranks, version=self.version)
        cause = cause_of(self.model, tokens, seen, self.ranks)
        self.version += 1
        count = len(tokens["logprobs"])
        return Update(self.version, count, {"tokens": float(count)}, Skipped(cause, tokens))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model with its name, as it is now, for an engine to load. These are not copies."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def save(self, directory: Path) -> None:
        """Write what `load` restores, if it is finite: this rank's part of it. The caller must keep the version."""
        save_state(directory, self.model, self.optimizer, self.noted, self.ranks)

    def load(self, directory: Path, *, version: int) -> None:
        """Restore what `save` wrote at this version, also on several ranks. KeyError if it belongs to another model."""
        load_state(directory, self.model, self.optimizer, self.noted, self.ranks)
        self.version = version

    def saved(self, checkpoint: Path) -> None:
        """Nothing is repeated from it in this process."""

    @property
    def noted(self) -> dict[str, Tensor]:
        """What a checkpoint must keep beside weights and optimizer, by name."""
        moving = {} if self.reference is None else self.reference.moving
        noted = self.bonus.noted | {f"reference.{name}": weight for name, weight in moving.items()}
        return noted if self.drift is None else noted | {"drift": self.drift}

    def fingerprint(self) -> int:
        """A number for the bits of all weights (masters, where there are some), the same for any number of ranks."""
        masters = {id(w): m for w, m in zip(self.optimizer.weights, self.optimizer.masters, strict=True)}
        return fingerprint((masters.get(id(p), p) for _, p in self.model.named_parameters()), self.ranks)

    def predicted(self, batch: TokenBatch, *, temperature: float, best: bool = False) -> Predicted:
        """What the current weights predict at each response token."""
        read = partial(self.whole.head, targets=batch.targets, temperature=temperature, best=best)
        return cast(Predicted, self.whole(batch, read))

    def logprobs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each response token under the current weights."""
        predicted = self.predicted(batch, temperature=self.settings.temperature)
        return predicted.logprobs, predicted.entropies

    def finite_logprobs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """The same, to be trained on. Raises NotFinite on all ranks where that is found already here."""
        logprobs, entropies = self.logprobs(batch)
        check_logprobs(logprobs, self.ranks)
        return logprobs, entropies

    @torch.no_grad()
    def next_logprobs(self, contexts: Sequence[Sequence[int]]) -> Tensor:  # [contexts, vocabulary] float32
        """Log-prob of every token after each context, at the temperature of sampling, under the current weights."""
        batch = pack_contexts(contexts, device=self.device)
        read = partial(self.whole.head.next_logprobs, temperature=self.settings.temperature)
        return cast(Tensor, self.whole(batch, read))

    def _solve_over(
        self, batches: Sequence[TokenBatch], settings: LearnerSettings
    ) -> tuple[ClipBounds, tuple[Tensor, Tensor]]:
        """Bounds from the summed tables of all micro-batches, on all ranks; log-probs and entropies of the first.

        The first one is passed last, and its pass is kept for the backward pass, which begins with it.
        """
        with torch.no_grad():
            later = [self._table(batch, self.finite_logprobs(batch)[0], settings) for batch in batches[1:]]
        first = self.finite_logprobs(batches[0])
        tables = [self._table(batches[0], first[0].detach(), settings), *later]
        return self._bounds(summed(torch.stack(tables).sum(0), self.ranks), settings), first

    @torch.no_grad()
    def _table(self, batch: TokenBatch, logprobs: Tensor, settings: LearnerSettings) -> Tensor:
        batch = self._masked(batch, logprobs)
        tokens = logprobs, batch.behavior_logprobs, batch.advantages, _every(batch)
        uses = batch.uses if settings.needs_uses else None
        return update_table(*tokens, settings.clip, uses=uses, log_kept=batch.log_kept)

    def _masked(self, batch: TokenBatch, logprobs: Tensor) -> TokenBatch:
        """The batch with advantage 0 for tokens that learn.opsm masks."""
        if self.settings.opsm is None:
            return batch
        given = logprobs, batch.behavior_logprobs, batch.advantages, _every(batch), batch.sequence_ids
        tokens = Tokens(*given, log_kept=batch.log_kept)
        masked = has_fallen(tokens, self.settings.opsm)
        if self.settings.opsm_on == "used":
            masked &= batch.uses.bool()
        return replace(batch, advantages=batch.advantages.masked_fill(masked, 0.0))

    def _bounds(self, table: Tensor, settings: LearnerSettings) -> ClipBounds:
        """The bounds of an update, with the brake where an earlier update puts it if that decides."""
        if self.drift is None:
            return bounds_from_table(table, settings.clip)
        bounds = bounds_from_table(table[:-DRIFT_SUMS], replace(settings.clip, brake=None, brake_on="used"))
        return with_brake(bounds, settings.clip, self.drift[0].to(table.device), bounds.low)

    def _backward(
        self,
        batch: TokenBatch,
        settings: LearnerSettings,
        bounds: ClipBounds | None,
        denominator: Tensor,
        predicted: tuple[Tensor, Tensor] | None,  # log-probs and entropies, if they are known already
    ) -> Output:
        solves = settings.solves_bounds and bounds is None
        logprobs, entropy = predicted or self.finite_logprobs(batch)
        if solves and self.drift is not None:
            table = self._table(batch, logprobs.detach(), settings)
            table = summed(table, self.ranks) if settings.solves_over_update else table
            bounds, solves = self._bounds(table, settings), False
        batch = self._masked(batch, logprobs.detach())
        with deterministic(self.device):
            result = policy_loss(
                logprobs,
                batch.behavior_logprobs,
                batch.advantages,
                _every(batch),
                objective="bapo" if settings.has_brake else settings.objective,
                settings=settings.clip if solves else None,
                bounds=bounds,
                reduction=settings.reduction,
                denominator=denominator,
                sequence_ids=batch.sequence_ids,
                uses=batch.uses if settings.needs_uses else None,
                loss_weights=batch.loss_weights if settings.reduction == "balanced" else None,
                log_kept=batch.log_kept,
                process_group=self.ranks if solves and settings.solves_over_update else None,
                **({} if settings.objective in BRAKES else settings.options),
            )
            more: dict[str, Any] = {"entropy_weight": self.bonus.weight, "denominator": denominator}
            for term in added_terms(batch, logprobs, entropy, self.settings, **more):
                result = replace(result, loss=result.loss + term)
            result.loss.backward()  # type: ignore[no-untyped-call]
        return Output(batch, logprobs.detach(), entropy.detach(), result)

    def _metrics(self, outputs: Sequence[Output], settings: LearnerSettings, grad_norm: Tensor) -> Metrics:
        shared = {"grad_norm": grad_norm.double()}  # the same on all ranks
        if self.settings.ess_reference is not None:
            with deterministic(self.device):
                shared["response_ess"] = response_ess(outputs, self.ranks)
        with_tokens = [output for output in of_all_ranks(outputs, self.ranks) if len(output.batch.targets)]
        return update_metrics(with_tokens, settings, self.settings, version=self.version, shared=shared)

    def _drift(self, outputs: Sequence[Output], batches: Sequence[TokenBatch], logged: Metrics) -> Drift | None:
        """What the fresh tokens of an update say about sampler and learner. Ranks decide alike: all have `logged`."""
        before = self.first_gap
        if before is None and "anchor_gap" in logged:
            self.first_gap = cast(float, logged["anchor_gap"])
        predicted = [(output.logprobs, output.entropy) for output in outputs]
        sampler = self.settings.sampler_precision
        return drift(
            logged,
            partial(logged_tokens, batches, predicted, self.ranks, version=self.version),
            version=self.version,
            precision=str(self.precision) if sampler == "model" else sampler,
            kept_caches=self.settings.kept_caches,
            limit=self.settings.anchor_limit,
            before=before,
        )


def _every(batch: TokenBatch) -> Tensor:
    """The mask of all response tokens: none is left out."""
    return torch.ones_like(batch.targets, dtype=torch.bool)
