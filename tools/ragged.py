"""What ragged lengths cost the CUDA engine, and what an order of the requests could gain: its own decisions, on paper.

    python tools/ragged.py                the rate of 1,024 lognormal responses over 256 slots, against equal lengths
    python tools/ragged.py --own 0.5 0.1  with these shares of the variance of log-length within a group of 8

`Sitting` decides as it does on a GPU; the pool only adds up how long steps and prefills took on an H200. Orders:

    submitted    as they come
    mates        guessed: the mean length so far of those of the same prompt that have begun; first one of each prompt
    longest      known beforehand
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bapo.rollout.cuda.graphs import batch_sizes
from bapo.rollout.cuda.kernels.sampling import SlotStatus, State
from bapo.rollout.cuda.pages import Pages, pages_for
from bapo.rollout.cuda.sitting import Sitting
from bapo.rollout.engine import Request

SLOTS, LONGEST, GROUP = 256, 512, 8
ROWS = (1, 8, 64, 256)
TIMES = {"135m": ((1.05, 1.08, 1.17, 1.66), 0.001), "1.5b": ((1.75, 1.8, 2.07, 3.15), 0.007)}
"""Milliseconds of a step with so many rows, and of a prefilled token beyond PREFILL."""
PREFILL = 3.0


class Reading:
    """The state of a pool when it was taken."""

    def __init__(self, state: np.ndarray) -> None:
        self.state = state.copy()

    def wait(self) -> np.ndarray:
        """It is there."""
        return self.state


class TimedPool:
    """A pool whose steps only count tokens and milliseconds."""

    def __init__(self, shape: str) -> None:
        self.slots, self.sizes, self.reach = SLOTS, batch_sizes(SLOTS), 2 * LONGEST
        self.pages = Pages(SLOTS * pages_for(self.reach), SLOTS + 1, self.reach)
        self.state = np.zeros((len(State), SLOTS + 1), np.int64)
        self.seats: list[int] = []
        (self.steps, self.per_token), self.ms = TIMES[shape], 0.0

    def seat(self, slots: list[int]) -> None:
        self.seats = list(slots)

    def start(self, slots: list[int], state: np.ndarray) -> None:
        self.state[:, slots] = state

    def prefill(self, contexts: dict[int, list[int]]) -> None:
        self.ms += PREFILL + self.per_token * sum(map(len, contexts.values()))

    def copy(self, pages: Any) -> None:
        pass

    def advance(self, rows: int, steps: int) -> None:
        size = next(size for size in self.sizes if size >= rows)
        self.ms += steps * float(np.interp(size, ROWS, self.steps))
        state, seats = self.state, np.array(self.seats)
        for _ in range(steps):
            running = seats[state[State.STATUS, seats] == SlotStatus.RUNNING]
            state[np.ix_([State.LENGTH, State.PRODUCED, State.POSITION], running)] += 1
            state[State.LEFT, running] -= 1
            state[State.STATUS, running[state[State.LEFT, running] == 0]] = SlotStatus.TRUNCATED

    def reading(self) -> Reading:
        return Reading(self.state)

    def read(self, slots: list[int], first: int, last: int) -> np.ndarray:
        return np.zeros((3, len(slots), last - first), np.int32)


class ByMates(Sitting):
    """Seats those first whose mates are the longest so far."""

    def _leave(self, slots: Any) -> None:
        self.ended = getattr(self, "ended", []) + [self.seated[slot] for slot in slots]
        super()._leave(slots)

    def _refill(self) -> None:
        begun: dict[Any, list[int]] = {}
        for seated in (*getattr(self, "ended", []), *self.seated.values()):
            begun.setdefault(self.contexts[seated.index], []).append(seated.produced)
        probed = set(begun)

        def rank(index: int) -> float:
            context = self.contexts[index]
            if context not in probed:
                probed.add(context)
                return -np.inf
            return -float(np.mean(begun.get(context, [0])))

        ranks = {index: rank(index) for index in self.waiting}
        self.waiting = type(self.waiting)(sorted(self.waiting, key=ranks.__getitem__))
        super()._refill()


def rate(shape: str, lengths: Any, sitting: type[Sitting] = Sitting) -> float:
    """Tokens per millisecond."""
    pool: Any = TimedPool(shape)
    requests = [Request([index // GROUP] * 64, 0, index, int(length)) for index, length in enumerate(lengths)]
    how = {"stretch": 8, "prefill_tokens": 32768, "keep": False, "kept": {}}
    sitting(pool, requests, budget=int(sum(lengths)), **how).work(None)  # type: ignore[arg-type]
    return float(sum(lengths)) / pool.ms


def drawn(own: float, seed: int) -> Any:
    """1,024 lengths. `own`: the share of the variance of their logarithms within a group."""
    rng = np.random.default_rng(seed)
    of_group = np.repeat(rng.standard_normal(4 * SLOTS // GROUP), GROUP)
    deviation = np.sqrt(1 - own) * of_group + np.sqrt(own) * rng.standard_normal(4 * SLOTS)
    return np.clip(LONGEST / 4 * np.exp(0.9 * deviation), LONGEST // 32, LONGEST).astype(int)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=float, nargs="+", default=[1.0, 0.5, 0.3, 0.1], help="shares within a group")
    for shape in TIMES:
        equal = rate(shape, [LONGEST] * SLOTS)
        for own in parser.parse_args().own:
            loads = [drawn(own, seed) for seed in range(3)]
            found = {
                "submitted": [rate(shape, load) for load in loads],
                "mates": [rate(shape, load, ByMates) for load in loads],
                "longest": [rate(shape, sorted(load, reverse=True)) for load in loads],
            }
            told = ", ".join(f"{name} {np.mean(rates) / equal:.0%}" for name, rates in found.items())
            print(f"{shape}, {own:.0%} of the variance within a group: {told} of equal lengths", flush=True)


if __name__ == "__main__":
    main()
