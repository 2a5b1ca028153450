"""Scores answers to mathematical problems. A few rules of ours come first, then math-verify decides.

The final answer of a response is the first of these that exists (`bapo.tasks.verify.final`):

    1. the content of its last \\boxed{…}
    2. the rest of its last line, if that line begins with ####
    3. the answer that its last line states, if that is mathematics or a marked word ($B$), without its reason
    4. what math-verify extracts from the text: the last formula or number
    5. the words that its last line states as the answer

Only the text after </think> counts, and of that the last 8,192 characters. An answer of more than 1,000 characters is
refused.

Answer and ground truth are compared by the first rule that applies:

    the same text       after removing what does not show: spaces (not between digits), \\left, \\!, $, \\text{…}, …
    two rationals       exactly; if one of them is written as a decimal, within 1e-6 and a 1e-4th of the ground truth
    a time of day       4:40 a.m., 4:40 AM and 4:40 are the same
    words               \\text{Evelyn}, even, (C): only the same text is equal, in upper or lower case. To a computer
                        algebra system a word is a product of letters, so it would accept every anagram
    52_8                the same digits, and the same base if both name one
    mathematics         `values.py`, then math-verify: expressions, tuples, sets, intervals, matrices, equations

Units, currencies and degrees are ignored, and 50% is both 50 and 0.5, as in math-verify. There are three things that
math-verify would read as another number, so only the same text is equal to them: a number that a word changes
(3 trillion, 3 fifths, 5 minus one; but quarters are coins), digits with a space between them that does not group
thousands (1 2; but 1 1/2 is 3/2), and an equation of two different numbers (7 = 5).

If a response answers with an equation, its right side is the answer, or its left side if the right side is only a name:
x = 5, 5 = x and 5 cm = x all mean 5. So do 3 + 2 = 5 and 5 = 5, which are true. x = 5 = 6 and 6 = 5 = x cannot be true
and mean nothing.

math-verify's own time limits are off, because they use signals, which work only in the main thread. So call `verify`
through `sandbox.py`. It depends on nothing but its arguments. A bad ground truth makes it raise; no response text does.
"""

import functools
import itertools
import logging
import re
import warnings
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from bapo.tasks.verify.final import after_hashes, boxed, sentence, stated, visible
from bapo.tasks.verify.values import close, normal_form, rational, sides, verdict
from bapo.types import Score

MAX_ANSWER = 1000
"""The most characters that an answer may have."""

for _library in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_library).setLevel(logging.CRITICAL)

_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
_UNSHOWN = re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr|Bigl?|Bigr)(?![a-zA-Z])|\\!\s*")
_MARKS = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]")
_SPACE = re.compile(r"\\[,;: ]|~")
_NUMBER = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d{1,100})?(?:\.(\d{0,100}))?(?:[eE]([-+]?\d{1,3}))?")
_SCALED = re.compile(  # 4.5 \times 10^{33}, 10^{-5}
    r"(?:([-+]?[\d.,]+) ?(?:\\times|\\cdot|[x×·*]) ?|([-+]?))10 ?\^ ?[{(]? ?([-+]?\d{1,3}) ?[})]?"
)
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,9})(?![\w.])")  # 4.5e33 inside a formula
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d) ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_FORMULA = re.compile(r"\$[^$]+\$|\\\((?:(?!\\[()]).)+\\\)|\\\[(?:(?!\\[\[\]]).)+\\\]")
_JOIN = re.compile(r"\b(?:or|and)\b", re.IGNORECASE)
_FORMULA_WORDS = "percent|percentage|pct|sin|cos|tan|log|sqrt|exp|and|mod|plus|minus|over"
_DIGITS = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_PART_OF_MORE = re.compile(r" ?\^ ?\{? ?[-+(]?\d|:\d\d")  # a base, an hour
_UNIT = re.compile(
    r"(?:\^\{?\s*(?:\\circ|°)\s*\}?|°"  # degrees
    rf"|(?<=[\d}}])\s+(?!(?i:{_FORMULA_WORDS})\b)[a-zA-Z]{{3,}}(?: [a-zA-Z]+)*)$"  # any other word after a number
)
_MULTIPLES = "hundred|thousand|million|billion|trillion|quadrillion|quintillion|dozen|googol|lakh|crore"
_PARTS = (
    "half|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|twentieth|hundredth|thousandth|"
    "millionth|billionth|trillionth"
)
_COUNTS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|half|quarter"
)
_OPERATIONS = "plus|minus|times|over|point|and|or|mod|modulo|choose|divided by|multiplied by|to the"
_CHANGED = re.compile(  # a number and a word after it that turns it into another number
    rf"\d *(?:(?:{_MULTIPLES})s?\b|(?:(?:{_PARTS})s|halves|tens|squared|cubed|factorial)\b|(?:{_PARTS})(?! ?[a-z])"
    rf"|(?:{_OPERATIONS}) (?:an? )?(?:{_COUNTS}|{_PARTS}|{_MULTIPLES})s?\b)",
    re.IGNORECASE,
)
_PERCENT = re.compile("percent", re.IGNORECASE)
_APART = re.compile(r"\d \d")
_MIXED = re.compile(r"([-+]?)(\d{1,100}) (\d{1,100})/(\d{1,100})")
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")
_CHOICE = re.compile(r"\(?[A-Z]\)?")
_BASED = re.compile(r"\(?(\d[\da-zA-Z]{0,99})\)?_\{?(\d{1,2})\}?")
_WORDS = re.compile(r"[^\W\d_][^\d\\^_{}=+*/<>|]*")
_LETTERS = re.compile(r"[^\W\d_]{3}")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[a-zA-Z*]+\}|\\[a-zA-Z]+")


