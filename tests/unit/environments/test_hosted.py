"""Episodes in processes of their own: what users write, in all its ways to fail, harms its own episode only."""

import json
import time
from hashlib import sha256
from pathlib import Path

import pytest

from bapo.environments.episode import Answer
from bapo.environments.hosted import Hosted, Recipe
from bapo.types import Problem

HERE = "tests.unit.environments.people"
PROBLEM = Problem("p", "What?", None, extra={"below": 5})


def hosted(name, **options):
    known = {"tool_format": "hermes"} | {key: options.pop(key) for key in list(options) if key in vars(Recipe())}
    return Hosted(Recipe(f"{HERE}:{name}" if name else None, **known), **options)


def answers(environments, count):
    """So many answers, by episode."""
    got = {}
    while len(got) < count:
        some = environments.collect(120)
        assert some, f"only {sorted(got)} answered"
        got |= dict(some)
    return got


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def everything():
    with hosted("ALL", tools=[f"{HERE}:shout"], seconds=4, memory_mb=512, observation_tokens=100) as environments:
        yield environments


def test_it_describes_its_tools_and_what_a_row_chooses(everything):
    about = everything.about
    assert list(about) == ["guess", "echo", "hostile"]
    assert [tool["function"]["name"] for tool in about["guess"]["tools"]] == ["shout", "guess"]
    assert about["guess"]["tools"][1]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert about["echo"] == {"tools": [], "rewards": True}
    assert everything.turn_ends == ()


def test_episodes_live_side_by_side_and_those_of_one_problem_begin_alike(everything):
    row = {"environment": "guess", "below": 5}
    for key, problem in (("a", "p"), ("b", "p"), ("c", "q")):
        everything.begin(key, Problem(problem, "What?", None, extra=row))
    everything.begin("echo", Problem("p", "What?", None, extra={"environment": "echo"}))
    began = answers(everything, 4)
    assert began["a"] == Answer(" It is below 5.")
    assert began["echo"].text == f"seed {int.from_bytes(sha256(b'p').digest()[:4], 'big')}"
    found = {}
    for number in range(1, 10):
        for key in "abc":
            everything.act(key, call("guess", number=number))
        for key, answer in answers(everything, 3).items():
            if answer.text[0]["content"] == "right":
                found[key] = number
    assert found["a"] == found["b"]
    everything.grade("a")
    assert everything.collect(60) == [("a", Answer(reward=0.0))]  # its last guess was wrong
    everything.act("echo", "hi")
    assert everything.collect(60) == [("echo", Answer("said hi", reward=0.25))]
    for key in ("a", "b", "c", "echo", "never began"):
        everything.end(key)
    assert everything.collect(5) == []  # at once: no question is open


def test_what_offers_its_state_goes_on_from_it_in_another_process():
    with hosted("KEEPING", seconds=10) as environments:
        assert [tool["function"]["name"] for tool in environments.about["secret"]["tools"]] == ["look"]
        rows = {name: Problem("p", "What?", None, extra={"environment": name}) for name in ("secret", "dice")}
        turns = {"secret": call("look", how="up"), "dice": "six"}
        for name, row in rows.items():
            environments.begin(name, row)
        assert all(answer.state is not None for answer in answers(environments, 2).values())
        first = {}
        for name, turn in turns.items():
            environments.act(name, turn)
        first = answers(environments, 2)
        for name, row in rows.items():
            environments.end(name)
            environments.begin(name, row, json.loads(json.dumps(first[name].state)))
        assert {answer.text for answer in answers(environments, 2).values()} == {""}
        for name, turn in turns.items():
            environments.act(name, turn)
        second = answers(environments, 2)
        before, after = (found["secret"].text[0]["content"].split() for found in (first, second))
        assert (before[0], before[1], after[1]) == (after[0], "1", "2")
        environments.act("dice", "six")
        assert answers(environments, 1)["dice"].over  # three turns in two processes
        for name in rows:
            environments.grade(name)
        assert {name: answer.reward for name, answer in answers(environments, 2).items()} == {"secret": 2, "dice": 0.75}
        environments.act("secret", call("look", how="set"))
        assert answers(environments, 1)["secret"].failure == "TypeError: Object of type set is not JSON serializable"


