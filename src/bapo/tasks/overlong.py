"""A penalty that grows towards the length limit: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

                    0                                   |y| <= L - B
    penalty x       ((L - B) - |y|) / B         L - B < |y| <= L
                    -1                              L < |y|

where L is the length limit and B the buffer before it. Without the penalty, a response that is cut off just before its
answer looks the same as one that never got anywhere. The paper's L is a soft limit, and its responses may be longer
than L. Ours cannot be, so the third case is a response that was cut off at L (truncated).

The penalty changes the rewards that advantages are computed from. It is not part of the reward that is reported or
evaluated.
"""

from __future__ import annotations

__all__ = ["overlong_penalty"]


def overlong_penalty(
    length: int, *, max_tokens: int, buffer: int, penalty: float = 1.0, truncated: bool = False
) -> float:
    """What to add to the reward of a response of `length` tokens: between -penalty and 0."""
    if not 0 < buffer <= max_tokens:
        raise ValueError(
            f"overlong buffer={buffer} does not fit max_tokens={max_tokens}: the buffer is the last part of that "
            "length. Set it between 1 and max_tokens; DAPO uses a fifth."
        )
    if penalty < 0:
        raise ValueError(f"overlong penalty={penalty} is negative and would reward length. Set it to 0 or more.")
    if truncated or length > max_tokens:
        return -penalty
    return -penalty * max(0, length - (max_tokens - buffer)) / buffer
