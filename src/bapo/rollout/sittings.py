"""What engines share: what all of them refuse, what truncation leaves, and the verbs of those in this process.

An engine in this process does its work in sittings: `submit` begins one, or adds to the one that is there, and
`collect` works on it. A sitting in turns stays open until it is parked.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment
from bapo.types import refuse


def max_positions(model: Any) -> int | None:
    """The longest sequence that a transformers model is made for; None if its config does not say."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions else None


@torch.no_grad()
def copy_weights(weights: Iterable[tuple[str, Tensor]], places: Mapping[str, Tensor]) -> None:
    """Copy every weight to its place, by name. A weight that already lies there is not copied.

    All places must be filled, because an engine with some old weights would sample from a policy that never existed.
    """
    missing = set(places)
    for name, tensor in weights:
        assert name in places, f"the engine has no place for the weight {name!r}"
        assert tensor.shape == places[name].shape, f"the weight {name!r} has another shape than the engine's"
        if tensor.data_ptr() != places[name].data_ptr():
            places[name].copy_(tensor)
        missing.discard(name)
    assert not missing, f"{len(missing)} weights were not loaded ({min(missing)!r}, for example)"


def check_idle(under_way: object | None, verb: str) -> None:
    """Refuse a verb while requests are under way."""
    if under_way is not None:
        raise RuntimeError(f"{verb} was called while requests are under way. First park and collect them.")


def check_requests(
    requests: Sequence[Request], sampling: Sampling, token_budget: int | None, *, positions: int | None, version: int
) -> None:
    """Refuse requests that cannot be sampled, and name them."""
    if version < 0:
        raise RuntimeError("the engine has no weights yet. Call load(weights, version=...) before submit.")
    heat = f"sampling.temperature={sampling.temperature}"
    ids = {request.id for request in requests}
    top_p, top_k, min_p = sampling.top_p, sampling.top_k, sampling.min_p
    refuse(
        (not 0 < top_p <= 1, f"sampling.top_p={top_p} is not a share. Set it above 0, and to 1 to leave out nothing."),
        (top_k < 0, f"sampling.top_k={top_k} is not a number of tokens. Set it to 0 to leave out nothing, or more."),
        (not 0 <= min_p <= 1, f"sampling.min_p={min_p} is not a share. Set it to 0 to leave out nothing, at most 1."),
        (not sampling.temperature >= 0, f"{heat} is not a temperature. Set it to 0 (greedy) or a positive number."),
        (
            (token_budget or 0) < 0,
            f"token_budget={token_budget} is negative. Set it to 0 or more, or None for no limit.",
        ),
        (len(ids) < len(requests), "two requests have the same id, but their segments go by it. Use unique ids."),
    )
    for index, request in enumerate(requests):
        known, more = len(request.context), request.max_new_tokens
        most = known + more if positions is None else positions
        who = f"request {index} (seed {request.seed})"
        refuse(
            (not known, f"{who} has an empty context. Begin it with a beginning-of-sequence token."),
            (
                more < 1,
                f"{who} has max_new_tokens={more}, so it may not grow. Set max_new_tokens >= 1, or leave it out.",
            ),
            (
                known + more > most,
                f"{who} may grow to {known + more} tokens ({known} of context and max_new_tokens={more}), but the "
                f"model has {most} positions. Lower max_new_tokens to {most - known}, shorten the prompt, or use a "
                "model with a longer context.",
            ),
        )


def left_by(
    sampling: Sampling,
    logits: Tensor,  # [rows, vocabulary] over the temperature
) -> tuple[Tensor, Tensor]:  # [rows, vocabulary] bool: the tokens left; [rows] float32: log m
    """Which tokens truncated sampling leaves, and how much of the probability.

    Three rules may leave tokens out, each of those that the one before it has left:

        min_p   tokens that are less than min_p times as likely as the likeliest one
        top_k   all but the k likeliest
        top_p   all but the likeliest that together hold the share top_p

    A token that is exactly as likely as the last one of these is left in, too, so equal tokens are never told apart.
    The likeliest token always stays. The mass m is the probability of what is left, among the whole vocabulary at the
    temperature of sampling. Tokens are drawn from p / m. That is the recorded log-prob, and log m is recorded beside
    it. Probabilities are in float32, relative to the likeliest token, and sums of them in float64.

    Where a logit is not finite, all that it spoils is left in, so that the draw sees it. Nothing waits for the device.
    """
    weights = (logits - logits.max(dim=-1, keepdim=True).values).float().exp()
    least = torch.full_like(weights[:, :1], sampling.min_p)  # the weight of the last token that is left
    if 0 < sampling.top_k < logits.shape[-1]:
        least = torch.maximum(least, weights.topk(sampling.top_k, dim=-1).values[:, -1:])
    if sampling.top_p < 1:
        ordered = torch.where(weights >= least, weights, 0.0).sort(dim=-1, descending=True).values
        held = ordered.cumsum(-1, dtype=torch.float64)
        short = (held < sampling.top_p * held[:, -1:]).sum(-1, keepdim=True)  # tokens before the one that reaches it
        least = torch.maximum(least, ordered.gather(-1, short))
    left = ~(weights < least)
    mass = torch.where(left, weights, 0.0).sum(-1, dtype=torch.float64) / weights.sum(-1, dtype=torch.float64)
    return left, mass.log().float()