def verify(answer: str | float | list[str | float], response: str, *, thinking: bool = False) -> Score:
    """1.0 if the final answer of the response equals `answer`, otherwise 0.0; and that final answer in normal form.

    If `answer` is a list, any of its entries is right. `thinking`: see `verify_thinking`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn about hostile texts
        golds = [_gold(_gold_text(one)) for one in (answer if isinstance(answer, list) and answer else [answer])]
        found = _final_answer(visible(response, thinking=thinking))
        if found is None:
            return Score(0.0)
        return Score(float(any(_same(gold, found) for gold in golds)), answer=_shared_form(found))


def verify_thinking(answer: str | float | list[str | float], response: str) -> Score:
    """Like `verify`, for models whose prompt already opens the thinking: only text after </think> can answer."""
    return verify(answer, response, thinking=True)


@dataclass(frozen=True)
class _Answer:
    """One answer, read in every way that is possible."""

    text: str
    """The text without what does not show."""
    number: Fraction | None = None
    decimal: bool = False
    """Whether the number is written with a decimal point, and so perhaps rounded."""
    words: bool = False
    base: str = ""
    """The base of the number system, if it is written: the 8 of 52_8. `text` then holds the digits."""
    value: Any = None
    """What math-verify parsed, unless the answer is a number or words."""
    clock: tuple[str, str] | None = None
    """A time of day and its half: (4:40, a) for 4:40 a.m., (4:40, "") for 4:40, which may be a ratio."""
    misread: bool = False
    """Whether math-verify would read it as another number. If so, it was not parsed."""


def _gold_text(answer: object) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise ValueError(f"the ground truth {answer!r} is not an answer; it must be a number or a non-empty text")
    text = str(answer)
    return (boxed(text) or after_hashes(text) or text).strip()


def _final_answer(text: str) -> _Answer | None:
    """The final answer of a response."""
    if (clear := boxed(text)) is not None or (clear := after_hashes(text)) is not None:
        return _read_name_first(clear) if 0 < len(clear) <= MAX_ANSWER else None
    for said in stated(text):
        if 0 < len(said) <= MAX_ANSWER and _is_clear(said, answer := _read_name_first(said)):
            return answer
    tail = _in_full(text[-MAX_ANSWER:])
    extracted = _parse(tail, ExprExtractionConfig())
    if extracted is not None and not _is_a_part(extracted, tail):
        if _names_last(extracted):
            extracted = sympy.Eq(extracted.rhs, extracted.lhs, evaluate=False)
        return _parsed("", _result(extracted))
    words = sentence(text)
    return _Answer(_clean(words), words=True) if words and len(words) <= MAX_ANSWER else None


def _is_clear(said: str, answer: _Answer) -> bool:
    """Whether what a sentence states is mathematics, or a word that is marked as an answer: $B$, (B), \\text{even}."""
    if answer.number is not None or answer.misread or answer.clock is not None:
        return True
    if answer.words:
        return any(kind.fullmatch(said) for kind in (_FORMULA, _WRAPPED, _CHOICE))
    return answer.value is not None and _LETTERS.search(_COMMAND.sub("", answer.text)) is None


def _is_a_part(value: Any, text: str) -> bool:
    """Whether a number is only a part of what is written: the base of a power, 5^{9^{8, or the hour of 4:40."""
    if not isinstance(value, sympy.Integer | sympy.Float):
        return False
    number = abs(Fraction(int(value)) if isinstance(value, sympy.Integer) else Fraction(str(value)))
    places = [place for place in _DIGITS.finditer(text) if _number(place[0]) == number]
    return bool(places) and _PART_OF_MORE.match(text, places[-1].end()) is not None


def _read(text: str) -> _Answer:
    text = _MARKS.sub("", text)
    shown = _clean(text)
    based = _BASED.fullmatch(_squeezed(shown))
    if based:
        return _Answer(based[1], number=_number(based[1]), base=based[2])
    number = _number(shown)
    if number is not None:
        return _Answer(shown, number=number, decimal="." in shown and number.denominator != 1)
    clock = _CLOCK.fullmatch(shown)
    if clock and clock[3]:
        hour, half = f"{int(clock[1])}:{clock[2]}", clock[3].lower()
        return _Answer(f"{hour} {half}m", words=True, clock=(hour, half))
    if (
        _WRAPPED.fullmatch(text.strip())
        or _CHOICE.fullmatch(shown)
        or (_WORDS.fullmatch(shown) and _LETTERS.search(shown))
    ):
        return _Answer(shown, words=True)
    if _CHANGED.search(shown) or _APART.search(shown):
        return _Answer(shown, misread=True)
    value = _parse(rf"\boxed{{{_in_full(_JOIN.sub(lambda word: word[0].lower(), _PERCENT.sub('percent', text)))}}}")
    if _is_false(shown, value):
        return _Answer(shown, misread=True)
    return replace(_parsed(shown, value), clock=(f"{int(clock[1])}:{clock[2]}", "") if clock else None)


_gold = functools.lru_cache(maxsize=1024)(_read)


def _in_full(text: str) -> str:
    """The text with 4.5e33 written as a power of ten. To LaTeX, the e is Euler's number."""
    return _EXPONENT.sub(r"(\1*10^(\2))", text)


def _read_name_first(text: str) -> _Answer:
    """Like `_read`, but as an answer: 5 = x is x = 5, and 3 + 2 = 5 is 5. math-verify compares with the right side.

    Not for ground truths: there, x + y = z is an equation that the problem asks for.
    """
    answer = _read(text)
    if sides(answer.value):
        answer = _parsed(answer.text, _result(answer.value))
    if not _names_last(answer.value) or text.count("=") != 1:
        return answer
    left, right = text.split("=")
    return replace(_read(f"{right} = {left}"), text=answer.text)


def _result(value: Any) -> Any:
    """The last side of an equation between numbers; any other value as it is."""
    chain = sides(value)
    return chain[-1] if chain and all(map(_is_number, chain)) else value


def _names_last(value: Any) -> bool:
    """Whether it is an equation whose right side is a name, and the left side is not one and does not contain it."""
    if not isinstance(value, sympy.Eq) or not isinstance(value.rhs, sympy.Symbol):
        return False
    return not isinstance(value.lhs, sympy.Symbol) and value.rhs not in value.lhs.free_symbols


def _is_false(shown: str, value: Any) -> bool:
    """Whether it is an equation, or a chain of them, that cannot be true: 7 = 5, or x = 3 x = 4."""
    first, *_, last = map(_number, shown.split("=")) if "=" in shown else (None, None)
    if first is not None and last is not None and not close(first, last):
        return True
    chain = sides(value)
    if chain and isinstance(chain[0], sympy.Symbol) and any(side.has(chain[0]) for side in chain[1:-1]):
        return True  # two equations, and a word between them that could not be read
    pairs = [pair for pair in itertools.pairwise(chain) if all(_is_number(side) for side in pair)]
    return any(not _equal(*pair) for pair in pairs)


def _is_number(value: Any) -> bool:
    return bool(getattr(value, "is_number", False))


def _parsed(shown: str, value: Any) -> _Answer:
    exact = rational(value)
    if exact and max(abs(exact[0].numerator), exact[0].denominator) < 10**MAX_ANSWER:
        return _Answer(shown, number=exact[0], decimal=exact[1])
    return _Answer(shown, value=value)


def _clean(text: str) -> str:
    """The text without what does not show, and with words unwrapped."""
    text = _UNSHOWN.sub("", _SPACE.sub(" ", _MARKS.sub("", text)).replace("{,}", ",").replace("−", "-"))
    text = _WRAPPED.sub(r"\1", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _GROUPS.sub(lambda group: group[0].replace(" ", ""), " ".join(text.split())).removesuffix(".")


def _number(shown: str) -> Fraction | None:
    """The number that a text is, without its unit; None if it is not a number."""
    if _CHANGED.search(shown):
        return None
    bare = _UNIT.sub("", shown.strip("€£¥ ")).strip()
    mixed = _MIXED.fullmatch(bare)
    if mixed and int(mixed[4]):
        return int(f"{mixed[1]}1") * (int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4])))
    scaled = _SCALED.fullmatch(bare)
    if scaled:
        bare = f"{scaled[1] or scaled[2] + '1'}e{scaled[3]}"
    parts = _NUMBER.fullmatch(bare)
    if parts is None or not (parts[2] or parts[3]):
        return None
    return Fraction(f"{parts[1]}{(parts[2] or '0').replace(',', '')}.{parts[3] or '0'}e{parts[4] or 0}")


