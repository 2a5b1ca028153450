"""Conversations on a real engine: turns, endings, failures, and the same responses however they are interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.environments.conversations import Conversations, reward_of, turns_of
from bapo.environments.episode import Answer
from bapo.evaluate.sampling import sample
from bapo.rollout import rounds
from bapo.rollout.engine import Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.types import Group, Problem, Score, Status
from tests.environments import Forgetful, Numbers, Ruled
from tests.rollouts import teacher_forced
from tests.tiny.models import STOP, tiny

ENDS = frozenset({STOP, *range(10, 16)})
"""Tokens that end a turn: so many that turns are short."""
SAMPLING = Sampling(stop_ids=ENDS)
ENGINE = LocalEngine(tiny(), slots=4)
MOST = 24
NUMBERS = Numbers()


def problem(id: int) -> Problem:
    return Problem(id=f"p{id}", prompt=f"5 {6 + id % 8}", answer=None)


def groups(count: int = 3, responses: int = 3) -> list[Group]:
    return [new_group(id, problem(id), [5, 6 + id % 8], responses=responses, seed=1) for id in range(count)]


def echo(turn: str, number: int) -> Answer:
    """It says how long the turn was, by a number of sevens, with a reward; after three turns it is over."""
    length = len(turn.split())
    return Answer(" ".join(["7"] * (1 + length % 3)), over=number == 3, reward=float(length))


def scheduler(
    environments: Ruled,
    *,
    script: Numbers = NUMBERS,
    retries: int = 2,
    max_turns: int | None = None,
    max_context: int | None = None,
    **options: object,
) -> Scheduler:
    limits = {"max_tokens": MOST, "max_turns": max_turns, "max_context": max_context, "retries": retries}
    talk = Conversations(environments, script, ends=ENDS, **limits)
    return Scheduler(SAMPLING, max_response_tokens=MOST, conversations=talk, **options)


def run(one: Scheduler, version: int = 0):
    ENGINE.load(ENGINE.model.named_parameters(), version=version)
    return rounds.run(one, ENGINE)


def finished(environments: Ruled, **options: object) -> list[Group]:
    one = scheduler(environments, **options)
    one.admit(groups())
    return run(one).groups


def everything(found: list[Group]) -> list[list[dict]]:
    return [[dict(vars(t)) for t in group.trajectories] for group in found]


def assert_sound(group: Group) -> None:
    """Every response is its turns and what was said after them, and counts add up."""
    for t in group.trajectories:
        said = t.sampled or [True] * len(t.tokens)
        assert len(said) == len(t.tokens) <= MOST
        assert sum(said) == len(t.versions) == len(t.behavior_logprobs) == len(t.entropies) == len(t.own)
        expected = [
            (answer["at"] + i, int(token))
            for answer in t.answers
            if answer["tokens"]
            for i, token in enumerate(answer["text"].split())
        ]
        observed = [(place, t.tokens[place]) for place, own in enumerate(said) if not own]
        assert observed == expected
        pairs = zip(said, said[1:], t.tokens, strict=False)
        assert all(token in ENDS for before, after, token in pairs if before and not after)


def test_a_conversation_has_its_turns_and_what_was_said_after_each():
    found = finished(Ruled(echo))
    assert [group.id for group in found] == [0, 1, 2]
    endings = set()
    for group in found:
        assert_sound(group)
        for t in group.trajectories:
            endings.add(t.ending)
            turns = t.answers[1:-1]
            assert turns_of(t) == sum(token in ENDS for token in t.own) + (t.own[-1] not in ENDS)
            assert reward_of(t.answers) == (sum(answer["reward"] for answer in turns) if turns else None)
            assert t.status is (Status.STOPPED if t.ending == "answered" else Status.TRUNCATED)
    assert endings == {"answered", "context"}


def test_sampled_tokens_have_the_log_probs_of_a_full_pass_over_all_that_was_said():
    for group in finished(Ruled(echo)):
        for t in group.trajectories:
            logprobs = teacher_forced(ENGINE.model, t.prompt, t.tokens, 1.0)
            own = [i for i, sampled in enumerate(t.sampled or [True] * len(t.tokens)) if sampled]
            assert t.behavior_logprobs == pytest.approx([float(logprobs[i][t.tokens[i]]) for i in own], abs=1e-4)


def test_a_conversation_may_go_on_from_what_is_left_of_earlier_turns():
    """Each turn has its log-probs after what the script wrote, which is another context after a turn of two tokens."""
    forks = 0
    for group in finished(Ruled(echo), script=Forgetful()):
        assert_sound(group)
        for t in group.trajectories:
            known, read, contexts = [], list(t.prompt), []
            ends = [*(answer["at"] for answer in t.answers[1:-1]), len(t.tokens)]
            begins = [answer["at"] + answer["tokens"] for answer in t.answers[:-1]]
            for begin, end, after in zip(begins, ends, [*begins[1:], len(t.tokens)], strict=False):
                turn = t.tokens[begin:end]
                logprobs = teacher_forced(ENGINE.model, read, turn, 1.0)
                known += [float(step[token]) for step, token in zip(logprobs, turn, strict=True)]
                if said := t.tokens[end:after]:
                    read += [turn[-1], *said]
                    contexts += [{"at": after, "tokens": list(read)}] if len(turn) > 1 else []
            assert t.behavior_logprobs == pytest.approx(known, abs=1e-4)
            assert t.contexts == contexts
            forks += len(contexts)
    assert forks > 3


def test_a_context_that_is_written_anew_keeps_to_the_room_that_the_model_has():
    for group in finished(Ruled(echo), script=Forgetful(), max_context=9):
        for t in group.trajectories:
            assert all(len(row) <= 9 for row in t.rows)
    assert any(len(t.prompt + t.tokens) > 9 for t in group.trajectories)


@pytest.mark.parametrize("budget", [None, 50])
def test_what_is_sampled_does_not_depend_on_when_answers_come(budget, monkeypatch):
    """Not even where an environment fails, in the last bit, and in what is counted."""
    monkeypatch.setattr("bapo.rollout.rounds.TURN_SECONDS", 0)  # a look at every token

    def rule(turn: str, number: int) -> Answer:
        return Answer(failure="it broke") if turn.startswith(("29", "17")) else echo(turn, number)

    def played(late: int) -> object:
        one = scheduler(Ruled(rule, late=late), retries=1, token_budget=budget, max_age=2)
        one.admit(groups(6))
        runs = [run(one, version) for version in range(4)]
        return [(everything(each.groups), everything(each.dropped), each.metrics, each.causes) for each in runs]

    at_once = played(0)
    assert any(found for found, *_ in at_once)
    assert any(dropped for _, dropped, *_ in at_once)
    assert played(3) == at_once
    assert played(30) == at_once


def test_others_are_sampled_while_an_environment_works(monkeypatch):
    monkeypatch.setattr("bapo.rollout.rounds.TURN_SECONDS", 0)
    asked, meanwhile = {}, []

    class Watched(Ruled):
        def act(self, key: str, turn: str) -> None:
            asked[key] = one.totals().sampled_tokens
            super().act(key, turn)

        def collect(self, timeout: float) -> list[tuple[str, Answer]]:
            answers = super().collect(timeout)
            meanwhile.extend(one.totals().sampled_tokens - asked.pop(key) for key, _ in answers if key in asked)
            return answers

    one = scheduler(Watched(echo, late=12))
    one.admit(groups(6))
    assert len(run(one).groups) == 6
    assert len(meanwhile) > 30
    assert sum(tokens > 0 for tokens in meanwhile) > len(meanwhile) / 2


class Tireless(LocalEngine):
    """It never rests, as an engine in other processes."""

    resting = None


def test_an_engine_that_never_rests_is_given_a_response_as_soon_as_it_is_answered(monkeypatch):
    monkeypatch.setattr("bapo.rollout.rounds.TURN_SECONDS", 0)
    engine = Tireless(ENGINE.model, slots=4)
    engine.load(ENGINE.model.named_parameters(), version=0)
    one, expected = scheduler(Ruled(echo, late=5)), finished(Ruled(echo))
    one.admit(groups())
    for got, want in zip(rounds.run(one, engine).groups, expected, strict=True):
        assert_sound(got)
        assert [t.tokens for t in got.trajectories] == [t.tokens for t in want.trajectories]


def test_an_opening_is_in_the_prompt():
    found = finished(Ruled(echo, opening=lambda problem: Answer("9 9")))
    assert all(t.prompt == [5, 6 + group.id, 9, 9] for group in found for t in group.trajectories)


def test_the_limit_of_turns():
    for group in finished(Ruled(echo), max_turns=2):
        for t in group.trajectories:
            assert t.ending in ("turns", "context")
            assert turns_of(t) <= 2
            if t.ending == "turns":
                assert t.tokens[-1] in ENDS  # what was said after the last turn is recorded, and not read
                assert (t.answers[-2]["text"], t.answers[-2]["tokens"]) != ("", 0)


def test_a_grade_takes_the_place_of_the_sum_of_steps():
    found = finished(Ruled(echo, grading=lambda turns: Answer(reward=len(turns) / 4)))
    assert {reward_of(t.answers) for group in found for t in group.trajectories} <= {0.0, 0.25, 0.5, 0.75}


# Failures


def failing(times: int):
    """An environment that fails on the second turn of the first episode, so many times."""
    left = [times]

    def rule(turn: str, number: int) -> Answer:
        if number == 2 and left[0]:
            left[0] -= 1
            return Answer(failure="it broke")
        return echo(turn, number)

    return Ruled(rule)


def test_an_environment_that_fails_is_tried_again_with_the_same_turns():
    environments = failing(2)
    assert everything(finished(environments)) == everything(finished(Ruled(echo)))
    assert sorted(environments.begun.values())[-1] > 1


def test_a_group_whose_environment_fails_for_good_leaves_with_the_cause():
    told = []
    one = scheduler(failing(3), retries=0, record=lambda event, group, **facts: told.append((event, group, facts)))
    one.admit(groups())
    rollout = run(one)
    assert not rollout.groups or len(rollout.groups) + len(rollout.dropped) == 3
    for group in rollout.dropped:
        assert [t.status for t in group.trajectories] == [Status.DROPPED] * 3
        assert "environment failed" in {t.ending for t in group.trajectories}
        assert ("dropped", group.id, {"cause": "environment failed: it broke"}) in told
    totals = one.totals()
    assert totals.sampled_tokens == totals.returned_tokens + totals.held_tokens + totals.wasted_tokens
    assert not one.conversations.environments.turns  # every episode was ended


def test_a_grader_that_fails_is_another_ending():
    one = scheduler(Ruled(echo, grading=lambda turns: Answer(failure="no judge")))
    one.admit(groups(1))
    rollout = run(one)
    assert rollout.causes == {0: "grader failed: no judge"}
    assert "grader failed" in {t.ending for t in rollout.dropped[0].trajectories}


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (Answer(b"7"), "neither text nor messages"),
        (Answer("7", reward=float("nan")), "no finite number"),
        (Answer([{"role": "tool", "content": {1}}]), "cannot be recorded"),
        (Answer("no number"), "invalid literal"),
    ],
)
def test_an_answer_that_is_none_is_a_failure_with_its_cause(answer, cause):
    one = scheduler(Ruled(lambda turn, number: answer), retries=0)
    one.admit(groups(2))
    rollout = run(one)
    assert all(cause in told for told in rollout.causes.values())
    assert rollout.causes.keys() == {group.id for group in rollout.dropped}
    assert rollout.causes


# Interruptions


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 40), st.sampled_from([None, 1, 3]), st.booleans(), st.integers(0, 4))
def test_every_token_is_accounted_for_in_partial_rollouts_over_turns(budget, max_age, saved, late):
    environments = Ruled(echo, late=late)
    over_age = "drop" if max_age == 1 else "finish"
    one = scheduler(environments, token_budget=budget, max_age=max_age, over_age=over_age)
    one.admit(groups())
    seen = []
    for version in range(60):
        rollout = run(one, version)
        totals = one.totals()
        assert totals.sampled_tokens == totals.returned_tokens + totals.held_tokens + totals.wasted_tokens
        assert max_age is not None or rollout.metrics.sampled_tokens <= budget
        for group in rollout.groups:
            assert_sound(group)
            assert group.oldest is None or max_age is None or version - group.oldest <= max_age
        seen += [group.id for group in (*rollout.groups, *rollout.dropped)]
        if len(seen) == 3:
            break
        if saved:  # the process ends here: another one goes on with new environments
            state = json.loads(json.dumps(one.state_dict()))
            one = scheduler(Ruled(echo, late=late), token_budget=budget, max_age=max_age, over_age=over_age)
            one.load_state_dict(state)
    assert sorted(seen) == [0, 1, 2]


def play(stop_after: int | None, script: Numbers = NUMBERS) -> tuple[list[Group], list[Group]]:
    """All groups with a budget of 12 tokens per run; after some runs, another process goes on from the saved state."""
    one = scheduler(Ruled(echo), token_budget=12, script=script)
    one.admit(groups())
    done, dropped = [], []
    for version in range(30):
        if version == stop_after:
            state = json.loads(json.dumps(one.state_dict()))
            one = scheduler(Ruled(echo), token_budget=12, script=script)
            one.load_state_dict(state)
        rollout = run(one, version)
        done += rollout.groups
        dropped += rollout.dropped
    return done, dropped


@pytest.mark.parametrize("script", [NUMBERS, Forgetful()])
def test_a_run_stopped_in_the_middle_of_conversations_goes_on_bit_for_bit(script):
    whole, _ = play(None, script)
    assert len(whole) == 3
    assert any(t.contexts for group in whole for t in group.trajectories) == (script is not NUMBERS)
    for stop_after in (1, 3, 5):
        assert everything(play(stop_after, script)[0]) == everything(whole)


def test_an_environment_that_answers_differently_after_a_resume_is_named():
    def other(turn: str, number: int) -> Answer:
        answer = echo(turn, number)
        return replace(answer, text=answer.text + " 8") if number == 1 else answer

    one = scheduler(Ruled(echo), token_budget=12)
    one.admit(groups(1))
    while not any(len(t.answers) > 1 for group in one.in_progress for t in group.trajectories):
        run(one)
    state = one.state_dict()
    one = scheduler(Ruled(other))
    one.load_state_dict(json.loads(json.dumps(state)))
    rollout = run(one)
    assert "ruled answered differently to turn 1, given the same turns: text" in rollout.causes[0]
    assert rollout.groups == []


def test_an_environment_that_offers_its_state_goes_on_from_it():
    """One that never answers the same twice, because its numbers are those of its answers."""
    said = count(10)

    def rule(turn: str, number: int) -> Answer:
        return Answer(" ".join(str(next(said))), over=number == 4, reward=1.0)

    one = scheduler(Ruled(rule, keeps=True), token_budget=12)
    one.admit(groups())
    done, causes = [], {}
    for version in range(20):
        rollout = run(one, version)
        done, causes = done + rollout.groups, causes | rollout.causes
        state = json.loads(json.dumps(one.state_dict()))
        one = scheduler(Ruled(rule, keeps=True), token_budget=12)  # another process
        one.load_state_dict(state)
    assert (len(done), causes) == (3, {})
    told = [answer["text"] for group in done for t in group.trajectories for answer in t.answers[1:-1]]
    assert len(set(told)) == len(told) == next(said) - 10 > 9
    for group in done:
        assert_sound(group)
        for t in group.trajectories:
            begins = [answer["at"] + answer["tokens"] for answer in t.answers]
            ends = [answer["at"] for answer in t.answers[1:-1]]
            turns = [NUMBERS.turn(t.tokens[begin:end]) for begin, end in zip(begins, ends, strict=False)]
            assert [answer["state"] for answer in t.answers[1:-1]] == [turns[: n + 1] for n in range(len(turns))]


def test_a_bookmark_takes_conversations_back():
    one = scheduler(Ruled(echo), token_budget=12)
    one.admit(groups())
    run(one)
    before = json.dumps(one.state_dict())
    back = one.bookmark()
    first = run(one, 1)
    back()
    assert json.dumps(one.state_dict()) == before
    again = run(one, 1)
    assert everything(first.groups) == everything(again.groups)
    assert first.metrics == again.metrics


def test_an_evaluation_plays_episodes_and_one_that_fails_costs_no_other():
    def rule(turn: str, number: int) -> Answer:
        return Answer(failure="it broke") if turn.split()[0] == "29" else echo(turn, number)

    talk = Conversations(Ruled(rule), Numbers(), ends=ENDS, max_tokens=MOST)
    policy = SimpleNamespace(encode=lambda text: [5], transcript=lambda tokens: " ".join(map(str, tokens)))
    ENGINE.load(ENGINE.model.named_parameters(), version=0)
    how = {"sampling": SAMPLING, "max_tokens": MOST, "seed": 1, "conversations": talk}
    never = lambda asked: [Score(0.5) for _ in asked]  # noqa: E731
    rows = sample(ENGINE, policy, never, [problem(0), problem(1), problem(2)], k=6, **how)
    assert [len(row) for row in rows] == [6, 6, 6]
    scores = [one.score for row in rows for one in row]
    failed = [score for score in scores if score.failure]
    assert 0 < len(failed) < len(scores)
    assert {(score.reward, score.failure) for score in failed} == {(None, "environment failed: it broke")}
    assert not talk.busy
    assert all(one.reward > 0 for row in rows for one in row if not one.score.failure)
