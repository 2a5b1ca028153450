"""The calculator: its values against the task's own, and whole conversations of the demo model with it."""

import json
import random

import pytest

from bapo.config.run import Config
from bapo.environments.calculator import value
from bapo.environments.conversations import turns_of
from bapo.screen.view import View
from bapo.tasks.countdown import Countdown, expressions
from bapo.train.build import build
from bapo.train.continuing import check_state
from bapo.train.job import RunState
from bapo.train.loop import Loop
from bapo.train.machine import resolve
from tests.tiny.runs import assert_resumes_bit_for_bit


def test_every_sum_of_countdown_has_the_value_that_its_verifier_knows():
    numbers = random.Random(0)
    for _ in range(40):
        for text, expected in expressions([numbers.randint(1, 15) for _ in range(3)]):
            assert value(f"{text}=") == value(f";1+1;{text}=") == str(expected)


@pytest.mark.parametrize(
    "turn", ["=", "3=", ";=", "3+=", "+3*2", "3**2=", "3/2=", "1234567890+1=", "٣+٣=", "", "3+2=.", "-3+2="]
)
def test_it_says_nothing_to_what_is_no_sum(turn):
    assert value(turn) == ""


def test_a_run_stopped_between_the_turns_of_conversations_resumes_bit_for_bit(tmp_path):
    assert_resumes_bit_for_bit(tmp_path, task={"environment": "calculator"})
    state = json.loads((tmp_path / "whole" / "checkpoints" / "step-000002" / "state.json").read_text())
    parked = [t for group in state["scheduler"]["groups"] for t in group["trajectories"] if t["status"] == "parked"]
    begun = [t for t in parked if t.get("sampled")]
    assert begun  # there were conversations to go on with
    problems = Countdown().train
    check_state(state, problems, vocabulary=21)
    one = begun[0]
    for wrong, message in (
        ({"sampled": one["sampled"][1:]}, "lists of different lengths"),
        ({"sampled": [True] * len(one["tokens"])}, "lists of different lengths"),
        ({"answers": one["answers"][:-1]}, "answers of its environment"),
        ({"answers": [*one["answers"][:-1], {**one["answers"][-1], "text": 7}]}, "answers of its environment"),
        ({"answers": [*one["answers"][:-1], {"at": 0}]}, "answers of its environment"),
        ({"contexts": [{"at": 0, "tokens": [3]}]}, "answers of its environment"),
        ({"contexts": [{"at": len(one["tokens"])}]}, "answers of its environment"),
        ({"sampled": ["yes"] * len(one["tokens"])}, "sampled"),
    ):
        sound = dict(one)
        one.update(wrong)
        with pytest.raises(ValueError, match=message):
            check_state(state, problems, vocabulary=21)
        one.update(sound)


def test_a_step_with_the_calculator(tmp_path):
    sizes = {"prompts": 4, "responses": 4, "max_tokens": 40}
    task = {"environment": "calculator"}
    parts = build(resolve(Config(steps=1, out=str(tmp_path), device="cpu", threads=1, task=task, rollout=sizes)))
    record = Loop(parts, RunState()).take_step(View(1, title="", clock=lambda: 0.0))
    decode, equals = parts.policy.decode, parts.policy.encode("=")[-1]
    trajectories = [t for group in record.samples for t in group.trajectories]
    assert all(t.ending in ("answered", "context") for t in trajectories)
    assert any(turns_of(t) > 2 for t in trajectories)
    for t in trajectories:
        for answer in t.answers[1:-1]:
            said = t.tokens[answer["at"] : answer["at"] + answer["tokens"]]
            assert decode(said) == answer["text"] or (answer["text"] and not said)  # there was no room for it
            if said:
                assert t.tokens[answer["at"] - 1] == equals
                assert value(decode(t.tokens[: answer["at"]])) == answer["text"]
        assert t.sampled.count(True) == len(t.versions) if t.sampled else len(t.tokens) == len(t.versions)
    sampled = record.rollout["rollout/sampled_tokens"]
    assert record.rollout["observed"] > 0
    assert sampled == record.rollout["rollout/returned_tokens"]
    assert all(update.tokens <= sampled for update in record.updates)
    parts.close()
