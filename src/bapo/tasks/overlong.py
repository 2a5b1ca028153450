"""A penalty that grows towards the length limit: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

                    0                                   |y| <= L - B
    penalty x       ((L - B) - |y|) / B         L - B < |y| <= L
                    -1                              L < |y|

with L the length limit and B the buffer before it. Without it a response cut off just before its answer and one that
never got anywhere look the same. The paper's L is a soft limit and its length counts tokens past it; ours cannot grow
longer than L, so that a response cut off there (truncated) is the third case.

It shapes what advantages are computed from; it is no part of the reward that is reported or evaluated.
"""

from __future__ import annotations

__all__ = ["overlong_penalty"]


def overlong_penalty(
    length: int, *, max_tokens: int, buffer: int, penalty: float = 1.0, truncated: bool = False
) -> float:
    """What to add to the reward of a response of `length` tokens: 0 down to -penalty."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(
            f"overlong buffer={buffer} does not fit max_tokens={max_tokens}: the buffer is the last part of the limit. "
            "Set it between 1 and max_tokens; DAPO takes a fifth."
        )
    if penalty < 0:
        raise ValueError(f"overlong penalty={penalty} would reward length. Give its size, 0 or more.")
    if truncated or length > max_tokens:
        return -penalty
    return -penalty * max(0, length - (max_tokens - buffer)) / buffer
