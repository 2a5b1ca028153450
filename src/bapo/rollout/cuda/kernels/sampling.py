"""Draws the next token of every row and moves the row on, all on the device.

The host reads the outcome later: each slot has a column in `State`, which this kernel reads and writes, and space for
what it sampled. The draw is the same as in `local.draw`: the float32 softmax of logits over temperature, inverted at
the uniform of (stream, position), see `randomness.py`; sums of probabilities are float64. Tokens that truncation left
out have logits of minus infinity.
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor


class State(IntEnum):
    """What is known about every slot; each entry is one row of int64."""

    LAST = 0
    """The token to feed next."""
    LENGTH = 1
    """How many tokens the cache holds before it, which is its position."""
    PRODUCED = 2
    """Tokens sampled in this sitting."""
    LEFT = 3
    """Tokens until the length limit."""
    STREAM = 4
    """Where the response's random numbers start."""
    POSITION = 5
    """Response position of the next token."""
    STATUS = 6
    """A SlotStatus."""


class SlotStatus(IntEnum):
    """What a slot is doing."""

    IDLE = 0
    RUNNING = 1
    STOPPED = 2
    TRUNCATED = 3
    BROKEN = 4
    """The logits were not finite."""


@triton.jit
def _uniform(stream, position):
    """SplitMix64 at random access; see randomness.py."""
    word = stream.to(tl.uint64, bitcast=True) + (position.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    return (word >> 12).to(tl.float64) * 2.220446049250313e-16  # 2^-52


@triton.jit
def _sample(
    logits, slots, state, tokens, logprobs, entropies, stop_ids, temperature, vocabulary, all_slots, reach,
    STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    place = state + slot
    if tl.load(place + 6 * all_slots) == 1:
        column = tl.arange(0, BLOCK)
        base = logits + row * vocabulary
        heat = tl.load(temperature)
        greedy = heat == 0.0
        heat = tl.where(greedy, 1.0, heat)

        best = tl.full([], float("-inf"), tl.float32)
        choice = tl.full([], 0, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            z = tl.load(base + start + column, mask=start + column < vocabulary, other=float("-inf")).to(tl.float32)
            high = tl.max(z, axis=0)
            where_high = start + tl.argmax(z, axis=0)
            choice = tl.where(high > best, where_high, choice)
            best = tl.maximum(best, high)
        best = best / heat

        total = tl.zeros([], tl.float64)
        pull = tl.zeros([], tl.float64)
        for start in range(0, vocabulary, BLOCK):
            z = tl.load(base + start + column, mask=start + column < vocabulary, other=float("-inf")).to(tl.float32)
            gap = z / heat - best
            mass = tl.exp(gap)
            total += tl.sum(mass.to(tl.float64), axis=0)
            pull += tl.sum((mass * tl.where(mass > 0, gap, 0.0)).to(tl.float64), axis=0)

        stream = tl.load(place + 4 * all_slots)
        position = tl.load(place + 5 * all_slots)
        threshold = _uniform(stream, position) * total
        running = tl.zeros([], tl.float64)
        before = tl.zeros([], tl.float64)
        hit = tl.full([], 0, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            z = tl.load(base + start + column, mask=start + column < vocabulary, other=float("-inf")).to(tl.float32)
            after = running + tl.sum(tl.exp(z / heat - best).to(tl.float64), axis=0)
            found = (running <= threshold) & (after > threshold)
            hit = tl.where(found, start, hit)
            before = tl.where(found, running, before)
            running = after
        z = tl.load(base + hit + column, mask=hit + column < vocabulary, other=float("-inf")).to(tl.float32)
        mass = tl.exp(z / heat - best).to(tl.float64)
        passed = (before + tl.cumsum(mass, axis=0) > threshold) & (mass > 0)
        first = tl.min(tl.where(passed, column, BLOCK), axis=0)
        last = tl.max(tl.where(mass > 0, column, 0), axis=0)  # the block's sum and its running sums round differently
        drawn = hit + tl.where(first < BLOCK, first, last)
        token = tl.where(greedy, choice, drawn)

        log_total = tl.log(total.to(tl.float32))
        logprob = tl.load(base + token).to(tl.float32) / heat - best - log_total
        entropy = log_total - (pull / total).to(tl.float32)
        nothing = (total - total).to(tl.float32)  # 0, or NaN where any logit is NaN or the best is infinite
        logprob = tl.where(greedy, nothing, logprob)
        entropy = tl.where(greedy, nothing, entropy)

        produced = tl.load(place + 2 * all_slots)
        tl.store(tokens + slot * reach + produced, token.to(tl.int32))
        tl.store(logprobs + slot * reach + produced, logprob)
        tl.store(entropies + slot * reach + produced, entropy)
        stop = tl.arange(0, STOPS)
        stopped = tl.sum((tl.load(stop_ids + stop) == token).to(tl.int32), axis=0) > 0
        left = tl.load(place + 3 * all_slots) - 1
        status = tl.where(stopped, 2, tl.where(left == 0, 3, 1))
        sound = (logprob <= 0.001) & (logprob > float("-inf"))
        status = tl.where(sound, status, 4)
        tl.store(place, token.to(tl.int64))
        tl.store(place + all_slots, tl.load(place + all_slots) + 1)
        tl.store(place + 2 * all_slots, produced + 1)
        tl.store(place + 3 * all_slots, left)
        tl.store(place + 5 * all_slots, position + 1)
        tl.store(place + 6 * all_slots, status.to(tl.int64))


def sample(
    logits: Tensor,  # [rows, vocabulary]
    slots: Tensor,  # [rows] the slot of each row; rows of idle slots do nothing
    state: Tensor,  # [len(State), slots] int64
    tokens: Tensor,  # [slots, reach] int32, written at [slot, produced], as are the next two
    logprobs: Tensor,
    entropies: Tensor,
    *,
    stop_ids: Tensor,  # [power of two] int64, unused places -1
    temperature: Tensor,  # [1] float32; 0 is greedy
) -> None:
    """Draw one token for every running slot and update the slot's state."""
    assert len(slots) == len(logits), f"{len(slots)} slots for {len(logits)} rows"
    vocabulary = logits.shape[1]
    block = min(4096, triton.next_power_of_2(vocabulary))
    _sample[(len(logits),)](
        *(logits, slots, state, tokens, logprobs, entropies, stop_ids, temperature),
        *(vocabulary, state.shape[1], tokens.shape[1]),
        STOPS=len(stop_ids), BLOCK=block, num_warps=8,
    )  # fmt: skip
