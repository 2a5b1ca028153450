"""Log-probs and entropy from hidden states, without full logits (ours), against log-softmax over full logits (naive).

The vocabulary is 151,936 (Qwen). "time" is forward and backward into hidden states and head; "forward" is the forward
pass alone, without gradients. "chunked" is the torch path; on CPU that path is ours. Peak memory is what forward and
backward add: on CPU it is the resident set, and each variant runs in a process of its own; on CUDA it is read from the
allocator. n/a means out of memory.

    python benchmarks/logprobs.py [--device cuda] [--tokens 8192 32768] [--rounds 3]
"""

import argparse
import multiprocessing as mp
import resource
import statistics
from functools import partial

import torch
from timing import interleaved, ratio, table
from torch import Tensor

from bapo.core.logprobs import chunked_logprobs, token_logprobs

VOCABULARY, WIDTH = 151_936, 896


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return chunked_logprobs(hidden, weight, None, targets)


VARIANTS = {"naive": naive, "chunked": chunked, "ours": token_logprobs}
TOKENS = {"cpu": [1024], "cuda": [8192, 32_768]}


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


def forward(name: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        VARIANTS[name](hidden, weight, targets)


def peak_mib(name: str, tokens: int, device: str) -> float | None:
    """MiB that one forward and backward add at the peak, beyond the inputs and the gradients that remain."""
    tensors = inputs(tokens, device)
    step(name, tensors[0][:8].detach().requires_grad_(), *tensors[1:2], tensors[2][:8])
    remains = sum(x.numel() * x.element_size() for x in tensors[:1]) / 2**20
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            step(name, *tensors)
        except torch.cuda.OutOfMemoryError:
            return None
        return (torch.cuda.max_memory_allocated() - before) / 2**20 - remains
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(name, *tensors)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 - remains


def peaks_mib(names: list[str], tokens: int, device: str) -> dict[str, float | None]:
    if device == "cuda":
        return {name: peak_mib(name, tokens, device) for name in names}
    with mp.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {name: pool.apply(peak_mib, (name, tokens, device)) for name in names}


def compare(tokens: int, device: str, rounds: int) -> str:
    """The table for one number of tokens."""
    names = [name for name in VARIANTS if device == "cuda" or name != "chunked"]
    peaks = peaks_mib(names, tokens, device)
    fits = [name for name in names if peaks[name] is not None]
    tensors = inputs(tokens, device)
    both = interleaved({n: partial(step, n, *tensors) for n in fits}, device=device, rounds=rounds)
    alone = interleaved({n: partial(forward, n, *tensors) for n in fits}, device=device, rounds=rounds)
    rows = []
    for name in names:
        row = [name]
        for times in (both, alone):
            row.append(f"{statistics.median(times[name]):.1f} ms" if name in fits else "n/a")
            row.append(f"{ratio(times, name, 'naive'):.2f}x" if {name, "naive"} <= set(fits) else "n/a")
        peak, base = peaks[name], peaks["naive"]
        row.append("n/a" if peak is None else f"{peak:,.0f} MiB")
        row.append("n/a" if peak is None or base is None else f"{peak / base:.3f}x")
        rows.append(row)
    header = ["variant", "time", "to naive", "forward", "to naive", "peak memory", "to naive"]
    return f"{tokens:,} tokens{difference(tensors, fits)}\n\n{table(header, rows)}\n"


@torch.no_grad()
def difference(tensors: tuple[Tensor, Tensor, Tensor], names: list[str]) -> str:
    if "naive" not in names:
        return ""
    ours, theirs = (torch.stack(VARIANTS[name](*tensors)) for name in ("ours", "naive"))
    gap = (ours - theirs).abs()
    return f"; difference to naive: mean {gap.mean().item():.1e}, largest {gap.max().item():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, nargs="+", help="1024 on CPU, 8192 and 32768 on CUDA")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    device = arguments.device
    print(f"vocabulary {VOCABULARY:,}, width {WIDTH}, {device}\n")
    for tokens in arguments.tokens or TOKENS[device]:
        print(compare(tokens, device, arguments.rounds))


if __name__ == "__main__":
    main()
