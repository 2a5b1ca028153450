"""Numbers on their way into JSON and pages: JSON can say neither infinity nor NaN, so what is not finite becomes null.

A page needs six significant digits (`number`, `numbers`); data keep all of theirs (`strict`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def number(value: float | None) -> float | None:
    """Six significant digits; null where there is no finite number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """The same for many."""
    return [number(value) for value in values]


def strict(value: Any, *, spell: bool = False) -> Any:
    """A value of dicts and lists as JSON can hold it: what is not finite becomes null, or its name with `spell`."""
    if isinstance(value, Mapping):
        return {str(key): strict(inner, spell=spell) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner, spell=spell) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if spell else None
    return value
