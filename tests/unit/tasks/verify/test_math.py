import threading
import time

import pytest

from bapo.tasks.verify.final import TAIL, after_hashes, boxed, sentence, visible
from bapo.tasks.verify.math import MAX_ANSWER, verify, verify_thinking
from bapo.tasks.verify.sandbox import VerifierPool
from tests.hostile_answers import draws

# Ground truths as data sets have them: GSM8K's numbers, MATH's LaTeX, AIME's three digits.
GOLDS = [
    *(
        "72",
        "-5",
        "1,080",
        "109,200,000",
        "0",
        "025",
        "0.5",
        "70000",
        r"10,\!080",
        r"11,\! 111,\! 111,\! 100",
        r"\$32,\!348",
    ),
    *(
        r"\frac{1}{2}",
        r"\frac43",
        r"\frac9{19}",
        r"\dfrac{33}{100}",
        "1/2",
        r"1\frac{4}{5}",
        r"137 \frac{1}{2}",
        r"\pi",
    ),
    *(r"\left( 3, \frac{\pi}{2} \right)", "(6,31,-1)", r"(-\infty, 2) \cup (3, \infty)", "(3,4]", r"x \in [-2,7]"),
    *(
        r"\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right]",
        "3, 5, 7",
        "1,-2",
        r"\{1\pm\sqrt{5},-2\}",
        r"1 \pm \sqrt{19}",
    ),
    *(
        "p - q",
        "x^5 - x^4 + x^3 - x^2 + x - 1",
        "x=5",
        "5x - 7y + 11z + 4 = 0",
        r"\cot x",
        "(a+5)(b+2)",
        "6 - 5i",
        "5r^5",
    ),
    *(
        r"\text{Evelyn}",
        r"\text{even}",
        r"\text{(C)}",
        "no solution",
        "52_8",
        "4210_{5}",
        r"90^\circ",
        r"50\%",
        r"\$18.90",
    ),
    *(r"864 \mbox{ inches}^2", r"\frac{270}7\text{ degrees}", r"5.4 \text{ cents}", r"15\mbox{ cm}^2", r"11\sqrt2"),
    *(r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}"),
]


def reward(gold, response):
    return verify(gold, response).reward


@pytest.mark.parametrize("gold", GOLDS)
def test_a_ground_truth_is_accepted_however_it_is_written(gold):
    for response in (
        rf"\boxed{{{gold}}}",
        f"so\n#### {gold}",
        f"We add.\nThe answer is {gold}.",
        rf"is $\boxed{{ {gold} }}$.",
    ):
        assert reward(gold, response) == 1.0, response


