"""How a bad value reaches the result instead of being passed over.

A clamp, a comparison or a select turns NaN and infinity into numbers that look plausible. Code that may not look at
values (on an accelerator a look is a host sync) adds `zero_or_nan` of what went in to what comes out. Kernels do the
same in their own words.
"""

from __future__ import annotations

from torch import Tensor


def zero_or_nan(source: Tensor) -> Tensor:
    """0 where the source is finite, NaN where it is NaN or infinite. Detach the source to keep it out of gradients."""
    return 0 * source
