"""Log-probs and entropy from hidden states: chunked (ours) against log-softmax over full logits.

Vocabulary 151,936 (Qwen), forward and backward into hidden states and head. Peak memory is what the call adds: each
variant runs in a process of its own on CPU (resident set), and is read from the allocator on CUDA.

    python benchmarks/logprobs.py [--device cuda] [--tokens 1024] [--rounds 3]
"""

import argparse
import multiprocessing as mp
import resource
import statistics

import torch
from timing import interleaved, ratio, table
from torch import Tensor

from bapo.core.logprobs import token_logprobs

VOCABULARY, WIDTH = 151_936, 896


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


VARIANTS = {"naive": naive, "chunked": token_logprobs}


def inputs(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) / 30).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (tokens,), generator=generator).to(device)


def step(name: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    hidden.grad = weight.grad = None
    logprobs, entropy = VARIANTS[name](hidden, weight, targets)
    (logprobs.sum() + entropy.detach().sum()).backward()


def peak_mib(name: str, tokens: int, device: str) -> float:
    """MiB added at the peak by one forward and backward, beyond the inputs and the gradients that remain."""
    tensors = inputs(tokens, device)
    step(name, tensors[0][:8].detach().requires_grad_(), *tensors[1:2], tensors[2][:8])
    remains = sum(x.numel() * x.element_size() for x in tensors[:1]) / 2**20
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(name, *tensors)
        return (torch.cuda.max_memory_allocated() - before) / 2**20 - remains
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(name, *tensors)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 - remains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tokens, device = arguments.tokens, arguments.device
    with mp.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = {name: pool.apply(peak_mib, (name, tokens, device)) for name in VARIANTS}
    tensors = inputs(tokens, device)
    values = {name: VARIANTS[name](*(x.detach() for x in tensors)) for name in VARIANTS}
    difference = max((a - b).abs().max().item() for a, b in zip(values["naive"], values["chunked"], strict=True))
    runs = {name: lambda name=name: step(name, *tensors) for name in VARIANTS}
    times = interleaved(runs, device=device, rounds=arguments.rounds)
    print(f"{tokens} tokens, vocabulary {VOCABULARY:,}, width {WIDTH}, {device}; largest difference {difference:.1e}\n")
    rows = [
        [
            name,
            f"{statistics.median(times[name]):.0f} ms",
            f"{ratio(times, name, 'naive'):.2f}x",
            f"{peaks[name]:,.0f} MiB",
            f"{peaks[name] / peaks['naive']:.3f}x",
        ]
        for name in VARIANTS
    ]
    print(table(["variant", "time", "to naive", "peak memory", "to naive"], rows))


if __name__ == "__main__":
    main()