@pytest.mark.parametrize(("gold", "other"), list(zip(GOLDS, GOLDS[1:] + GOLDS[:1], strict=True)))
def test_a_wrong_answer_is_refused(gold, other):
    if {gold, other} == {r"\frac{1}{2}", "0.5"}:
        return
    wrong = [rf"\boxed{{{other}}}", f"The answer is {other}.", f"#### {other}", rf"\boxed{{{gold} + 1}}"]
    wrong += [rf"\boxed{{{gold}}} or rather \boxed{{{other}}}", rf"\boxed{{{gold}, {other}, 123}}", rf"\boxed{{{gold}"]
    wrong += [
        rf"<think>\boxed{{{gold}}}",
        rf"<think>\boxed{{{gold}}}</think> done",
        "",
        r"\boxed{}",
        gold + " x" * TAIL,
    ]
    for response in wrong:
        assert reward(gold, response) == 0.0, response


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        ("1234", r"\boxed{1,234}", 1.0),
        ("1234", r"\boxed{\$1{,}234.00}", 1.0),
        ("72", r"\boxed{72 apples}", 1.0),
        ("72", r"\boxed{\text{72 apples}}", 1.0),
        ("2", r"\boxed{2 million}", 0.0),
        ("5", r"\boxed{x = 5}", 1.0),
        ("x=5", r"\boxed{5}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.333333}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.3333}", 0.0),
        (r"\frac{1000001}{1000000}", r"\boxed{1}", 0.0),
        ("0.0000001", r"\boxed{0.0}", 0.0),
        (r"\sqrt{2}", r"\boxed{\frac{2}{\sqrt{2}}}", 1.0),
        (r"\sqrt{2}", r"\boxed{1.414214}", 1.0),
        ("(x+1)^2", r"\boxed{x^2+2x+1}", 1.0),
        ("50", r"\boxed{50\%}", 1.0),
        ("0.5", r"\boxed{50\%}", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        ("(1,2)", r"\boxed{(2,1)}", 0.0),
        ("[0,1]", r"\boxed{[0,1)}", 0.0),
        ("2", r"\boxed{\pm 2}", 0.0),
        ("2", r"\boxed{x \ge 2}", 0.0),
        ("2", r"\boxed{1 \text{ or } 2}", 0.0),
        ("5", r"\boxed{\frac{0}{0}}", 0.0),
        (r"\text{Evelyn}", r"\boxed{nylevE}", 0.0),
        (r"\text{Evelyn}", r"\boxed{\textbf{evelyn}}", 1.0),
        (r"\text{(C)}", r"\boxed{C}", 1.0),
        (r"\text{(C)}", r"\boxed{(B)}", 0.0),
        ("52_8", r"\boxed{52}", 1.0),
        ("52_8", r"\boxed{52_9}", 0.0),
        ("52_8", r"\boxed{42}", 0.0),
        (r"\frac{1}{4}", r"\boxed{\frac{1}{4}, (2,12) \cup (12,102), 7}", 0.0),  # no part of a box stands for the whole
        (72, r"\boxed{72}", 1.0),
        (0.5, r"\boxed{1/2}", 1.0),
        ("5", "3 + 2 = 5", 1.0),
        ("5", "It is \\(5\\).", 1.0),
        ("7", "The answer to the first part is 5.\n#### 7", 1.0),
        ("5", "**Answer: 5**", 1.0),
    ],
)
def test_cases(gold, response, expected):
    assert reward(gold, response) == expected


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        ("11/2", ["1 1/2"]),
        ("12", ["1 2"]),
        ("3", ["1 2", "3 trillion", r"3\text{ trillion}", "3 fifths", "3 halves", "3 squared", "3 and a half"]),
        ("21/2", [r"2\ 1/2", r"2\,1/2", "2~1/2"]),
        ("5", ["5 Million", "5 millions", "5 dozens", "5 hundredths", "5 factorial", "5 minus one"]),
        ("5", ["7=5", "x=7=5", "7=x=5", "3+4=5", r"\frac{1}{2}=5"]),
        ("2", ["2 point five", "2 over three", "2 times ten", r"2\text{ million}"]),
    ],
)
def test_another_number_is_refused_however_like_it_looks(gold, answers):
    for answer in answers:
        for response in (rf"\boxed{{{answer}}}", f"The answer is {answer}.", f"#### {answer}"):
            assert reward(gold, response) == 0.0, response


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        ("3/2", ["1 1/2", r"1\ 1/2", r"1 \frac{1}{2}"]),
        ("-3/2", ["-1 1/2"]),
        ("12345", ["12 345", r"12\,345", r"12\ 345"]),
        (
            "5",
            [
                "5 times",
                "5 points",
                "5 third graders",
                "5 quarters",
                "5 Seconds",
                r"5\ \text{inches}",
                "5 feet squared",
            ],
        ),
        ("7", ["3+4=7", "x = 7", "7 = x", "7=7", "7=3+4", "x=7=7"]),
        ("50", ["50 percent", "50 Percent"]),
        ("C", [r"\text{(C)}", "(C)", r"\textbf{C}"]),
    ],
)
def test_the_same_number_is_accepted_whatever_stands_beside_it(gold, answers):
    for answer in answers:
        for response in (rf"\boxed{{{answer}}}", f"The answer is {answer}.", f"#### {answer}"):
            assert reward(gold, response) == 1.0, response


