"""The ratio of one token, for every kernel that needs it: all of them must see the same one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def limited_ratio(difference, LIMIT: tl.constexpr):
    """r = exp(clamp(log pi - log pi_behavior, -LIMIT, LIMIT)); NaN where the difference is NaN or infinite.

    Rounded from float64, because the hardware's fast exponential in float32 is off by several units in the last place
    at large arguments.
    """
    limited = tl.where(difference > LIMIT, LIMIT, tl.where(difference < -LIMIT, -LIMIT, difference))
    ratio = tl.exp(limited.to(tl.float64)).to(difference.dtype)
    return tl.where(tl.abs(difference) < float("inf"), ratio, float("nan"))