class NonFiniteLogits(FloatingPointError, ValueError):  # noqa: N818
    """The model gives logits that no token can be drawn from."""


def non_finite(requests: Sequence[Request], index: int, position: int) -> NonFiniteLogits:
    """The error for logits that no token can be drawn from."""
    request = requests[index]
    return NonFiniteLogits(
        f"the model gave non-finite logits for request {index} (seed {request.seed}, context of "
        f"{len(request.context)} tokens) at response position {position}, so no token can be drawn. "
        "Look for NaN or infinite weights after the last update: lower learn.lr, or sample in a wider dtype."
    )


class InProcessEngine:
    """The verbs of an engine whose work is done by sittings."""

    draws_by_position = True
    gives_entropies = True

    _fill: Callable[[Iterable[tuple[str, Tensor]]], None]
    """Puts the weights where the engine reads them."""
    _sit_down: Callable[[list[Request], Sampling, int, bool], Any]
    """A sitting with these requests and this token budget, in turns or not."""
    _working: Callable[[Any], AbstractContextManager[Any]]
    """The context in which a sitting works."""

    def __init__(self, model: PreTrainedModel, *, slots: int, prefill_tokens: int) -> None:
        self.model, self.slots, self.prefill_tokens = model, slots, prefill_tokens
        self.version = NOTHING_LOADED
        self._sitting: Any = None
        self._sampling = Sampling()

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Sample with these weights from now on. Those that lie in place already are not copied."""
        check_idle(self._sitting, "load")
        self.version = NOTHING_LOADED  # until all of them are in place
        self._fill(weights)
        self.version = version

    @property
    def resting(self) -> bool:
        """Whether it rests in the middle of turns."""
        return self._sitting is not None and bool(self._sitting.resting)

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether the sitting has place for these beside those under way."""
        return self._sitting is None or not self._sitting.unfinished or bool(self._sitting.fits(requests))

    @torch.no_grad()
    def submit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        token_budget: int | None = None,
        turns: bool = False,
    ) -> None:
        """Begin a sitting with these requests, or add them to the one that is there."""
        check_requests(requests, sampling, token_budget, positions=max_positions(self.model), version=self.version)
        if self._sitting is not None and not self._sitting.unfinished and not self._sitting.fits(requests):
            self.park()
            self.collect()
        sitting, more = self._sitting, sum(request.max_new_tokens for request in requests)
        if sitting is None:
            budget = more if token_budget is None else token_budget
            self._sampling = sampling
            self._sitting = self._sit_down(list(requests), sampling, budget, turns) if requests else None
            return
        if sampling != self._sampling or not self.takes(requests) or {r.id for r in requests} & sitting.ids:
            raise RuntimeError(
                "submit was called while requests are under way that have the same ids, are sampled otherwise, or "
                "leave no place. First park and collect them."
            )
        sitting.budget = sitting.budget + more if token_budget is None else token_budget
        sitting.add(list(requests))

    @torch.no_grad()  # not inference_mode: buffers that a model rebuilds in a pass must be usable in training
    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        """Work until something was sampled and the time is over, or until all is done; returns what was sampled."""
        sitting, self._sitting = self._sitting, None  # a sitting that fails is over
        if sitting is None:
            return []
        with self._working(sitting):
            sitting.work(None if timeout is None else time.monotonic() + timeout)
            found: list[tuple[int, Segment]] = sitting.segments(self.version)
        if not sitting.over:
            self._sitting = sitting
        return found

    def park(self) -> None:
        """Stop work. The next `collect` returns every unfinished response as PARKED."""
        if self._sitting is not None:
            self._sitting.parked = True
