"""What a model needs on several GPUs, by arithmetic: python tools/cluster_sizes.py [--micro-tokens N].

Nothing here was measured: the constants below are data sheets and assumptions, each with its source.

Memory of a GPU.
    learner rank    16 bytes per parameter over the ranks (float32 weight 4, gradient 4, moments 8)
                    + 2 bytes for each parameter of two layers and of the root (embedding, head), which FSDP2 gathers
                    + 2 bytes for each gradient of one layer and of the root before it is reduced
                    + activations as in tools/memory.py, with checkpointing; 1 GiB for one block of the head
    rollout engine  2 bytes per parameter over the GPUs of the engine + 2 GiB for its graphs and buffers; the rest of
                    0.9 of the card holds keys and values
    together        the learner rank's, and a whole copy of the weights in 2 bytes for the in-process engine

Weights. Rank 0 gathers the float32 shards (NVLink within a machine, InfiniBand between machines), casts them, and
copies them to the host and into shared memory. Every other machine fetches them over the network; every engine copies
them to its GPUs.

Time.
    learning   8 N floating-point operations per token: 6 for the pass, 2 to compute activations again; attention's own
               operations (5% at 4k tokens) are left out
    sampling   a decoding step reads the weights once and the keys of every response, and computes 2 N operations for
               each of its tokens
    step       tools/schedule_loops.py with these speeds and the lengths of tools/async_schedule.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from async_schedule import EIGHT_K, SEED, THIRTY_TWO_K, LogNormal
from memory import MODELS, Shape
from schedule_loops import Outcome, Setting, asynchronous, synchronous

GB, GIB = 1e9, 2**30
CARDS = {"80 GB": 80e9, "141 GB": 141e9}  # H100, H200
FREE = 0.1  # share of a card that stays free, as in tools/memory.py

FLOPS = 989e12  # bfloat16, dense; NVIDIA H100 SXM data sheet
BANDWIDTH = 3.35e12  # bytes per second of its memory; the same
NVLINK = 450e9  # bytes per second in one direction; the same
INFINIBAND = 50e9  # per GPU: 400 Gb/s, as in DGX H100
HOST = 25e9  # GPU to host and back, PCIe 5: assumption, 40% of its 64e9
COPY = 10e9  # one thread copying to or from shared memory: assumption
NETWORK = 12.5e9  # between machines, for objects of Ray: 100 Gb/s, assumption
LEARN_SHARE = 0.40  # of FLOPS; assumption. TorchTitan reports 52-58% of 6 N for FSDP2 on A100 (docs/performance.md)
COMPUTE_SHARE = 0.50  # of FLOPS, when engines compute; assumption
READ_SHARE = 0.70  # of BANDWIDTH, when engines read; assumption
LINK_SHARE = 0.80  # of NVLINK and INFINIBAND; assumption
REDUCE_SECONDS = 10e-6  # one all-reduce of a tensor-parallel layer; two per layer; assumption
PER_MACHINE = 8


@dataclass(frozen=True)
class Layout:
    """How many GPUs do what."""

    model: str
    gpus: int
    engines: int
    per_engine: int
    prompts: int

    @property
    def learners(self) -> int:
        return self.gpus - self.engines * self.per_engine


LAYOUTS = (
    Layout("R1-Distill-Qwen-7B", gpus=8, engines=4, per_engine=1, prompts=64),
    Layout("R1-Distill-Qwen-32B", gpus=64, engines=8, per_engine=4, prompts=128),
)


@dataclass(frozen=True)
class Speeds:
    """Seconds of one engine per decoding step, per response in it, and per token of that response's context."""

    weights: float
    response: float
    context: float
    prefill: float
    """Seconds per token."""

    def setting(self, start: Setting, lengths: LogNormal) -> Setting:
        context = start.prompt_tokens + lengths.context
        saturated = 1 / (self.response + self.context * context)
        return replace(start, alone=1 / self.weights, saturated=saturated, prefill=1 / self.prefill)


def engine_speeds(shape: Shape, gpus: int) -> Speeds:
    read = gpus * BANDWIDTH * READ_SHARE
    compute = 2 * shape.parameters() / (gpus * FLOPS * COMPUTE_SHARE)
    reduces = 2 * shape.layers * REDUCE_SECONDS if gpus > 1 else 0.0
    return Speeds(2 * shape.parameters() / read + reduces, compute, shape.keys_per_token() / read, compute)


def learn_speed(shape: Shape, gpus: int) -> float:
    """Tokens per second of all learners."""
    return gpus * FLOPS * LEARN_SHARE / (8 * shape.parameters())


def gathering(shape: Shape, ranks: int) -> float:
    """Seconds until rank 0 has seen every float32 shard."""
    link = NVLINK if ranks <= PER_MACHINE else INFINIBAND
    return 4 * shape.parameters() * (ranks - 1) / ranks / (link * LINK_SHARE)


def giving_out(shape: Shape, ranks: int) -> float:
    """Seconds in which the learner does nothing else: gather, copy to the host, copy into shared memory."""
    return gathering(shape, ranks) + 2 * shape.parameters() * (1 / HOST + 1 / COPY)


def loading(shape: Shape, gpus: int, *, remote: bool) -> float:
    """Seconds in which one engine does not decode. Each of its GPUs reads its own part."""
    size = 2 * shape.parameters()
    return (size / NETWORK if remote else 0.0) + size / gpus * (1 / COPY + 1 / HOST)