def _parse(text: str, *more: Any) -> Any:
    """What math-verify parses from a text; None if nothing."""
    found = math_verify.parse(
        text,
        [LatexExtractionConfig(boxed_match_priority=0), *more],
        fallback_mode="no_fallback",
        extraction_mode="any_match" if more else "first_match",  # a box is read as a whole, not searched for parts
        parsing_timeout=None,
    )
    return found[0] if found else None


def _same(gold: _Answer, found: _Answer) -> bool:
    if gold.base and found.base and gold.base != found.base:
        return False
    if gold.text and _squeezed(gold.text) == _squeezed(found.text):
        return True
    if gold.clock and found.clock and (gold.clock[1] or found.clock[1]):
        return gold.clock[0] == found.clock[0] and "" in (gold.clock[1], found.clock[1])
    if gold.number is not None and found.number is not None:
        return close(gold.number, found.number) if gold.decimal or found.decimal else gold.number == found.number
    if gold.words or found.words:
        return gold.words and _word(gold.text) == _word(found.text)
    values = [_sympy_value(gold), _sympy_value(found)]
    return not any(value is None for value in values) and _equal(*values)


def _equal(gold: Any, found: Any) -> bool:
    same = verdict(gold, found)
    return bool(math_verify.verify(gold, found, timeout_seconds=None)) if same is None else same


def _squeezed(text: str) -> str:
    """The text without spaces, except for those between digits."""
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text)


def _word(text: str) -> str:
    """Words without case, spaces or enclosing punctuation: (C) is c."""
    return _squeezed(text).strip("().:,;\"'").casefold()


def _sympy_value(answer: _Answer) -> Any:
    if answer.number is None:
        return answer.value
    exact = sympy.Rational(answer.number.numerator, answer.number.denominator)
    return sympy.Float(exact, 30) if answer.decimal else exact


def _shared_form(answer: _Answer) -> str:
    if answer.number is not None:
        return str(answer.number)
    form = _word(answer.text) if answer.words else normal_form(answer.value) or _squeezed(answer.text)
    return form[:200].encode("utf-8", "replace").decode()


for _formula in (  # parsing builds the grammar's tables: do that on import, outside any time limit, and before any fork
    r"\frac{\cos (2 t)}{15}+C_{1} e^{-t}-\sqrt[3]{2 x} \ln 5",
    r"\omega_{n}^{2} e^{-t} \cos \left(\sqrt{1-\zeta^{2}} t\right)-\frac{\zeta^{2}}{\sqrt{1-\zeta}} \sin (t)",
):
    verify("1", rf"\boxed{{{_formula}}}")
