"""One text for all ways of writing a value, so that equal answers can be counted together in a majority vote.

    a number            exact if it is rational (1/2, also for 0.5), otherwise to 12 digits (1.41421356237)
    an expression       expanded, as sympy prints it
    x = 5               5: the name is not part of the answer
    a tuple, set, …     its parts in normal form; the parts of a set sorted

Two answers have the same form only if they are equal (up to those 12 digits). Some equal answers have different forms,
such as trigonometric identities. A value that would be expensive to compute has no normal form, and the caller uses its
text: this code runs inside the time limit of a verifier and must never be the part that exceeds it.
"""

from __future__ import annotations

import math
from typing import Any

import sympy

__all__ = ["normal_form"]

MAX_OPERATIONS = 40
MAX_EXPONENT = 20
MAX_DIGITS = 100
_EXPENSIVE = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative, sympy.factorial, sympy.binomial)


def normal_form(value: Any) -> str | None:
    """The normal form of what was parsed, or None."""
    try:
        return _form(value)
    except Exception:  # on hostile input, sympy may raise anything
        return None


def _form(value: Any) -> str:
    if isinstance(value, sympy.Equality) and isinstance(value.lhs, sympy.Symbol):
        return _form(value.rhs)
    if isinstance(value, sympy.Tuple):
        return f"({', '.join(map(_form, value.args))})"
    if isinstance(value, sympy.FiniteSet):
        forms = sorted(map(_form, value.args))
        return forms[0] if len(forms) == 1 else f"{{{', '.join(forms)}}}"
    if isinstance(value, sympy.Interval):
        left, right = "(" if value.left_open else "[", ")" if value.right_open else "]"
        return f"{left}{_form(value.start)}, {_form(value.end)}{right}"
    if isinstance(value, sympy.MatrixBase):
        return str([[_form(entry) for entry in row] for row in value.tolist()]).replace("'", "")
    if isinstance(value, sympy.Expr):
        return _expression(value)
    if _is_cheap(value):
        return str(value)
    raise ValueError


def _expression(value: sympy.Expr) -> str:
    if not _is_cheap(value):
        raise ValueError
    value = value.doit()
    if isinstance(value, sympy.Rational):
        return str(value)
    if isinstance(value, sympy.Float):
        return str(sympy.Rational(str(value)))
    if value.is_number:
        real, imaginary = (float(part) for part in value.evalf(20, chop=True).as_real_imag())
        if math.isnan(real):
            raise ValueError
        return f"{real:.12g}" if imaginary == 0 else f"{real:.12g} + {imaginary:.12g} i"
    return str(sympy.expand(value))


def _is_cheap(value: Any) -> bool:
    """Whether it takes only milliseconds to evaluate and expand."""
    if not isinstance(value, sympy.Basic) or value.has(*_EXPENSIVE) or sympy.count_ops(value) > MAX_OPERATIONS:
        return False
    powers = value.atoms(sympy.Pow)
    return all(
        not power.exp.has(sympy.Pow) and (not power.exp.is_number or abs(power.exp.evalf(5)) <= MAX_EXPONENT)
        for power in powers
    ) and all(abs(number.p) < 10**MAX_DIGITS and number.q < 10**MAX_DIGITS for number in value.atoms(sympy.Rational))