def rank_bytes(shape: Shape, ranks: int, micro_tokens: int) -> dict[str, float]:
    layer, root = shape.layer_parameters(), shape.root_parameters()
    return {
        "shards": 16 * shape.parameters() / ranks,
        "gathered": 2 * (2 * layer + root) + 2 * (layer + root),
        "activations": shape.activations(micro_tokens) + GIB,
    }


def keys_that_fit(shape: Shape, card: float, taken: float, gpus: int) -> float:
    """Tokens whose keys and values fit beside what is taken on each of the GPUs; below 0 if nothing fits."""
    return gpus * ((1 - FREE) * card - taken) / shape.keys_per_token()


def memory_table(models: Mapping[str, Shape], micro_tokens: int) -> str:
    cards = " | ".join(f"keys on {name}" for name in CARDS)
    lines = [f"| model | role | GPUs | shards | gathered | activations | 16-bit weights | in all | {cards} |"]
    lines.append("|---" * (8 + len(CARDS)) + "|")
    for layout in LAYOUTS:
        shape = models[layout.model]
        copy = 2.0 * shape.parameters()
        roles = [
            ("learner rank", layout.learners, rank_bytes(shape, layout.learners, micro_tokens), 0.0, 0),
            (f"engine of {layout.per_engine}", layout.engines * layout.per_engine, {}, copy, layout.per_engine),
            ("together", layout.gpus, rank_bytes(shape, layout.gpus, micro_tokens), copy, 1),
        ]
        for role, gpus, held, weights, engine in roles:
            parts = [held.get(name, 0.0) for name in ("shards", "gathered", "activations")]
            parts.append(weights / max(1, engine))
            taken = sum(parts) + (2 * GIB if engine else 0)
            cells = " | ".join(f"{part / GIB:.1f} GiB" if part else "–" for part in parts)
            fits = " | ".join(_fits(shape, card, taken, engine) for card in CARDS.values())
            lines.append(f"| {layout.model} | {role} | {gpus} | {cells} | {taken / GIB:.0f} GiB | {fits} |")
    return "\n".join(lines)


def _fits(shape: Shape, card: float, taken: float, engine: int) -> str:
    if taken > (1 - FREE) * card:
        return "does not fit"
    return f"{keys_that_fit(shape, card, taken, engine) / 1000:,.0f}k tokens" if engine else "fits"


def transfer_table(models: Mapping[str, Shape]) -> str:
    lines = [
        "| model | bytes | gather | learner stops for | an engine stops for, same machine | other machine |\n"
        "|---|---|---|---|---|---|"
    ]
    for layout in LAYOUTS:
        shape = models[layout.model]
        near, far = (loading(shape, layout.per_engine, remote=remote) for remote in (False, True))
        lines.append(
            f"| {layout.model} | {2 * shape.parameters() / GB:.1f} GB | {gathering(shape, layout.learners):.1f} s "
            f"| {giving_out(shape, layout.learners):.1f} s | {near:.1f} s | {far:.1f} s |"
        )
    return "\n".join(lines)


def settings(layout: Layout, shape: Shape, lengths: LogNormal) -> tuple[Setting, Setting]:
    """The same work together, where each GPU has an engine of its own, and apart."""
    start = Setting(prompts=layout.prompts, ahead=2, staleness=16)
    together = replace(
        engine_speeds(shape, 1).setting(start, lengths),
        engines=layout.gpus,
        learn=learn_speed(shape, layout.gpus),
        gather_seconds=gathering(shape, layout.gpus),
    )
    apart = replace(
        engine_speeds(shape, layout.per_engine).setting(start, lengths),
        engines=layout.engines,
        learn=learn_speed(shape, layout.learners),
        gather_seconds=giving_out(shape, layout.learners),
        load_seconds=loading(shape, layout.per_engine, remote=layout.gpus > PER_MACHINE),
    )
    return together, apart


def step_table(models: Mapping[str, Shape], layouts: tuple[Layout, ...] = LAYOUTS) -> str:
    lines = [
        "| model | limit | layout | one response alone | engine, full | learning alone | step | tokens/s per GPU |\n"
        "|---|---|---|---|---|---|---|---|"
    ]
    for layout in layouts:
        shape = models[layout.model]
        for lengths in (EIGHT_K, THIRTY_TWO_K):
            together, apart = settings(layout, shape, lengths)
            drawn = lengths.groups(apart.steps * apart.prompts, apart.responses, SEED)
            names = ("together", f"apart, {layout.engines} x {layout.per_engine} + {layout.learners}")
            outcomes = (synchronous(together, drawn, together=True), asynchronous(apart, drawn))
            for name, outcome in zip(names, outcomes, strict=True):
                lines.append(f"| {layout.model} | {lengths.limit} | {name} | {_step_cells(outcome, layout.gpus)} |")
    return "\n".join(lines)


def _step_cells(outcome: Outcome, gpus: int) -> str:
    s = outcome.setting
    full = s.slots / (1 / s.alone + s.slots / s.saturated)
    prompts = s.prompt_tokens * s.responses * s.prompts * s.steps
    learning = s.passes * (outcome.tokens + prompts) / s.steps / s.learn
    return (
        f"{s.alone:.0f} tokens/s | {full:,.0f} tokens/s | {learning:.0f} s | {outcome.step_seconds:.0f} s "
        f"| {outcome.speed / gpus:,.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-tokens", type=int, default=16384, help="learn.micro_tokens")
    chosen = parser.parse_args()
    print(memory_table(MODELS, chosen.micro_tokens), transfer_table(MODELS), step_table(MODELS), sep="\n\n")


if __name__ == "__main__":
    main()
