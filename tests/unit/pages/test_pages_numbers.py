import json
from math import inf, nan

from bapo.pages import number, numbers
from bapo.runs.files import strict


def test_a_page_gets_six_digits_or_null():
    assert numbers([1 / 3, 2, nan, -inf, None]) == [0.333333, 2.0, None, None, None]
    assert number(1234567.0) == 1234570.0


def test_what_json_cannot_say_is_null_or_spelled():
    value = {"a": [1, inf, (nan, "x")], 2: {"b": -inf, "c": None, "d": 0.1234567891}}
    assert strict(value) == {"a": [1, None, [None, "x"]], "2": {"b": None, "c": None, "d": 0.1234567891}}
    assert strict(value, spell=True)["a"] == [1, "inf", ["nan", "x"]]
    json.dumps(strict(value), allow_nan=False)
