"""The CUDA engine: a decoding step is one graph launch, and the host looks at the state only every few tokens.

    slots     places for responses; a response keeps its slot while it runs, and after a turn while there is room
    pages     the key-value cache, cut into stretches of tokens (`pages.py`); a slot has as many as its response needs
    seats     which slots take part in a step, a list on the device. Captured graphs of several batch sizes read it, so
              responses can come and go, and the batch can shrink, without moving keys and values or capturing again
    state     what each slot feeds next, where it stands and when it ends; the step itself updates it
    records   what each slot sampled, with log-probs and entropies

A step runs the forward pass (`decoder.py`), draws, and moves every slot on (`kernels/sampling.py`) without the host.
The host launches `LOOK` steps at a time and picks the smallest graph that holds all that run; `sitting.py` decides who
runs.

Weights are copied by `load`, once per version, into the layout that sampling wants (`decoder.py`).
With `parked="rebuild"`, responses parked at the end of a sitting lose their keys and values. When they resume, they are
prefilled under the weights of that time. With `parked="keep"` they stay in their slots and continue at once. This is
cheaper, but their next tokens are sampled from a mixture of old keys and new weights that no single policy would give.
In both cases the recorded log-prob belongs to the distribution that was really sampled from. A resumed run has no kept
keys and values, so it repeats an interrupted run bit for bit only under "rebuild".

The results are as exact as those of `LocalEngine`: float32 softmax of the model's logits, one uniform per (seed,
position).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
import triton
from torch import Tensor
from transformers import PreTrainedModel

from bapo.rollout.cuda.decoder import Decoder, unsupported
from bapo.rollout.cuda.graphs import Pool
from bapo.rollout.cuda.kernels.sampling import SlotStatus, State
from bapo.rollout.cuda.pages import pages_for
from bapo.rollout.cuda.sitting import Name, Sitting
from bapo.rollout.engine import Precision, Request, Sampling
from bapo.rollout.sittings import InProcessEngine
from bapo.types import refuse

LOOK = 8
"""Steps between two looks of the host."""
REACH_STEP = 256
"""The longest response that slots are made for grows in steps of this many tokens."""


class GraphEngine(InProcessEngine):
    """Engine on a Llama, Qwen2 or Qwen3 model on this process's GPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 256,
        prefill_tokens: int = 32768,
        parked: Literal["rebuild", "keep"] = "rebuild",
        cache_tokens: int | None = None,
        float32_head: bool = False,
        precision: Precision = "model",
    ) -> None:
        """`slots`: responses sampled at the same time. `prefill_tokens`: most tokens in a prefill of several contexts.
        `parked`: what happens to the keys and values of parked responses. `cache_tokens`: most tokens whose keys and
        values are kept at a time; if they are too few for all slots, some responses wait. None: every slot can hold
        the longest response. `float32_head`: compute logits in float32. `precision`: in which the layers multiply.
        """
        super().__init__(model, slots=slots, prefill_tokens=prefill_tokens)
        reason, on_gpu = unsupported(model, precision), model.device.type == "cuda" or triton.knobs.runtime.interpret
        refuse(
            (parked not in ("rebuild", "keep"), f"parked={parked!r} is neither 'rebuild' nor 'keep'. Set one of them."),
            (reason, f"GraphEngine cannot run {type(model).__name__}: {reason}. Use LocalEngine."),
            (not on_gpu, f"GraphEngine needs a GPU, but the model is on {model.device}. Use LocalEngine."),
        )
        self.parked, self.cache_tokens = parked, cache_tokens
        self.decoder = Decoder(model, float32_head=float32_head, precision=precision)
        self.pool: Pool | None = None
        self.kept: dict[Name, int] = {}
        """Under "keep": the slot of each parked response, by its seed and tokens."""

    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.decoder.load(weights)

    def _sit_down(self, requests: list[Request], sampling: Sampling, budget: int, turns: bool) -> Sitting:
        reach = max(len(request.context) + request.max_new_tokens for request in requests)
        if self.cache_tokens is not None and reach > self.cache_tokens:
            raise ValueError(
                f"rollout.cache_tokens={self.cache_tokens}, but one response can have up to {reach} tokens with its "
                "prompt, and it must fit. Raise rollout.cache_tokens or lower rollout.max_tokens."
            )
        with self._on_device():
            pool = self._pool(reach, stops=len(sampling.stop_ids), places=(1 + turns) * self.slots)
            pool.set_sampling(sampling)
            how = {"budget": budget, "stretch": LOOK, "prefill_tokens": self.prefill_tokens}
            sitting = Sitting(pool, requests, **how, keep=self.parked == "keep", kept=self.kept, turns=turns)
        self.kept = {}  # a sitting that fails may have overwritten any of them
        return sitting

    @contextmanager
    def _working(self, sitting: Sitting) -> Iterator[None]:
        with self._on_device():
            try:
                yield
            except BaseException:
                sitting.pool.state[State.STATUS] = SlotStatus.IDLE
                sitting.pool.pages.clear()
                raise
            if sitting.over:
                sitting.pool.state[State.STATUS] = SlotStatus.IDLE
                if self.parked == "rebuild":
                    sitting.pool.pages.clear()
                else:
                    self.kept = sitting.kept

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Select the device that Triton launches on. If it runs out of memory, say which settings to lower."""
        device = self.decoder.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                yield
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(
                f"the device has too little memory to sample with {self.slots} slots: {error}. Lower rollout.slots or "
                "rollout.max_tokens, or set rollout.cache_tokens."
            ) from error

    def _pool(self, reach: int, *, stops: int, places: int) -> Pool:
        pool = self.pool
        if pool and reach <= pool.reach and stops <= len(pool.stop_ids) and places <= pool.places:
            return pool
        self.pool, self.kept = None, {}
        reach = triton.cdiv(reach, REACH_STEP) * REACH_STEP
        self.decoder.prepare(reach)
        pages = self.slots * pages_for(reach)
        if self.cache_tokens is not None:
            pages = min(pages, pages_for(self.cache_tokens))
        stops = triton.next_power_of_2(max(8, stops))
        self.pool = Pool(self.decoder, self.slots, reach, places=places, pages=pages, stops=stops)
        return self.pool
