"""Numbers for JSON and for pages. JSON has neither infinity nor NaN, so numbers that are not finite become null.

Pages get six significant digits (`number`, `numbers`); data keep all digits (`strict`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def number(value: float | None) -> float | None:
    """The value in six significant digits; None if there is none or it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """`number` of each value."""
    return [number(value) for value in values]


def strict(value: Any, *, spell: bool = False) -> Any:
    """Nested dicts and lists as JSON can hold them: a number that is not finite becomes null, or text with `spell`."""
    if isinstance(value, Mapping):
        return {str(key): strict(inner, spell=spell) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner, spell=spell) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if spell else None
    return value
