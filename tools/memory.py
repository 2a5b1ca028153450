"""What a model needs on one GPU, by arithmetic: python tools/memory.py [--slots N] [--tokens N] [--rank N] [--kl].

For several GPUs: python tools/cluster_sizes.py.

    states        18 bytes per trained parameter (bfloat16 weight 2, float32 master 4, gradient 4, moments 8), else 2
                  with learn.offload_optimizer 6 of the 18 bytes, and two parts that come and go; the rest on the host
                  with learn.kl (--kl) 2 more per parameter where all are trained: the copy of the initial weights
    sampler       2 bytes per parameter: the CUDA engine's own copy of the weights, with low-rank additions merged
    keys, values  layers x 2 x key heads x head width x 2 bytes, per token in flight
    activations   with learn.activation_checkpointing: one input per layer, tokens x hidden x 2 bytes, and the working
                  set of the layer being recomputed, about 2 x (4 hidden + 3 intermediate) x 2 bytes per token
    head          one block of the vocabulary at a time: below 1 GiB

Sampling and learning take turns, but the engine keeps its keys and values while the learner works unless it is closed,
so both are counted. Measured: 0.5B parameters take 10.5 GiB with checkpointing (docs/notes/performance.md); for
them this script gives 8.3 GiB of states.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bapo.learn.optimizer import LANES, PART

GIB = 2**30
GPUS = {"24 GB": 24e9, "80 GB": 80e9, "141 GB": 141e9, "192 GB": 192e9}


@dataclass(frozen=True)
class Shape:
    """The dimensions of a published model."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool

    def parameters(self) -> int:
        config_type, model_type = (
            (Qwen2Config, Qwen2ForCausalLM) if self.kind == "qwen2" else (LlamaConfig, LlamaForCausalLM)
        )
        config = config_type(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_width,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
        )
        with torch.device("meta"):
            return int(model_type(config).num_parameters())

    def lora_parameters(self, rank: int) -> int:
        """Parameters of two thin matrices for every linear layer."""
        query, keys = self.heads * self.head_width, self.key_heads * self.head_width
        widths = [(self.hidden, query), (self.hidden, keys), (self.hidden, keys), (query, self.hidden)]
        widths += [(self.hidden, self.intermediate)] * 2 + [(self.intermediate, self.hidden)]
        return self.layers * rank * sum(a + b for a, b in widths)

    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    def layer_parameters(self) -> int:
        return (self.parameters() - self.root_parameters()) // self.layers

    def keys_per_token(self) -> int:
        return self.layers * 2 * self.key_heads * self.head_width * 2

    def activations(self, tokens: int) -> int:
        return tokens * 2 * (self.layers * self.hidden + 2 * (4 * self.hidden + 3 * self.intermediate))


MODELS = {
    "SmolLM2-135M": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "Qwen2.5-0.5B": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "OctoThinker-3B (Llama 3.2)": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "R1-Distill-Qwen-7B": Shape("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "R1-Distill-Qwen-32B": Shape("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
}


def states(shape: Shape, rank: int) -> int:
    """Bytes of weights, masters, gradients and moments. Rank 0 trains all weights."""
    parameters = shape.parameters()
    return 18 * parameters if rank == 0 else 2 * parameters + 18 * shape.lora_parameters(rank)


def offloaded(shape: Shape) -> tuple[int, int]:
    """The bytes of states on the device and on the host if all weights are trained with learn.offload_optimizer."""
    parameters = shape.parameters()
    return 6 * parameters + LANES * 3 * 4 * PART, 12 * parameters


def verdict(needed: float) -> str:
    """The smallest card that holds so many bytes and leaves a tenth for the allocator and the CUDA context."""
    return next((name for name, size in GPUS.items() if needed <= 0.9 * size), f"{needed / (0.9 * 80e9):.1f} x 80 GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64, help="responses decoded side by side")
    parser.add_argument("--tokens", type=int, default=9216, help="tokens of the longest prompt and response")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="learn.micro_tokens")
    parser.add_argument("--rank", type=int, default=64, help="rank of the LoRA rows")
    parser.add_argument("--kl", action="store_true", help="with learn.kl, which keeps a copy of the initial weights")
    chosen = parser.parse_args()
    print(
        f"| model | parameters | keys per token | keys of {chosen.slots} x {chosen.tokens} | trained | states "
        "| sampler | activations | in all | fits | on the host |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, shape in MODELS.items():
        keys = shape.keys_per_token() * chosen.slots * chosen.tokens
        active = shape.activations(chosen.micro_tokens)
        copy = 2 * shape.parameters()
        reference = copy if chosen.kl else 0
        on_device, on_host = offloaded(shape)
        for trained, held, host in (
            ("all", states(shape, 0) + reference, 0),
            ("all, offloaded", on_device + reference, on_host),
            (f"LoRA {chosen.rank}", states(shape, chosen.rank), 0),
        ):
            total = held + copy + keys + active + GIB
            if host and total > 0.9 * max(GPUS.values()):  # the optimizer of one GPU only can be offloaded
                continue
            print(
                f"| {name} | {shape.parameters() / 1e9:.2f} B | {shape.keys_per_token() / 1024:.0f} KiB "
                f"| {keys / GIB:.1f} GiB | {trained} | {held / GIB:.1f} GiB | {copy / GIB:.1f} GiB "
                f"| {active / GIB:.1f} GiB | {total / GIB:.0f} GiB | {verdict(total)} "
                f"| {f'{host / GIB:.1f} GiB' if host else ''} |"
            )


if __name__ == "__main__":
    main()