def test_an_episode_may_be_ended_at_any_time_and_begin_again(everything):
    echo = Problem("p", "What?", None, extra={"environment": "echo"})
    everything.begin("x", echo)
    everything.end("x")
    everything.begin("x", echo)
    everything.collect(0)
    everything.end("x")  # its process may not have connected
    everything.begin("x", echo)
    answers(everything, 1)
    everything.act("x", "hello")
    everything.end("x")
    everything.begin("x", echo)
    assert answers(everything, 1)["x"].text.startswith("seed")
    everything.end("x")
    everything.begin("y", Problem("p", "What?", None, extra={"environment": "chess"}))
    assert "names the environment 'chess'" in answers(everything, 1)["y"].failure
    everything.end("y")


SURVIVES = {
    "raise": "{'error': 'broken\\nin two lines'}",
    "bytes": "b'\\xff'",
    "none": "None",
    "unicode": "? ß",
    "long": "x" * 32 * 100,
    "print": "fine",
    "nan": "fine",
    "text": "fine",
}
FAILS = {
    "hang": "timeout after 4 s",
    "loop": "timeout after 4 s",
    "exit": "crash: exit status 3",
    "sys.exit": "SystemExit: 4",
    "kill": "crash: signal 9",
    "memory": "memory limit of 512 MB",
}


def test_a_hostile_tool_harms_its_own_episode_only(everything):
    problem = Problem("p", "What?", None, extra={"environment": "hostile"})
    kinds = [*SURVIVES, *FAILS, "close"]
    for what in [*kinds, "good"]:
        everything.begin(what, problem)
    assert not any(answer.failure for answer in answers(everything, len(kinds) + 1).values())
    began = time.monotonic()
    for what in [*kinds, "good"]:
        everything.act(what, call("do", what=what))
    said = answers(everything, len(kinds) + 1)
    assert time.monotonic() - began < 60
    assert {what: said[what].failure for what in FAILS} == FAILS
    assert said["close"].failure.startswith("crash: ")  # it could answer nobody, and was ended
    assert {what: said[what].text[0]["content"] for what in SURVIVES} == SURVIVES
    for what in ("nan", "text", "good"):
        everything.grade(what)
    graded = answers(everything, 3)
    assert graded["nan"].failure == "ValueError: the reward is nan, which float32 cannot hold"
    assert graded["text"].failure == "TypeError: the reward is of type str, not a number"
    assert graded["good"] == Answer(reward=1.0)
    everything.begin("hang", problem)  # again
    assert answers(everything, 1)["hang"] == Answer()
    for what in [*kinds, "good"]:
        everything.end(what)


def test_processes_end_with_their_owner():
    environments = hosted("Echo", seconds=60)
    environments.begin("a", PROBLEM)
    environments.begin("b", PROBLEM)
    answers(environments, 2)
    environments.act("b", "something")
    processes = [episode.process for episode in environments._episodes.values()]
    environments.close()
    environments.close()
    until = time.monotonic() + 30
    while any(alive(process) for process in processes):
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_cannot_be_used_is_refused_at_once_by_name():
    for name, options, why in (
        ("Nobody", {}, "no function 'Nobody'"),
        ("nothing:at:all", {}, "is not of the form module:function|has no function"),
        (None, {"tools": [f"{HERE}:backwards"]}, "'backwards' cannot be described to the model"),
        ("Echo", {"options": {"colour": "red"}}, "cannot be used: TypeError: .*colour"),
        ("looks", {}, "cannot be used: TypeError"),
    ):
        with pytest.raises(ValueError, match=why):
            hosted(name, **options)
