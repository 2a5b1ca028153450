"""Training that really learns, and off-policy switches that really switch."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from bapo.buffer import Buffer
from bapo.compare.grid import load_grid
from bapo.config.recipe import COMMANDS, parse, read_recipe_for, shipped
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.demo import model_path
from bapo.evaluate import evaluate
from bapo.learn.learner import Learner
from bapo.models.policy import Policy
from bapo.rollout.engine import Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.scheduler import Scheduler
from bapo.runs.write import RunDirectory
from bapo.screen.view import View
from bapo.tasks.task import ProblemStream
from bapo.train.build import build
from bapo.train.job import RunState
from bapo.train.loop import Loop, Parts, admit, learn
from bapo.train.machine import learner_settings, resolve
from bapo.train.run import resume, start
from bapo.train.scoring import score
from bapo.types import Problem, Score
from tests.tiny.models import untrained
from tests.tiny.runs import configured


class FirstCharacter:
    """Reward 1 if the response starts with the digit the prompt names: learnable from nothing."""

    def __init__(self):
        self.train = [Problem(f"p{d}", f"{d}:", d) for d in range(4)]
        self.test = self.train

    def scores(self, responses):
        return [Score(float(response[:1] == str(problem.answer))) for problem, response in responses]


def tiny_parts(objective, buffer, **sampling):
    """A model that knows nothing, and a trivial task."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    model = untrained(tokenizer, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32)
    config = parse(
        Config,
        {
            "steps": 25,
            "objective": {"name": objective},
            "rollout": {"prompts": 8, "responses": 16, "max_tokens": 2, **sampling},
            "learn": {"lr": 5e-3, "batch_groups": 8},
            "offpolicy": {"reuse": 4},
        },
        source="test",
    )
    task = FirstCharacter()
    return Parts(
        config=config,
        task=task,
        policy=Policy(model, tokenizer, frozenset({tokenizer.eos_token_id})),
        notes=[],
        overlong=lambda length: 0.0,
        engine=LocalEngine(model),
        stream=ProblemStream(task.train, seed=0),
        scheduler=Scheduler(
            Sampling(stop_ids=frozenset({tokenizer.eos_token_id}), **config.rollout.sampling), max_response_tokens=2
        ),
        buffer=buffer,
        learner=Learner(model, learner_settings(config)),
    )


@pytest.mark.parametrize(("objective", "sampling"), [("bapo", {}), ("grpo", {}), ("brake", {"top_p": 0.95})])
def test_a_tiny_model_learns_a_trivial_task_off_policy(objective, sampling):
    parts = tiny_parts(objective, Buffer(batch_groups=8, reuse=4, max_staleness=16), **sampling)
    loop, view = Loop(parts, RunState()), View(1, title="", clock=lambda: 0.0)
    rollouts = [loop.take_step(view).rollout for _ in range(parts.config.steps)]
    assert all(("kept_mass" in rollout) is bool(sampling) for rollout in rollouts)
    rewards = [rollout["reward"] for rollout in rollouts]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.7


def test_groups_that_grow_too_old_are_not_told_as_learned():
    """Two passes at versions 1 and 2, nothing older than 1: groups sampled at version 0 miss the second one."""
    parts = tiny_parts("grpo", Buffer(batch_groups=99, reuse=2, max_staleness=1))
    told, counts, rollout = [], [], []
    for version in (0, 1):
        admit(parts, RunState(groups=100 * version))
        parts.engine.load(parts.learner.weights(), version=version)
        groups = parts.scheduler.run(parts.engine).groups
        groups = score(groups, parts.task, parts.policy.transcript, parts.overlong).groups
        varied = [group for group in groups if len({t.reward for t in group.trajectories}) > 1]
        counts.append(len(varied))
        rollout += varied
    old, new = counts
    parts.learner.version = 1
    parts.buffer.add(rollout, version=1)
    assert len(list(learn(parts, RunState(), told.append))) == 2
    assert parts.buffer.metrics().lost_fresh == old > 0
    everything = 2 * (old + new)
    assert [(t.groups, t.asked) for t in told] == [
        (0, everything),
        (old + new, everything),
        (old + 2 * new, everything),
    ]


