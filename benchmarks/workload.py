"""What the GPU benchmarks run on: model shapes, requests, ragged updates, and how results are kept.

Weights are random, because speed does not depend on them and nothing has to be downloaded. The models have no stop
token, so no response ends by itself and every length is the given one.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import synchronize
from transformers import LlamaConfig, LlamaForCausalLM

from bapo.rollout.engine import Request, Segment
from bapo.types import Group, Problem, Status, Trajectory

# hidden, layers, heads, key-value heads, intermediate, vocabulary; heads are 64 wide, in 1.5b and up 128, in demo 32
SHAPES = {
    "135m": (576, 30, 9, 3, 1536, 49_152),  # SmolLM2-135M
    "0.5b": (896, 24, 14, 2, 4864, 151_936),  # Qwen2.5-0.5B, as a Llama
    "1.5b": (1536, 28, 12, 2, 8960, 151_936),  # Qwen2.5-1.5B, as a Llama
    "3b": (3072, 28, 24, 8, 8192, 128_256),  # OctoThinker-3B, a Llama 3.2
    "7b": (3584, 28, 28, 4, 18_944, 152_064),  # R1-Distill-Qwen-7B, as a Llama
    "tiny": (128, 2, 2, 1, 256, 512),
    "demo": (128, 4, 4, 4, 384, 32),  # the embedded model
}
UNTIED = {"7b"}
"""Shapes whose head is not the embedding."""


@dataclass(frozen=True)
class Sizes:
    """How large each benchmark is."""

    shapes: list[str]
    batches: list[int]
    prompt: int = 64
    new: int = 512
    short_new: int = 48
    """New tokens over which `generate` is measured: it is slow, and shorter contexts only help it."""
    static_new: int = 128
    """The same for the static cache, which attends to all of its (full-length) positions at every step anyway."""
    learner_shape: str = "0.5b"
    learner_lengths: tuple[int, int, int] = (64, 600, 4096)
    """Shortest, median and longest response of the ragged updates."""
    sequences: int = 128
    update: int = 64
    padded_rows: int = 4
    trl_rows: int = 8
    step_shape: str = "135m"
    step_responses: int = 256
    step_update: int = 32
    step_ragged: bool = False
    """Whether the responses of the step section have lognormal lengths, at most `new`."""
    step_lora: int = 0
    """Rank of the low-rank additions that the step section trains. 0 trains all weights."""
    trl_step_rows: int = 16
    """TRL's per_device_train_batch_size in the step section: it keeps the logits of that many responses."""
    group: int = 8
    micro_tokens: int = 16_384
    step_micro_tokens: int = 20_480
    """An update of the step section fits into one forward pass."""
    bound_tokens: int = 2**21
    rounds: int = 15


TINY = Sizes(
    shapes=["tiny"], batches=[4], prompt=8, new=12, short_new=4, static_new=4, learner_shape="tiny",
    learner_lengths=(4, 12, 40), sequences=16, update=8, padded_rows=4, trl_rows=4, step_shape="tiny",
    step_responses=16, step_update=8, trl_step_rows=8, group=4, micro_tokens=128, step_micro_tokens=256,
    bound_tokens=2**12, rounds=2,
)  # fmt: skip


