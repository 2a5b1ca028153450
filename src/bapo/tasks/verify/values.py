"""Parsed values: whether two are equal, and one text for all ways of writing a value.

Equal means exactly if both are exact, and within a tolerance if one of them is rounded.

    rational numbers    compared as fractions: 2^{-64}, 4.5 \\times 10^{33}, 1/2004!
    other numbers       compared to 40 digits of their size, however small they are: \\sqrt{2}, \\pi/4, 3 + 2i
    50\\%                is both 50 and 0.5
    formulas            are different if they differ at a point. If not, math-verify decides
    the rest            math-verify decides, but a tuple, set, matrix or equation is not equal if a part of it is not

A value is rounded if a decimal fraction is in it. Two values, one of them rounded, are equal if they differ

    by at most a 1e-4th of the ground truth, and by at most 1e-6,
    or, for a ground truth above 1 that is not rational, by at most a 1e-6th of it.

math-verify alone compares absolutely (a difference below about 1e-15 is none), which makes 2^{-65} equal to 2^{-64}. It
also simplifies the difference of two formulas before it gives up, which takes seconds where one point would do.

The normal form lets equal answers be counted together in a majority vote.

    a number            exact if it is rational (1/2, also for 0.5), otherwise to 12 digits (1.41421356237)
    an expression       expanded, as sympy prints it
    x = 5               5: the name is not part of the answer
    a tuple, set, …     its parts in normal form; the parts of a set sorted

Two answers have the same form only if they are equal (up to those 12 digits). Some equal answers have different forms,
such as trigonometric identities. A value that would be expensive to compute has no normal form, and the caller uses its
text: this code runs inside the time limit of a verifier and must never be the part that exceeds it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import sympy

MAX_BITS = 100_000
"""Fractions with more bits than this are not computed."""
MAX_ENTRIES = 20
"""The parts of longer tuples, sets and matrices are not compared here, but by math-verify alone."""
DIGITS = 50
MIN_BITS = 140
"""A number that was computed to fewer bits than this has lost digits to cancellation."""
_SAME = sympy.Float("1e-40", 5)
_UNKNOWN = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
MAX_OPERATIONS = 40
MAX_EXPONENT = 20
MAX_DIGITS = 100
_EXPENSIVE = (*_UNKNOWN, sympy.factorial, sympy.binomial)
_HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))


def close(gold: Fraction, found: Fraction) -> bool:
    """Whether two rational numbers, one of them rounded, are equal."""
    return abs(gold - found) <= min(Fraction(1, 10**6), abs(gold) / 10**4)


def verdict(gold: Any, found: Any) -> bool | None:
    """Whether two values are equal; None if math-verify must decide."""
    try:
        return _verdict(gold, found)
    except Exception:  # on hostile input, sympy may raise anything
        return None


def rational(value: Any) -> tuple[Fraction, bool] | None:
    """The value as a fraction, and whether it is rounded. None if it is not rational, or too large to compute."""
    if isinstance(value, sympy.Rational):
        return Fraction(int(value.p), int(value.q)), False
    if isinstance(value, sympy.Float):
        number = Fraction(str(value)) if value.is_finite else None
        return None if number is None else (number, number.denominator != 1)
    if not isinstance(value, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.binomial):
        return None
    parts = [rational(part) for part in value.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    number = _combined(value, [part[0] for part in known])
    return None if number is None else (number, any(part[1] for part in known) and number.denominator != 1)


def sides(value: Any) -> list[Any]:
    """The sides of an equation, or of a chain of equations, from left to right. Empty if it is not an equation."""
    links = getattr(value, "_unsorted_args", value.args) if isinstance(value, sympy.And) else (value,)
    if not links or not all(isinstance(link, sympy.Eq) for link in links):
        return []
    return [links[0].lhs, *(link.rhs for link in links)]


def _combined(value: Any, parts: list[Fraction]) -> Fraction | None:
    if isinstance(value, sympy.Add):
        number = sum(parts, Fraction())
    elif isinstance(value, sympy.Mul):
        number = math.prod(parts, start=Fraction(1))
    elif isinstance(value, sympy.Pow):
        base, exponent = parts
        if exponent.denominator != 1 or (base == 0 and exponent < 0) or _bits(base) * abs(exponent) > MAX_BITS:
            return None
        number = base ** int(exponent)
    elif any(part.denominator != 1 or not 0 <= part <= MAX_BITS // 16 for part in parts):
        return None
    elif isinstance(value, sympy.factorial):
        number = Fraction(math.factorial(int(parts[0])))
    else:
        number = Fraction(math.comb(int(parts[0]), int(parts[1])))
    return number if _bits(number) <= MAX_BITS else None


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _verdict(gold: Any, found: Any) -> bool | None:
    gold_sides, found_sides = sides(gold), sides(found)
    if gold_sides and found_sides:
        if _names(gold) != _names(found):
            return False
        same_name = gold_sides[0] == found_sides[0]
        return _refusal(_verdict(gold_sides[-1], found_sides[-1])) if same_name else None
    if found_sides:
        return _verdict(gold, found_sides[-1])
    if gold_sides:
        return _verdict(gold_sides[-1], found) if not gold_sides[0].atoms(sympy.Number) else None
    if isinstance(gold, sympy.Expr) and isinstance(found, sympy.Expr):
        if gold.is_number and found.is_number:
            return _same_number(gold, found)
        return _refusal(_agree_at_a_point(gold, found))
    return _refusal(_same_parts(gold, found))


def _refusal(same: bool | None) -> bool | None:
    """Only a refusal counts: that parts are equal does not make the whole equal."""
    return False if same is False else None


def _names(value: Any) -> set[str]:
    return {str(symbol) for symbol in value.free_symbols}


def _same_number(gold: Any, found: Any) -> bool | None:
    golds, founds = _readings(gold, found), _readings(found, gold)
    verdicts = [_close_numbers(one, other) for one, other in product(golds, founds)]
    return True if True in verdicts else None if None in verdicts else False


def _readings(value: Any, other: Any) -> list[Any]:
    """50% is 50 and 1/2 beside a number, but only 50 beside another percentage."""
    part = _percentage(value)
    if part is None:
        return [value]
    return [part] if _percentage(other) is not None else [part, part / 100]


def _percentage(value: Any) -> Any:
    """The 50 of 50%, as math-verify writes it; None if the value is not a percentage."""
    is_one = isinstance(value, sympy.Mul) and len(value.args) == 2 and value.args[1] == _HUNDREDTH
    return value.args[0] if is_one else None


def _close_numbers(gold: Any, found: Any) -> bool | None:
    fractions = rational(gold), rational(found)
    if fractions[0] and fractions[1]:
        (exact_gold, gold_rounded), (exact_found, found_rounded) = fractions[0], fractions[1]
        return close(exact_gold, exact_found) if gold_rounded or found_rounded else exact_gold == exact_found
    values = _evaluated(gold), _evaluated(found)
    if None in values:
        return None
    gap, size = abs(values[0] - values[1]), abs(values[0])
    if gold.has(sympy.Float) or found.has(sympy.Float):
        return bool(gap <= min(1e-6 * max(1, size), 1e-4 * size))
    return bool(gap <= _SAME * size)


def _agree_at_a_point(gold: Any, found: Any) -> bool | None:
    """Whether two formulas have the same value where every name has a value of its own, all of them positive."""
    if isinstance(gold, sympy.Symbol) or isinstance(found, sympy.Symbol):
        return None
    names = sorted(_names(gold) | _names(found))
    point = {name: sympy.Rational(1009 + 211 * place, 811 + 97 * place) for place, name in enumerate(names)}
    values = [_evaluated(value.subs({symbol: point[str(symbol)] for symbol in value.free_symbols}))
              for value in (gold, found)]  # fmt: skip
    if None in values:
        return None
    same = 1e-9 if gold.has(sympy.Float) or found.has(sympy.Float) else _SAME
    return bool(abs(values[0] - values[1]) <= same * max(map(abs, values)))


def _evaluated(value: Any) -> Any:
    """The value of a number to `DIGITS` digits; None if it has none, or if that many cannot be had."""
    if value.has(*_UNKNOWN):
        return None
    number = value.evalf(DIGITS)
    parts = number.as_real_imag()
    if not all(isinstance(part, sympy.Float | sympy.Integer) and part.is_finite for part in parts):
        return None
    if any(isinstance(part, sympy.Float) and part != 0 and part._prec < MIN_BITS for part in parts):
        return None  # the digits cancelled: it may be zero
    return number


def _same_parts(gold: Any, found: Any) -> bool | None:
    """Whether every part of one collection has an equal part in the other, at the same place if both are ordered."""
    parts = _parts(gold), _parts(found)
    if not (parts[0] and parts[1] and len(parts[0]) == len(parts[1]) <= MAX_ENTRIES):
        return None
    verdicts = [[_verdict(one, other) for other in parts[1]] for one in parts[0]]
    if not any(isinstance(value, sympy.FiniteSet) for value in (gold, found)):
        return not any(verdicts[place][place] is False for place in range(len(verdicts)))
    return not any(all(same is False for same in line) for line in [*verdicts, *zip(*verdicts, strict=True)])


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, sympy.Interval):
        return [value.start, value.end]
    if isinstance(value, sympy.MatrixBase):
        return list(value.flat())
    if isinstance(value, sympy.Tuple | sympy.FiniteSet):
        return list(getattr(value, "_unsorted_args", value.args))
    return [value] if isinstance(value, sympy.Expr) else []


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
