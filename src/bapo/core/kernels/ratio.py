"""The ratio of one token, for every kernel that needs it: all of them must see the same one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def limited_ratio(difference, LIMIT: tl.constexpr):
    """r = exp(clamp(log pi - log pi_behavior, -LIMIT, LIMIT)), rounded from float64; NaN where the difference is no number.

    The hardware's fast float32 exponential is off by several units in the last place at large arguments. An infinity
    is never hidden by the clamp.
    """
    limited = tl.where(difference > LIMIT, LIMIT, tl.where(difference < -LIMIT, -LIMIT, difference))
    ratio = tl.exp(limited.to(tl.float64)).to(difference.dtype)
    return tl.where(tl.abs(difference) < float("inf"), ratio, float("nan"))
