"""Side-by-side timing: candidates take turns, so that drift of the machine affects all of them equally."""

import random
import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(candidates: dict[str, Callable[[], object]], *, device: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each candidate in each round, after two rounds of warm-up.

    Every round has its own order, because a candidate is slower after one that leaves caches and allocator in disorder.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle  # noqa: S311
    for turn in range(rounds + 2):
        shuffle(order)
        for name in order:
            synchronize(device)
            start = time.perf_counter()
            candidates[name]()
            synchronize(device)
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