def run(tmp_path, name, **sections):
    """Metrics lines and weights of a small run of the embedded default."""
    out = tmp_path / name
    start(configured(out, **sections), plain=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, load_file(out / "model" / "model.safetensors"), out


def updates(lines):
    return [line for line in lines if line["kind"] == "update"]


def rollouts(lines):
    return [line for line in lines if line["kind"] == "rollout"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), "plain", steps=2)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A run with reuse, replay and partial rollouts."""
    off = {"reuse": 2, "max_staleness": 6, "replay_fraction": 0.4, "replay_max_age": 6, "partial_budget": 400}
    return run(tmp_path_factory.mktemp("mixed"), "mixed", offpolicy=off, steps=8)


def identical(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_another_seed_is_another_result(plain, tmp_path):
    assert run(tmp_path, "other", seed=1, steps=1)[0][1] != plain[0][1]


def test_one_seed_is_one_result_bit_for_bit_watched_or_not(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bapo.rollout.engine.COLLECT_SECONDS", 0)
    monkeypatch.setattr("bapo.screen.watch.LINE_SECONDS", 0)
    identical(plain, run(tmp_path, "watched", steps=2))
    told = capsys.readouterr().out
    asked = [("sampling", str(4 * line["rollout/admitted"])) for line in rollouts(plain[0])]
    evaluated = ("evaluating", "8")  # 4 problems, 2 responses each
    asked = [asked[0], evaluated, *asked[1:], evaluated]  # the first step comes before the evaluation of what was there
    assert re.findall(r"^(\w+): 0/(\d+) responses, 0 tokens, 0 tokens/s$", told, re.MULTILINE) == asked
    for what, count in asked:
        assert f"{what}: {count}/{count} responses" in told
    learned = re.findall(r"^learning: (\d+)/(\d+) groups, (\d+) update", told, re.MULTILINE)
    counts = [[0]]  # updates so far, step by step: 0 at the beginning of each
    for line in plain[0]:
        if line["kind"] == "rollout":
            counts.append([0])
        elif line["kind"] == "update":
            counts[-1].append(counts[-1][-1] + 1)
    assert [int(number) for *_, number in learned] == [number for step in counts if len(step) > 1 for number in step]
    groups = [int(line["groups"]) for line in plain[0] if line["kind"] == "update"]
    visited = [int(done) for done, _, number in learned if int(number)]
    assert visited == [number * n for number, n in zip([n for step in counts for n in step[1:]], groups, strict=True)]
    assert {int(asked) for _, asked, _ in learned} == {4 * n for n in groups}  # passes; these steps are one batch each


def test_replay_off_and_a_budget_larger_than_any_response_are_the_plain_loop(plain, tmp_path):
    off = {"partial_budget": 10**6, "replay_fraction": 0.0, "replay_max_uses": 5}
    identical(plain, run(tmp_path, "off", offpolicy=off, steps=2))


def test_the_run_directory_holds_what_it_should(plain):
    out = plain[2]
    assert {p.name for p in out.iterdir()} == {
        *("config.json", "metrics.jsonl", "timing.jsonl", "rollouts.jsonl", "checkpoints", "model", "summary.json"),
        *("ledger.jsonl", "history.jsonl", "model.sha256", "lock"),
    }
    summary = json.loads((out / "summary.json").read_text())
    assert summary["updates"] == len(updates(plain[0]))
    rollout = json.loads((out / "rollouts.jsonl").read_text().splitlines()[0])
    assert len(rollout["responses"]) == 4
    assert [len(t["tokens"]) for t in rollout["trajectories"]] == [len(t["versions"]) for t in rollout["trajectories"]]
    LlamaForCausalLM.from_pretrained(out / "model")


def test_on_policy_has_no_staleness_and_reuse_has_as_much_as_it_makes(plain, tmp_path):
    fresh = run(tmp_path, "on-policy", offpolicy={"reuse": 1, "max_staleness": 0}, steps=2)[0]
    assert {line["staleness_max"] for line in updates(fresh)} == {0.0}
    assert all(line["kl"] < 1e-6 for line in updates(fresh))
    assert max(line["staleness_max"] for line in updates(plain[0])) == 3.0


def test_replay_draws_from_earlier_rollouts(tmp_path):
    lines = run(tmp_path, "replay", offpolicy={"reuse": 1, "replay_fraction": 0.5, "replay_max_age": 8})[0]
    assert max(line["staleness_max"] for line in updates(lines)) > 0
    assert max(line["groups"] for line in updates(lines)) > 4


def test_partial_rollout_parks_and_resumes_under_newer_weights(mixed):
    lines, _, out = mixed
    assert all(line["rollout/sampled_tokens"] <= 400 or line["rollout/forced"] for line in rollouts(lines))
    assert sum(line["rollout/resumed"] for line in rollouts(lines)) > 0
    versions = [
        trajectory["versions"]
        for line in (out / "rollouts.jsonl").read_text().splitlines()
        for trajectory in json.loads(line)["trajectories"]
    ]
    assert any(len(set(v)) > 1 for v in versions)  # several policies wrote one response
    assert all(v == sorted(v) for v in versions)


def test_all_sources_together_keep_the_staleness_bound(mixed):
    ages = [line["staleness_max"] for line in updates(mixed[0])]
    assert 2 < max(ages) <= 6


def test_a_bfloat16_run_keeps_float32_masters_and_resumes_bit_for_bit(tmp_path):
    # bfloat16 is slow on CPUs that have no units for it
    few = {"rollout": {"prompts": 2}, "learn": {"batch_groups": 2}, "offpolicy": {"reuse": 1}}
    few |= {"eval": {"problems": 1, "k": 1, "every": 0}}
    whole = run(tmp_path, "whole", model={"dtype": "bfloat16"}, steps=2, checkpoint_every=1, **few)
    assert len(updates(whole[0])) == 2
    assert {tensor.dtype for tensor in whole[1].values()} == {torch.bfloat16}
    state = load_file(whole[2] / "checkpoints" / "step-000002" / "shard-00001.safetensors")
    masters = [tensor for name, tensor in state.items() if name.startswith("weight.")]
    assert len(masters) == len(whole[1])
    assert all(tensor.dtype == torch.float32 for tensor in masters)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters)
    out = tmp_path / "killed"  # as if killed after the checkpoint of step 1
    shutil.copytree(whole[2], out)
    (out / "summary.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-000002")
    resume(out, plain=True)
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (out / name).read_bytes() == (whole[2] / name).read_bytes(), name


def test_responses_that_the_limit_cuts_off_are_told_of_once(tmp_path, capsys):
    run(tmp_path, "few", steps=2, rollout={"prompts": 4, "responses": 4, "max_tokens": 6})
    assert "sampled responses" not in capsys.readouterr().out  # 32 responses are few
    run(tmp_path, "short", steps=3, rollout={"prompts": 16, "responses": 4, "max_tokens": 6})
    told = re.findall(r"rollout.max_tokens=6 cut off 100% of \d+ sampled responses", capsys.readouterr().out)
    assert len(told) == 1
    run(tmp_path, "long", steps=2, rollout={"prompts": 16, "responses": 4})
    assert "sampled responses" not in capsys.readouterr().out  # half of them are


@pytest.mark.parametrize("rank", [0, 2])
def test_the_evaluation_before_training_scores_the_untouched_model(tmp_path, rank, capsys):
    """It is taken after the first step, and logged before it."""
    lora = {"model": {"lora": {"rank": rank}}}
    lines, _, out = run(
        tmp_path, "put off", steps=1, eval={"problems": 5, "k": 2, "also_at": [0.0], "every": 0}, **lora
    )
    shown = capsys.readouterr().out
    assert shown.index("step 1/1") < shown.index("evaluating the weights from before step 1")
    assert [line["kind"] for line in lines[:3]] == ["eval", "eval", "rollout"]
    parts = build(resolve(RunDirectory(out).config(Config)))
    assert parts.learner.version == 0
    parts.engine.load(parts.learner.weights(), version=0)
    for line, temperature, k in zip(lines, (1.0, 0.0), (2, 1), strict=False):
        found = evaluate(
            parts.engine,
            parts.policy,
            parts.task.scores,
            list(parts.task.test)[:5],
            k=k,
            sampling=Sampling(temperature, parts.policy.stop_ids),
            max_tokens=parts.config.rollout.max_tokens,
            seed=parts.config.seed,
        )
        expected = {"kind": "eval", "step": 0, "version": 0, "eval/problems": 5, "eval/temperature": temperature}
        assert line == expected | found.summary()


def test_activation_checkpointing_is_the_plain_run(plain, tmp_path):
    identical(plain, run(tmp_path, "checkpointing", learn={"activation_checkpointing": True}, steps=2))


def test_every_objective_trains(tmp_path):
    from bapo.config.run import OBJECTIVE_NAMES

    short = {"steps": 1, "offpolicy": {"reuse": 2}, "eval": {"problems": 1, "k": 1}}
    for name in OBJECTIVE_NAMES:
        losses = [line["loss"] for line in updates(run(tmp_path, name, objective={"name": name}, **short)[0])]
        assert len(losses) == 2
        assert all(abs(loss) < 100 for loss in losses)


SUPERVISED = sorted(shipped("bapo sft").values())
TRAINED = sorted(shipped("bapo train").values())
GRIDS = sorted(shipped("bapo compare").values())


@pytest.mark.parametrize("recipe", SUPERVISED, ids=lambda p: p.name)
def test_shipped_supervised_recipes_are_possible(recipe):
    config = parse(SftConfig, read_recipe_for(COMMANDS[SftConfig], recipe), source="recipe")
    assert config.task.train
    assert config.model.path != "demo"


@pytest.mark.parametrize("recipe", TRAINED, ids=lambda p: p.name)
def test_shipped_recipes_are_possible(recipe):
    config = parse(Config, read_recipe_for(COMMANDS[Config], recipe), source="recipe")
    if config.model.path != "demo":  # its weights are not here
        assert config.task.name == "data"
        return
    parts = build(resolve(config))
    assert parts.learner.version == 0
    assert len(parts.task.train) == 4096


@pytest.mark.parametrize("grid", GRIDS, ids=lambda p: p.name)
def test_shipped_grids_are_possible(grid):
    cells = load_grid(grid).cells
    assert len({cell.name for cell in cells}) == len(cells) >= 6
