"""The same environments, tools and turns in TRL's own trainer and here: equal tokens, masks and rewards."""

import importlib
import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from bapo.environments.conversations import Conversations, reward_of
from bapo.environments.hosted import Hosted, Recipe
from bapo.environments.script import PolicyScript, tool_format
from bapo.models.policy import Policy
from bapo.types import Group, Problem, Status, Trajectory
from tests.tiny.families import FAMILIES, SIZES, make_tokenizer
from tests.tiny.models import tiny

HERE = "tests.unit.environments.people"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FIELDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tokenizer_of(name):
    made = make_tokenizer(FAMILIES["qwen2.5-instruct"])
    made.add_tokens([*FIELDS])
    made.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    made.padding_side = "left"
    return made


class Scripted(GRPOTrainer):
    """TRL's trainer, but for what the model samples."""

    def __init__(self, turns, **options):
        self.turns = iter(turns)
        super().__init__(**options)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        turn = next(self.turns)
        return [list(turn) for _ in prompt_ids], [[-1.0] * len(turn) for _ in prompt_ids]


def by_trl(tokenizer, turns, row, out, options, **made):
    """Prompt, response, mask and reward of one conversation."""
    model = tiny("qwen2", **SIZES | {"vocab_size": 320, "max_position_embeddings": 4096})
    arguments = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=1200,
        max_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        chat_template_kwargs=options,
    )
    data = Dataset.from_list([row, row])
    trainer = Scripted(turns, model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **made)
    scored = trainer._generate_and_score_completions([row, row])
    kept = scored["completion_mask"][0].bool()
    rewards = list(trainer._logs["rewards"].values())
    return (
        scored["prompt_ids"][0][scored["prompt_mask"][0].bool()].tolist(),
        scored["completion_ids"][0][kept].tolist(),
        scored["tool_mask"][0][kept].bool().tolist(),
        sum(each[0] for each in rewards),
    )


def by_us(tokenizer, turns, row, options, recipe):
    policy = Policy(None, tokenizer, frozenset([tokenizer.eos_token_id]), chat=True, template_options=options)
    with Hosted(recipe, seconds=60) as hosted:
        script = PolicyScript(policy, tools={name: each["tools"] for name, each in hosted.about.items()})
        assert tool_format(tokenizer) == "hermes"
        assert script.calls_for("hermes") is None
        hosted.shown = script.shown
        conversations = Conversations(hosted, script, ends=policy.stop_ids, max_tokens=1200, max_turns=16)
        extra = {name: value for name, value in row.items() if name != "prompt"}
        trajectory = Trajectory([], 0)
        conversations.admit([Group(0, Problem("p", row["prompt"], None, extra=extra), [trajectory])])
        for turn in turns:
            wait(conversations)
            trajectory.tokens += turn
            if trajectory.sampled:
                trajectory.sampled += [True] * len(turn)
            trajectory.status = Status.STOPPED
            conversations.ended(trajectory)
        wait(conversations)
        assert trajectory.ending == "answered"
        mask = trajectory.sampled or [True] * len(trajectory.tokens)
        return trajectory.prompt, trajectory.tokens, mask, reward_of(trajectory.answers)


def wait(conversations):
    while conversations.busy:
        conversations.listen(10)


COUNTED = [
    f"I add two. {call('add', step=2)}",
    f"{call('add', step=1)}\n{call('add', step='much')}",
    call("subtract", step=1),
    f"{call('add', step=1)}{call('shout', text='Grüße')}",
    "It is four.",
]
ROW = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}], "target": 4}


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_an_environment_with_tools_and_errors_makes_the_same_conversation(tmp_path, template):
    people = importlib.import_module(HERE)
    tokenizer, options = tokenizer_of(template), {"enable_thinking": False}
    turns = [tokenizer.encode(f"{turn}<|im_end|>") for turn in COUNTED]
    made = {"environment_factory": people.Counter, "tools": [people.shout], "reward_funcs": people.quiet}
    theirs = by_trl(tokenizer, turns, ROW, tmp_path, options, **made)
    recipe = Recipe(f"{HERE}:Counter", {}, [f"{HERE}:shout"], "hermes", [(f"{HERE}:quiet", 1.0)])
    ours = by_us(tokenizer_of(template), turns, ROW, options, recipe)
    assert theirs[0] == ours[0]
    assert theirs[1] == ours[1]
    assert theirs[2] == ours[2]
    assert 0 < sum(ours[2]) < len(ours[2])
    assert theirs[3] == pytest.approx(ours[3])
    assert ours[3] == 1 + 0.5
    assert torch.tensor(ours[2]).sum() == sum(map(len, turns))
