"""What the scores of a comparison were measured on, in words, with a warning if that is little.

    scored_on([32, 32], [0.14, 0.12], seeds=True) -> "The scores are from only 32 held-out problems. …"

All seeds of a task have the same held-out problems. So an interval over seeds says what other seeds would give on these
problems, and not how far these are from all problems of the kind. With few of them, the second is the larger doubt.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from bapo.config.numerals import counted

FEW_PROBLEMS = 100
"""Fewer problems are few. From 100, the 95% interval of a mean of rewards from 0 to 1 reaches at most 0.1 to each side:
1.96 · √(0.25 / 100)."""


def scored_on(
    problems: Iterable[float],  # of each run or arm
    reaches: Iterable[float],  # how far their scores' own 95% intervals over problems reach, where these are known
    *,
    seeds: bool,  # whether intervals over seeds stand beside these sentences
) -> str:
    """Sentences on the number of problems; none if it is not known."""
    counts = sorted({round(count) for count in problems if isfinite(count)})
    if not counts:
        return ""
    reach = max(filter(isfinite, reaches), default=None)
    fewest, most = counts[0], counts[-1]
    number = counted(most, "held-out problem")
    number = number if fewest == most else f"{fewest:,} to {number}"
    said = f"The scores are from {'only ' * (most < FEW_PROBLEMS)}{number}."
    if fewest >= FEW_PROBLEMS:
        return said
    said += f" Fewer than {FEW_PROBLEMS} are few"
    said += (
        "."
        if reach is None
        else f": over all problems of this kind, a score may be up to {reach:.2f} higher or lower (95%)."
    )
    return f"{said} Intervals over seeds leave this out, because every seed has the same problems." if seeds else said