def make_model(shape: str, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=16384,
        tie_word_embeddings=shape not in UNTIED,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(1, vocabulary, (count, length)).tolist()


def equal_requests(count: int, sizes: Sizes, vocabulary: int, *, group: int = 1) -> list[Request]:
    """Requests that all have the same length. `group` is the number of responses per prompt."""
    every = prompts(count // group, sizes.prompt, vocabulary)
    return [Request(every[seed // group], 0, seed, sizes.new) for seed in range(count)]


def ragged_requests(count: int, sizes: Sizes, vocabulary: int, *, group: int = 1) -> list[Request]:
    """Requests with lognormal limits whose median is a quarter of the longest."""
    lengths = lognormal(count, (max(1, sizes.new // 32), sizes.new // 4, sizes.new))
    every = prompts(count // group, sizes.prompt, vocabulary)
    return [Request(every[seed // group], 0, seed, n) for seed, n in enumerate(lengths)]


def step_lengths(sizes: Sizes) -> list[int]:
    """The length of every response of the step section, in the order of its requests."""
    make = ragged_requests if sizes.step_ragged else equal_requests
    return [r.max_new_tokens for r in make(sizes.step_responses, sizes, 2, group=sizes.group)]


def lognormal(count: int, lengths: tuple[int, int, int], sigma: float = 0.9) -> list[int]:
    shortest, median, longest = lengths
    drawn = np.random.default_rng(1).lognormal(np.log(median), sigma, count)
    return np.clip(drawn, shortest, longest).astype(int).tolist()


def ragged_groups(sizes: Sizes, vocabulary: int) -> list[Group]:
    """Scored responses of lognormal lengths, with log-probs like those of a model with random weights."""
    rng = np.random.default_rng(2)
    uniform = -float(np.log(vocabulary))
    trajectories = []
    for seed, length in enumerate(lognormal(sizes.sequences, sizes.learner_lengths)):
        trajectories.append(
            Trajectory(
                prompt=rng.integers(1, vocabulary, sizes.prompt).tolist(),
                seed=seed,
                tokens=rng.integers(1, vocabulary, length).tolist(),
                behavior_logprobs=(uniform + 0.1 * rng.standard_normal(length)).tolist(),
                entropies=[-uniform] * length,
                versions=[0] * length,
                status=Status.TRUNCATED,
                reward=float(seed % 2),
            )
        )
    return grouped(trajectories, sizes.group)


def trajectories_of(requests: list[Request], segments: list[Segment]) -> list[Trajectory]:
    return [
        Trajectory(r.context, r.seed, s.tokens, s.logprobs, s.entropies, s.versions, s.status, float(r.seed % 2))
        for r, s in zip(requests, segments, strict=True)
    ]


def grouped(trajectories: list[Trajectory], size: int) -> list[Group]:
    problem = Problem("benchmark", "", None)
    return [Group(i, problem, trajectories[i : i + size]) for i in range(0, len(trajectories), size)]


def decode_floor(model: LlamaForCausalLM, batch: int, sizes: Sizes, bandwidth: float) -> float:
    """Tokens/s if decoding only had to read the weights and each row's own keys and values once per step.

    seconds = sum over steps of (weight bytes + batch x context x bytes of one token's keys and values) / bandwidth
    """
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    contexts = sum(sizes.prompt + i for i in range(sizes.new))
    return batch * sizes.new * bandwidth / (sizes.new * weights + batch * contexts * per_token)


def copy_bandwidth(device: str) -> float:
    """Bytes that a large copy reads and writes per second: what this machine's memory really delivers."""
    source = torch.zeros(2**30 if device == "cuda" else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        best = min(best, timed(lambda: target.copy_(source), device)[0])
    return 2 * source.numel() * source.element_size() / best


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    synchronize(device)
    start = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - start, result


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


class Peak:
    """Peak of allocated GPU memory since `reset`, minus what was allocated before the candidate was built."""

    def __init__(self) -> None:
        self.before = allocated()

    def reset(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def gib(self) -> float:
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return (most - self.before) / 2**30


@dataclass
class Report:
    """All measurements, each printed and written as soon as it exists."""

    path: Path | None
    environment: dict[str, str]
    records: list[dict[str, Any]] = field(default_factory=list)

    def attempt(self, section: str, case: str, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The numbers of one candidate, or the reason why there are none. A failure never stops the others."""
        start = time.perf_counter()
        record: dict[str, Any] = {"section": section, "case": case, "name": name}
        try:
            numbers = measure()
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            numbers = {"unavailable": f"{type(error).__name__}: {first[:160]}"}
            record["traceback"] = traceback.format_exc()
            if not isinstance(error, ModuleNotFoundError):
                print(record["traceback"], file=sys.stderr, flush=True)
        free()
        record |= numbers | {"spent_s": round(time.perf_counter() - start, 1)}
        self.records.append(record)
        shown = "  ".join(f"{key} {_number(value)}" for key, value in numbers.items())
        if "unavailable" in numbers:
            shown = f"n/a ({numbers['unavailable']})"
        print(f"  {case:>12}  {name:<26} {shown}  [{record['spent_s']} s]", flush=True)
        if self.path:
            self.path.write_text(json.dumps({"environment": self.environment, "records": self.records}, indent=1))
        return numbers


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
