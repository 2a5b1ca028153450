"""What the engines of this process have in common: each `submit` begins a sitting, and `collect` works on it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment
from bapo.rollout.requests import check_engine_sizes, check_idle, check_requests, max_positions


class InProcessEngine:
    """The verbs of an engine whose work is done by sittings."""

    draws_by_position = True
    gives_entropies = True
    continuous = False

    def __init__(self, model: PreTrainedModel, *, slots: int, prefill_tokens: int) -> None:
        check_engine_sizes(slots, prefill_tokens)
        self.model, self.slots, self.prefill_tokens = model, slots, prefill_tokens
        self.version = NOTHING_LOADED
        self._sitting: Any = None

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Sample with these weights from now on. Those that lie in place already are not copied."""
        check_idle(self._sitting, "load")
        self.version = NOTHING_LOADED  # until all of them are in place
        self._fill(weights)
        self.version = version

    @torch.no_grad()
    def submit(self, requests: Sequence[Request], sampling: Sampling, *, token_budget: int | None = None) -> None:
        """Begin a sitting with these requests."""
        check_idle(self._sitting, "submit")
        check_requests(requests, sampling, token_budget, positions=max_positions(self.model), version=self.version)
        self._sitting = self._sit_down(requests, sampling, token_budget) if requests else None

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

    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put the weights where the engine reads them."""
        raise NotImplementedError

    def _sit_down(self, requests: Sequence[Request], sampling: Sampling, token_budget: int | None) -> Any:
        """A sitting with these requests."""
        raise NotImplementedError

    def _working(self, sitting: Any) -> AbstractContextManager[Any]:
        """What surrounds the work of a sitting."""
        raise NotImplementedError