@pytest.mark.parametrize(
    ("gold", "left", "right"),
    [
        *(("5", "5", "x"), ("5", "10/2", "x_1"), ("5", r"5\text{ cm}", "N"), ("1/2", r"\frac{1}{2}", r"\theta")),
        *(("2x+1", "2x+1", "y"), ("52_8", "52_8", "x"), ("x=5", "5", "x"), ("5=x", "5", "x"), ("x+y=z", "x+y", "z")),
    ],
)
def test_a_name_may_stand_on_either_side(gold, left, right):
    for response in (r"\boxed{%s=%s}", "The answer is %s = %s.", "#### %s=%s", r"So it is \(%s=%s\)."):
        if "So it" in response and "text" in left:
            continue  # without a box, units inside a formula are letters
        scores = [verify(gold, response % sides) for sides in ((left, right), (right, left))]
        assert [score.reward for score in scores] == [1.0, 1.0], response
        assert scores[0].answer == scores[1].answer


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        ("5", ["7=x", "5=x=6", "6=5=x", "x=5=6", "5=x^2", "5=x+y", "3, 5=x", "5=x, 6=y", "5 million=x", "1 5=x"]),
        ("5", [r"5\neq x", "5>=x", r"5 \le x", "5=2"]),
        ("x", ["5=x", "x=5"]),
        ("x+1", ["x+1=x"]),
        ("x+y=z", ["x+y"]),
    ],
)
def test_turning_an_equation_round_makes_nothing_right_that_is_wrong(gold, answers):
    for answer in answers:
        for response in (rf"\boxed{{{answer}}}", f"The answer is {answer}.", f"#### {answer}"):
            assert reward(gold, response) == 0.0, response


@pytest.mark.parametrize(
    "response",
    [
        "#### Step 2: add\n48+24=72\nThe answer is 72.",
        "#### Final Answer\n72",
        "#### Final Answer: 72",
        "#### **72**",
        "#### **Final Answer:** 72",
        "##### Summary\nThe answer is 72.",
    ],
)
def test_a_heading_is_no_answer(response):
    assert reward("72", response) == 1.0
    assert reward("2", response) == 0.0


@pytest.mark.parametrize("response", ["5^{9^{8", "so 5^{2", "step 5: so 5^{9^{8", "that is 5 ^ {-2", "5^(3"])
def test_the_base_of_a_power_that_cannot_be_read_is_no_answer(response):
    assert verify("5", response).reward == 0
    assert verify("5", f"{response} and we get 5, then").reward == 1  # and once by itself


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("45", r"so the angle is $45^\circ$"),
        (r"45^\circ", r"Hence \(45^\circ\)."),
        ("45", r"The angle measures 45^\circ"),
        ("20", r"rises by $20^\circ\text{C}$"),
        ("52_8", "Converting, $52_8$."),
        ("101", "it is 101_{2}"),
        ("5", "We get 5\n\n___"),
        ("10", "10^{th} in line"),
        ("25", "so it is $5^2$"),
        ("5", "Total: ____ 5 apples"),
    ],
)
def test_what_else_may_stand_above_below_and_beside_a_number(gold, response):
    assert verify(gold, response).reward == 1


def test_only_what_follows_the_thinking_counts():
    assert reward("5", r"<think>\boxed{4}</think> \boxed{5}") == 1.0
    assert reward("5", r"\boxed{4}</think> \boxed{5} <think> \boxed{6}") == 1.0
    assert reward("5", r"thinking \boxed{5}") == 1.0
    assert verify_thinking("5", r"thinking \boxed{5}").reward == 0.0
    assert verify_thinking("5", r"thinking</think>\boxed{5}").reward == 1.0


