"""How fast this machine computes, found by short trials, and whether the precision of a run slows it down.

A CPU without units for 16-bit numbers multiplies bfloat16 matrices hundreds of times slower than float32 ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from bapo.config.run import Config
from bapo.config.sft import SftConfig

TRIALS = 20
"""How often each speed is measured, unless that takes long."""
ENOUGH = 0.5
"""Seconds after which no further trial begins."""
SLOWER = 3
"""How many times slower than float32 a precision must be before a run says so."""


def measured_speed(config: Config) -> tuple[float, float]:
    """Floating-point operations and bytes per second of this machine, in the precision of the run.

    On the CPU they are those of one thread, in time of its own, so that a busy machine does not look slow.
    """
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"
    flops = _flops(getattr(torch, config.model.dtype), device)
    large = torch.ones(2**28 if on_gpu else 2**22, device=device)
    bandwidth = 2 * 4 * large.numel() / _seconds_of(large.clone, on_gpu=on_gpu)
    return flops * (1 if on_gpu else config.threads), bandwidth


def slow_precision(config: Config | SftConfig) -> Iterator[str]:
    """Says so if a resolved run on the CPU of this machine is much slower in its precision than in float32."""
    dtype = config.model.dtype
    elsewhere = isinstance(config, Config) and config.cluster.address is not None
    if config.device != "cpu" or dtype == "float32" or elsewhere:
        return
    times = _flops(torch.float32, torch.device("cpu")) / _flops(getattr(torch, dtype), torch.device("cpu"))
    if times > SLOWER:
        yield (
            f"model.dtype={dtype!r} is about {times:.0f} times slower than float32 on this CPU, which has no fast "
            "units for 16-bit numbers. Set model.dtype = 'float32' or 'auto'."
        )


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of matrix products, on a CPU with one thread."""
    on_gpu = device.type == "cuda"
    size = 4096 if on_gpu else 256
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _seconds_of(lambda: a @ b, on_gpu=on_gpu)


def _seconds_of(work: Callable[[], object], *, on_gpu: bool) -> float:
    """How long some work takes, with one thread: the best of several trials, after one that does not count."""
    clock = time.perf_counter if on_gpu else time.thread_time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best, spent = math.inf, 0.0
    for trial in range(TRIALS):
        began = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        took = clock() - began
        best, spent = min(best, took) if trial else best, spent + took
        if trial and spent > ENOUGH:
            break
    torch.set_num_threads(threads)
    return best
