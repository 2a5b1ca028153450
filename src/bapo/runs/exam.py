"""What the scores of a comparison were measured on, in words, with a warning if that is little.

    scored_on([32, 32], [0.14, 0.12], 8, seeds=True) -> "The scores are from only 32 held-out problems, 8 samples …"

All seeds of a task have the same held-out problems. So an interval over seeds says what other seeds would give on these
problems, and not what other problems would give. With few of them, the second is the larger doubt.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from bapo.config.numerals import counted

FEW_PROBLEMS = 100
"""Fewer problems are few. From 100, the 95% interval of a score is at most ±0.1 wide: 1.96 · √(0.25 / 100)."""


def scored_on(
    problems: Iterable[float],  # of each run or arm
    halves: Iterable[float],  # half widths of their scores' own 95% intervals over problems, where these are known
    k: int | str,  # a letter if runs differ in it
    *,
    seeds: bool,  # whether intervals over seeds stand beside these sentences
) -> str:
    """Sentences on the number of problems; none if it is not known."""
    counts = sorted({round(count) for count in problems if isfinite(count)})
    if not counts:
        return ""
    half = max(filter(isfinite, halves), default=None)
    few = counts[0] < FEW_PROBLEMS
    number = counted(counts[-1], "held-out problem")
    number = number if len(counts) == 1 else f"{counts[0]:,} to {number}"
    samples = f", {counted(k, 'sample')} each" if isinstance(k, int) else ""
    said = f"The scores are from {'only ' * few}{number}{samples}."
    if not few:
        return said
    doubt = (
        f": other problems of the same kind could move a score by up to {half:.2f} (95%)" if half is not None else ""
    )
    said += f" Fewer than {FEW_PROBLEMS} are few{doubt}."
    return f"{said} Intervals over seeds leave this out, because every seed has the same problems." if seeds else said
