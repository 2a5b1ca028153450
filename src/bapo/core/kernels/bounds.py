"""The bound solver in two kernels: tokens -> partial tables, the sum of these -> bounds.

The first kernel reads every token once per sixteen candidates, compares it with them and adds up in registers, in
float64; each program leaves one column of partial sums, so there are no atomics and the result does not depend on the
order in which programs run. The second, a single program, walks the path over the sums of the columns. There are no
candidates x tokens temporaries, and no look from the host.

Comparisons are those of `bapo.core.bounds`: with thresholds rounded to the ratio's dtype, on signed ratios r sign(A),
where one `<` serves both signs. A value that is not finite turns the whole table into NaN.

Both kernels are short, and Triton's search for the right compilation takes longer than their launch: at every call it
looks at the type, the value and the alignment of every argument. We name what can differ between two calls in a key,
and `Launcher` remembers the compilation for that key.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bapo.core.checks import MAX_LOG_RATIO
from bapo.core.kernels import blocks_of

MAX_PROGRAMS = 264
"""Columns of partial sums at most: two for each of the 132 multiprocessors of a large GPU."""
BLOCK_TOKENS = 256
BLOCK_CANDIDATES = 16
PATH_BLOCK = 64
TAKES_ALL_ARGUMENTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
"""Whether a compiled kernel takes all arguments, as the kernel itself does. Earlier versions left constants out."""
ALIGNMENT = 16
"""Bytes. Triton compiles for addresses that are multiples of this, and separately for others."""
INT32 = 2**31


def signal_partials(
    ratio: Tensor,  # any shape; log-probs under the learner where log_ratio_limit is given
    advantages: Tensor,  # like ratio
    mask: Tensor,  # like ratio, bool
    low: Tensor,  # [lows] float64, candidates
    high: Tensor,  # [highs] float64
    thresholds: Tensor,  # [lows + 1 + highs] in working precision: -low from the last to the first, 0, high
    *,
    surrogate: bool,
    weighted: bool,
    behavior_logprobs: Tensor | None = None,  # like ratio
    uses: Tensor | None = None,  # like ratio, integers
    used_low: Tensor | None = None,  # 0-d float64: the bound of negative tokens with uses
    brake: bool = False,  # also sum -log r of negative tokens with uses, or of all without `uses`, and count them
    log_ratio_limit: float | None = None,
) -> Tensor:  # [highs + lows + 1, and 2 for the brake, programs] float64: the sum of its columns is the signal table
    """The signal table of `bapo.core.bounds.signal_table`, in as many parts as programs filled it.

    Inputs may have any floating dtype, and hold anything where the mask is off. With `log_ratio_limit`, ratios are
    computed on the way from log-probs, and tokens past the limit are left out.
    """
    tokens, lows, highs = ratio.numel(), low.numel(), high.numel()
    programs = max(1, min(MAX_PROGRAMS, blocks_of(tokens, BLOCK_TOKENS)))
    high_blocks = blocks_of(highs, BLOCK_CANDIDATES)
    partials = torch.empty((highs + lows + 1 + 2 * brake, programs), dtype=torch.float64, device=ratio.device)
    ratio, mask = ratio.contiguous(), mask.contiguous()
    given = (
        ratio,
        advantages.contiguous(),
        mask,
        ratio if behavior_logprobs is None else behavior_logprobs.contiguous(),
        mask if uses is None else uses.contiguous(),
        low if used_low is None else used_low,
        *(low, high, thresholds, partials),
    )
    constants = surrogate, weighted, used_low is not None, brake, uses is not None, MAX_LOG_RATIO, log_ratio_limit
    kinds = kinds_of(*given)
    _fill_partials(
        None if kinds is None else (kinds, constants, tokens < INT32),
        (programs, high_blocks + blocks_of(lows, BLOCK_CANDIDATES), 1),
        *given,
        *(tokens, lows, highs, high_blocks),
        *constants,
        BLOCK_CANDIDATES,
        BLOCK_TOKENS,
    )
    return partials


def choose_bounds(
    table: Tensor,  # [settings.table_size] float64
    low: Tensor,  # [lows] float64
    high: Tensor,  # [highs] float64
    *,
    target_share: float,
    high_first: bool,
    dtype: torch.dtype,
    brake: float | None = None,  # its delta
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:  # 0-d
    """Low, high, share, share at start and at end, stop reason: what `bapo.core.bounds.first_to_reach` finds.

    Then, with a brake, the lower bound that it raises low to, and the drift.
    """
    values = torch.empty(7, dtype=dtype, device=table.device)
    stop = torch.empty((), dtype=torch.int64, device=table.device)
    given = table.contiguous(), low, high, values, stop
    constants = high_first, brake is not None, PATH_BLOCK
    kinds = kinds_of(*given)
    key = None if kinds is None else (kinds, constants)
    numbers = low.numel(), high.numel(), target_share, 1.0 if brake is None else brake
    _choose(key, (1, 1, 1), *given, *numbers, *constants)
    *found, braked, drift = values.unbind()
    return (*found, stop), None if brake is None else (braked, drift)


@triton.jit
def limited_ratio(difference, LIMIT: tl.constexpr):
    """r = exp(clamp(log pi - log pi_behavior, -LIMIT, LIMIT)); NaN where the difference is NaN or infinite.

    Rounded from float64, because the hardware's fast exponential in float32 is off by several units in the last place
    at large arguments.
    """
    limited = tl.where(difference > LIMIT, LIMIT, tl.where(difference < -LIMIT, -LIMIT, difference))
    ratio = tl.exp(limited.to(tl.float64)).to(difference.dtype)
    return tl.where(tl.abs(difference) < float("inf"), ratio, float("nan"))


@triton.jit(do_not_specialize=["tokens", "lows", "highs", "high_blocks"])
def _signal_kernel(
    ratio_ptr,
    advantages_ptr,
    mask_ptr,
    behavior_ptr,
    uses_ptr,
    used_low_ptr,
    low_ptr,
    high_ptr,
    thresholds_ptr,
    partials_ptr,
    tokens,
    lows,
    highs,
    high_blocks,
    SURROGATE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    USED: tl.constexpr,
    BRAKE: tl.constexpr,
    COUNTED: tl.constexpr,
    LARGEST: tl.constexpr,
    LOG_RATIO_LIMIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One block of candidates of one side against every programs-th block of tokens."""
    program, block = tl.program_id(0), tl.program_id(1)
    programs = tl.num_programs(0)
    WORKING: tl.constexpr = thresholds_ptr.dtype.element_ty

    raises_high = block < high_blocks
    side = tl.where(raises_high, 1.0, -1.0)
    first = tl.where(raises_high, block, block - high_blocks) * BLOCK_C
    candidate = first + tl.arange(0, BLOCK_C)
    exists = candidate < tl.where(raises_high, highs, lows)
    at = tl.where(raises_high, lows + 1 + candidate, lows - 1 - candidate)
    threshold = tl.load(thresholds_ptr + at, mask=exists, other=0.0)
    if SURROGATE:
        high = tl.load(high_ptr + candidate, mask=candidate < tl.where(raises_high, highs, 0), other=0.0)
        low = tl.load(low_ptr + candidate, mask=candidate < tl.where(raises_high, 0, lows), other=0.0)
        bound = tl.where(raises_high, high, low)

    if USED:
        used_low = tl.load(used_low_ptr)
    sums = tl.zeros((BLOCK_C, BLOCK_T), dtype=tl.float64)
    everything = tl.zeros((BLOCK_T,), dtype=tl.float64)
    signed_tokens = tl.zeros((BLOCK_T,), dtype=tl.int32)
    if BRAKE:
        fallen = tl.zeros((BLOCK_T,), dtype=tl.float64)
        looked_at = tl.zeros((BLOCK_T,), dtype=tl.int32)
    for start in range(program * BLOCK_T, tokens, programs * BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        inside = token < tokens
        chosen = tl.load(mask_ptr + token, mask=inside, other=0) != 0
        ratio = tl.load(ratio_ptr + token, mask=inside, other=0.0).to(WORKING)
        ratio = tl.where(chosen, ratio, 0.0)
        signal = tl.load(advantages_ptr + token, mask=inside, other=0.0).to(WORKING).to(tl.float64)
        if LOG_RATIO_LIMIT is not None:
            behavior = tl.load(behavior_ptr + token, mask=inside, other=0.0).to(WORKING)
            behavior = tl.where(chosen, behavior, 0.0)
            given, difference = ratio, ratio - behavior
            ratio = limited_ratio(difference, LOG_RATIO_LIMIT)
            if WEIGHTED:
                signal = signal * tl.exp(behavior.to(tl.float64))
            chosen = chosen & ((tl.abs(difference) < LOG_RATIO_LIMIT) | (ratio != ratio))
            ratio = tl.where(chosen, ratio, 0.0)
        elif WEIGHTED:
            log_weight = tl.load(behavior_ptr + token, mask=inside, other=0.0).to(tl.float64)
            signal = signal * tl.exp(tl.where(chosen, log_weight, 0.0))
        signal = tl.where(chosen, signal, 0.0) * side
        counted = ratio.to(tl.float64)
        if BRAKE:
            falls = signal * side < 0
            if COUNTED:
                falls = falls & (tl.load(uses_ptr + token, mask=inside, other=0) != 0)
            if LOG_RATIO_LIMIT is not None:
                log_ratio = given.to(tl.float64) - behavior.to(tl.float64)
            else:
                log_ratio = tl.log(tl.where(falls, counted, 1.0))
            falls = falls & ~(tl.abs(log_ratio) >= LARGEST)
            fallen -= tl.where(falls, log_ratio, 0.0)
            looked_at += falls.to(tl.int32)
        if USED:  # a used negative token has its own bound, so it stands where no candidate clips it
            used = tl.load(uses_ptr + token, mask=inside, other=0) != 0
            own_bound = used & (signal * side < 0)
            clipped_weight = used_low if SURROGATE else 0.0
            counted = tl.where(own_bound & (counted <= used_low), clipped_weight, counted)
            ratio = tl.where(own_bound, 2.0, ratio)
        weighted = counted * signal

        ours = signal > 0
        mass = tl.where(ours, weighted, 0.0)
        kept = (ratio * side.to(WORKING))[None, :] < threshold[:, None]
        if SURROGATE:
            clipped = tl.where(ours, signal, 0.0)
            sums += tl.where(kept, mass[None, :], clipped[None, :] * bound[:, None])
        else:
            sums += tl.where(kept, mass[None, :], 0.0)
        everything += weighted
        signed_tokens += (signal != 0).to(tl.int32)

    # A NaN or infinite ratio fails every comparison; it must not vanish from the sums.
    poison = tl.where(tl.abs(tl.sum(everything, axis=0)) < float("inf"), 0.0, float("nan"))
    row = tl.where(raises_high, candidate, highs + candidate)
    tl.store(partials_ptr + row * programs + program, tl.sum(sums, axis=1) + poison, mask=exists)
    count = tl.sum(signed_tokens, axis=0).to(tl.float64) + poison
    tl.store(partials_ptr + (highs + lows) * programs + program, count, mask=block == 0)
    if BRAKE:
        at = partials_ptr + (highs + lows + 1) * programs + program
        tl.store(at, tl.sum(fallen, axis=0) + poison, mask=block == 0)
        tl.store(at + programs, tl.sum(looked_at, axis=0).to(tl.float64) + poison, mask=block == 0)


@triton.jit
def _share(positive, negative, signed_tokens):
    """P / (P + N). All clipped away: 0. No signal at all: 1."""
    total = positive + negative
    empty = total == 0
    nothing = tl.where(signed_tokens == 0, 1.0, 0.0)
    return tl.where(empty, nothing, positive / tl.where(empty, 1.0, total))


@triton.jit(do_not_specialize=["lows", "highs"])
def _choose_kernel(
    table_ptr,
    low_ptr,
    high_ptr,
    values_ptr,
    stop_ptr,
    lows,
    highs,
    target_share: tl.float64,
    delta: tl.float64,
    HIGH_FIRST: tl.constexpr,
    BRAKE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The first candidate on the path with share >= target_share: one bound moves to its end, and then the other."""
    block = tl.arange(0, BLOCK_C)
    last = highs + lows - 2
    signed_tokens = tl.load(table_ptr + highs + lows)
    found = last + 1
    everything = signed_tokens
    for start in range(0, last + 1, BLOCK_C):
        position = start + block
        exists = position <= last
        high_index = tl.minimum(position, highs - 1) if HIGH_FIRST else tl.maximum(position - (lows - 1), 0)
        positive = tl.load(table_ptr + high_index, mask=exists, other=0.0)
        negative = tl.load(table_ptr + highs + position - high_index, mask=exists, other=0.0)
        reached = exists & (_share(positive, negative, signed_tokens) >= target_share)
        found = tl.minimum(found, tl.min(tl.where(reached, position, last + 1), axis=0))
        everything += tl.sum(positive + negative, axis=0)

    index = tl.minimum(found, last)
    high_index = tl.minimum(index, highs - 1) if HIGH_FIRST else tl.maximum(index - (lows - 1), 0)
    low_index = index - high_index
    raised_high = index < highs if HIGH_FIRST else index >= lows
    share = _share(tl.load(table_ptr + high_index), tl.load(table_ptr + highs + low_index), signed_tokens)
    share_at_start = _share(tl.load(table_ptr), tl.load(table_ptr + highs), signed_tokens)
    last_positive, last_negative = tl.load(table_ptr + highs - 1), tl.load(table_ptr + highs + lows - 1)
    share_at_end = _share(last_positive, last_negative, signed_tokens)
    # StopReason: START 0, RAISING_HIGH 1, RAISING_LOW 2, END 3, NO_SIGNAL 4
    stop = tl.where(raised_high, 1, 2)
    stop = tl.where(index == 0, 0, stop)
    stop = tl.where(found > last, 3, stop)
    stop = tl.where(signed_tokens == 0, 4, stop)

    poison = tl.where(tl.abs(everything) < float("inf"), 0.0, float("nan"))
    low = tl.load(low_ptr + low_index)
    tl.store(values_ptr, low + poison)
    tl.store(values_ptr + 1, tl.load(high_ptr + high_index) + poison)
    tl.store(values_ptr + 2, share + poison)
    tl.store(values_ptr + 3, share_at_start + poison)
    tl.store(values_ptr + 4, share_at_end + poison)
    tl.store(stop_ptr, stop.to(tl.int64))
    if BRAKE:
        fallen = tl.load(table_ptr + highs + lows + 1)
        count = tl.load(table_ptr + highs + lows + 2)
        drift = fallen / tl.where(count < 1, 1.0, count)
        strength = drift / delta
        strength = tl.where(strength < 0, 0.0, tl.where(strength > 1, 1.0, strength))
        poison += tl.where(tl.abs(drift) < float("inf"), 0.0, float("nan"))
        braked = tl.where(strength == 1, 1.0, low + (1.0 - low) * strength)
        tl.store(values_ptr + 5, braked + poison)
        tl.store(values_ptr + 6, drift + poison)


class Launcher:
    """One kernel, with the options of its launches."""

    def __init__(self, kernel: Any, **options: int) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch. `key`: all in the arguments that makes another compilation; None: let Triton look."""
        compiled = None if key is None else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        compiled = self.kernel[grid](*arguments, **self.options)  # None from the interpreter
        if key is not None and TAKES_ALL_ARGUMENTS and compiled is not None:
            self._compiled[key] = compiled


def kinds_of(*tensors: Tensor) -> tuple[torch.dtype | int, ...] | None:
    """What Triton sees in these tensors, if all of them are aligned: their types and their device."""
    address = 0
    for tensor in tensors:
        address |= tensor.data_ptr()
    if address % ALIGNMENT:
        return None
    return (tensors[0].get_device(), *(tensor.dtype for tensor in tensors))


_fill_partials, _choose = Launcher(_signal_kernel), Launcher(_choose_kernel, num_warps=8)
