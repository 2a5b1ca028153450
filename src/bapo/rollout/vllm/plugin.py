"""What runs inside vLLM's processes: receives weights, mends tied heads, and ends the process with its parent.

vLLM calls `register` in each of its processes, because pyproject.toml names it under `vllm.general_plugins`. It has no
effect beyond a new name of a transfer backend in processes that `VllmEngine` did not start.

vLLM reloads weights layer by layer. Where the head is the embedding, only the embedding is loaded, and the head keeps a
packed copy of old weights on CPUs (vLLM 0.32). `mend_tied_heads` packs it again after every update.

vLLM gives the log-prob of a token after truncation, and not how much probability truncation kept. `TellsKept` takes the
place of its sampler in runs that truncate. It needs neither the vocabulary's logits twice nor a second pass: the
likeliest token always stays, so the mass kept is its probability before over its probability after.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler

from bapo.rollout.vllm.buckets import Bucket, fingerprints, mapped

BACKEND = "bapo_shared_memory"
"""The name of our backend among vLLM's."""
OWNER = "BAPO_VLLM_OWNER"
"""The environment variable that holds the id of the process that started the engine."""
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """vLLM's entry point for plugins. May be called more than once."""
    with suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SharedMemory.__name__)
    owner = os.environ.get(OWNER)
    if owner and int(owner) != os.getpid():
        end_with_parent()


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, however it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel cannot end a process together with its parent (prctl)")
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Nothing(WeightTransferInitInfo):
    """What the two sides agree on beforehand: shared memory needs no meeting point."""


@dataclass
class Arriving(WeightTransferUpdateInfo):
    """One bucket, as plain values."""

    bucket: dict[str, Any]


class SharedMemory(WeightTransferEngine):
    """Loads buckets of weights into the model of this worker, on any device."""

    init_info_cls = Nothing
    update_info_cls = Arriving

    loading = False
    """Whether an update is under way, or was given up on the way."""

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """There is nothing to prepare."""

    def start_weight_update(self) -> None:
        """Prepare every layer to be loaded again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.loading:
            self.finish_weight_update()  # or the rest of an update that failed would be part of this one
        self.loading = True
        self.fingerprints: dict[str, str] = {}
        self.loaded: set[str] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. Its memory may be given back when this returns."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Arriving) -> None:
        """Fingerprint and load the weights of one bucket."""
        weights = list(mapped(Bucket(**update_info.bucket)))
        self.fingerprints |= fingerprints(weights)
        self.loaded |= set(self.model.load_weights(weights) or ())

    def finish_weight_update(self) -> None:
        """Process what was not processed on the way, then mend what layerwise loading leaves behind."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        mend_tied_heads(self.model)
        self.loading = False

    def report(self) -> dict[str, Any]:
        """What arrived since the last `start_weight_update`, and which parameters of the model it did not reach."""
        parameters = {name for name, _ in self.model.named_parameters()}  # a tied weight appears once
        heads = {f"{name}.weight" for name, _, _ in tied_heads(self.model)}
        return {"fingerprints": self.fingerprints, "not_loaded": sorted(parameters - heads - self.loaded)}

    def shutdown(self) -> None:
        """There is nothing to release."""


def tied_heads(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(name, head, embedding) of every head whose weight is that of an embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = dict(model.named_modules())
    embeddings = [
        module
        for module in modules.values()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    for name, module in modules.items():
        if isinstance(module, ParallelLMHead):
            for embedding in embeddings:
                if embedding.weight is module.weight:
                    yield name, module, embedding


@torch.no_grad()
def mend_tied_heads(model: nn.Module) -> None:
    """Let every tied head use the weight of its embedding as it is now, in the form that its kernel wants."""
    for _, head, embedding in tied_heads(model):
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


class TellsKept(Sampler):
    """vLLM's sampler, which also says log m: to requests with logprobs=1, in the place of the likeliest token."""

    log_kept: torch.Tensor | None = None

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *given: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw, and compare the likeliest token before and after truncation. vLLM changes the logits on the way."""
        heat = sampling_metadata.temperature
        self.log_kept = before = None
        if heat is not None and sampling_metadata.max_num_logprobs == 1:
            tempered = logits / torch.where(heat < _SAMPLING_EPS, 1.0, heat)[:, None]
            before = tempered.max(dim=-1).values - tempered.logsumexp(dim=-1)
        sampled, logprobs = super().sample(logits, sampling_metadata, *given, **named)
        if before is not None and logprobs is not None:
            self.log_kept = before - logprobs.max(dim=-1).values
        return sampled, logprobs

    def forward(self, *given: Any, **named: Any) -> SamplerOutput:
        """vLLM's outputs, with log m under the name of a token that is not the sampled one."""
        output = super().forward(*given, **named)
        if self.log_kept is not None and (told := output.logprobs_tensors) is not None:
            told.logprobs[:, 1] = self.log_kept
            told.logprob_token_ids[:, 1] = (told.logprob_token_ids[:, 0] == 0).to(told.logprob_token_ids.dtype)
        return output


class Worker:
    """Methods that vLLM adds to its worker class, for `AsyncLLM.collective_rpc`."""

    weight_transfer_engine: SharedMemory
    model_runner: Any

    def bapo_report(self) -> dict[str, Any]:
        """What arrived in this worker, and which parameters of its model it did not reach."""
        return self.weight_transfer_engine.report()

    def bapo_tell_kept(self) -> None:
        """From now on, say how much probability truncation keeps."""
        sampler = self.model_runner.sampler
        if type(sampler) is not Sampler:
            raise RuntimeError(
                f"rollout.top_p, top_k and min_p need to know how much probability they keep, and vLLM's sampler "
                f"{type(sampler).__module__}.{type(sampler).__name__} does not let us see it. Start the "
                "engine with Settings(truncates=True), or sample with the in-process engine."
            )
        self.model_runner.sampler = TellsKept(sampler.logprobs_mode, sampler.use_fp64_gumbel)