@pytest.mark.parametrize(
    "equal",
    [
        ["72", "72.0", "72.", "+72", r"72\text{ apples}", "x = 72", "72 = x"],
        [r"\frac{1}{2}", "0.5", "1/2", r"\frac{2}{4}", ".5", r"50\%"],
        ["1234", "1,234", r"1{,}234", r"\$1,234.00"],
        [r"\sqrt{2}", r"\frac{2}{\sqrt{2}}", r"2^{1/2}"],
        ["(x+1)^2", "x^2+2x+1", "1 + 2x + x^2"],
        [r"\{1,2\}", "2,1", r"\{2, 1\}"],
        [r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", r"(3,\frac{2\pi}{4})"],
        [r"\text{Evelyn}", "evelyn", r"\textbf{ Evelyn }"],
        [r"\text{(C)}", r"\text{C}", "C", "(C)"],
    ],
)
def test_equal_answers_share_their_form_and_it_does_not_depend_on_the_ground_truth(equal):
    forms = {verify(gold, rf"\boxed{{{text}}}").answer for text in equal for gold in ("72", "x", r"\text{no}")}
    assert len(forms) == 1


def test_different_answers_have_different_forms():
    texts = [
        "72",
        "-72",
        "7.2",
        "(1,2)",
        "(2,1)",
        r"\{1,2\}",
        "[1,2]",
        "x+1",
        "x-1",
        "even",
        "odd",
        r"\sqrt{2}",
        "1.414213",
        "i",
    ]
    assert len({verify("0", rf"\boxed{{{text}}}").answer for text in texts}) == len(texts)
    assert verify("0", "nothing here").answer is None
    assert verify("0", "\\boxed{\ud800\\foo}").answer.encode()  # any form can be written to a file


def test_the_tail_is_bounded_and_so_is_the_answer():
    assert visible("x" * 10**6 + "<b>") == "x" * (TAIL - 3) + "<b>"
    assert reward("5", "x" * 10**6 + r"\boxed{5}") == 1.0
    assert reward("5", rf"\boxed{{{'5' + ' ' * 3}{' + 0' * MAX_ANSWER}}}") == 0.0


@pytest.mark.parametrize("gold", ["", "  ", None, True, [None], {"a": 1}])
def test_a_ground_truth_that_is_none_raises(gold):
    with pytest.raises(ValueError, match="ground truth"):
        verify(gold, r"\boxed{5}")


def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(reward("x+1", r"\boxed{1+x}")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_where_answers_are():
    assert boxed(r"\boxed{1} \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{\{1\}") == ""
    assert boxed(r"\boxed{\{1}") == r"\{1"
    assert boxed(r"\boxed 5") == "5"
    assert boxed(r"\boxedtext") is None
    assert boxed(r"\fbox{x\\}") == r"x\\"
    assert after_hashes("#### 1\n#### 2 \n\n") == "2"
    assert after_hashes("#### 1\nso") is None
    assert after_hashes("##### 1") is None
    assert after_hashes("a #### 1") is None
    assert sentence("The answer is 5.\nThe answer is **6**.") == "6"
    assert sentence("The answer is 5.\nThanks") is None


def test_hostile_answers_cost_bounded_time_and_never_raise():
    count, seconds = 100, 1.0
    with VerifierPool("bapo.tasks.verify.math:verify", workers=2, seconds=seconds, memory_mb=512) as pool:
        started = time.monotonic()
        hostile = list(draws(count, seed=1))
        scores = pool.scores(hostile)
        spent = time.monotonic() - started
    causes = {score.failure for score in scores if score.reward is None}
    assert causes <= {"timeout after 1 s", "memory limit of 512 MB", "crash: signal 11"}
    assert sum(score.reward is None for score in scores) < count / 4
    assert spent < count * (seconds + 1) / 2  # two workers; one more second to kill and to start again
    accepted = [pair for pair, score in zip(hostile, scores, strict=True) if score.reward == 1.0]
    assert all(gold == "72" and r"\boxed{72}" in response for gold, response in accepted)


def test_of_several_answers_any_is_right():
    assert verify(["5", r"\frac{1}{2}"], r"\boxed{0.5}").reward == 1.0
    assert verify(["5", r"\frac{1}{2}"], r"\boxed{4}").reward == 0.0
    with pytest.raises(ValueError, match="not an answer"):
        verify([], r"\boxed{4}")
