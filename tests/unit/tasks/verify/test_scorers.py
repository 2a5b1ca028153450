import pytest

from bapo.tasks.verify.scorers import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    # L = 100, B = 20, by hand: (80 - 85) / 20 = -0.25, (80 - 95) / 20 = -0.75
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (85, -0.25), (95, -0.75), (100, -1.0), (101, -1.0), (10**6, -1.0)],
)
def test_the_three_cases_of_the_paper(length, expected):
    assert overlong_penalty(length, max_tokens=100, buffer=20) == pytest.approx(expected)


def test_the_penalty_scales():
    assert overlong_penalty(90, max_tokens=100, buffer=20, penalty=0.5) == pytest.approx(-0.25)
    assert overlong_penalty(100, max_tokens=100, buffer=100, penalty=0.0) == 0.0
