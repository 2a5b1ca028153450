"""Numbers on their way into a page: six significant digits, and null for what is not finite, which JSON cannot say."""

from __future__ import annotations

import math
from collections.abc import Iterable


def number(value: float | None) -> float | None:
    """Six significant digits; null where there is no finite number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """The same for many."""
    return [number(value) for value in values]
