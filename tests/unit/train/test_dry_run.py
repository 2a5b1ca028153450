"""What `bapo train --dry-run` shows, and the arithmetic of memory and time behind it."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bapo.cli import run
from bapo.config.run import Config
from bapo.demo import model_path
from bapo.preflight.memory import GIB, Seconds, Shape, memory, on_cluster, seconds
from bapo.tasks.countdown import Countdown


def test_a_dry_run_shows_the_plan_and_writes_nothing(here, capsys):
    (here / "planned_rewards.py").write_text(
        "def score(response, answer):\n    return 0.5 * (response == f'<answer>{answer}</answer>')\n"
    )
    before = sorted(here.iterdir())
    words = ["--task.train", "train.jsonl", "--task.test", "test.jsonl", "--task.reward", "planned_rewards:score"]
    words += ["--offpolicy.reuse", "3", "--steps", "5", "--device", "cpu", "--out", "runs/x"]
    assert run(["train", "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    for part in (
        "demo, float32 on cpu; 0.8 M parameters, all trained",
        "6 problems to train on, 2 held out, 2 of them evaluated",
        "prompt     0+0=\n",
        "'<answer>0</answer>' gets reward 0.5",
        "5 steps of 16 prompts x 8 responses = 640 responses",
        "3 per step, 15 in all",
        "tokens grow 2 updates old",
        "clip       brake, low 0.8, high 1.2, delta 0.03; the lower bound of used tokens rises to 1",
        "runs/x, a checkpoint every 10 steps",
        "Nothing is wrong.",
    ):
        assert part in said
    assert {path.name for path in here.iterdir() if path not in before} <= {"__pycache__"}


def test_a_dry_run_says_how_many_problems_are_held_out(here, capsys):
    (here / "planned_rewards.py").write_text("def score(response, answer):\n    return float(answer in response)\n")
    words = ["--task.train", "train.jsonl", "--task.holdout", "0.5", "--task.reward", "planned_rewards:score"]
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 0
    said = capsys.readouterr().out
    assert "data: 3 problems to train on, 3 held out, 3 of them evaluated" in said
    assert "task.holdout=0.5: 3 problems of task.train held out" in said
    assert run(["train", "--dry-run", "--device", "cpu", *words, "--task.test", "test.jsonl"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--offpolicy.reuse", "8"),
            "clip       brake, low 0.8, high 1.2, delta 0.03; the lower bound of used tokens rises to 1",
        ),
        (
            ("--objective.name", "push_once"),
            "clip       push_once, low 0.8, high 1.2, used_low 1; lower bound 1 for tokens that were trained on before",
        ),
        (
            ("--objective.name", "push_once", "--offpolicy.reuse", "1"),
            "warning    push once does nothing in this run: no token is trained on twice",
        ),
        (
            ("--objective.preset", "weak-model"),
            "upper bound 1.2 to 2, chosen anew in every update for a share of 0.45 (surrogate)",
        ),
        (
            ("--objective.name", "clip_higher", "--objective.options", "high", "1.3"),
            "clip_higher, low 0.8, high 1.3",
        ),
    ],
)
def test_a_dry_run_says_which_bounds_a_token_has(words, told, capsys):
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 0
    assert told in capsys.readouterr().out


def test_prompts_that_the_model_cannot_read_are_refused_before_training(here, capsys):
    for name, numbers in (("train.jsonl", range(1, 9)), ("test.jsonl", range(9, 12))):
        rows = [{"prompt": f"Gus has {n} apples and gets {n} more.", "answer": str(2 * n)} for n in numbers]
        (here / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "planned_rewards.py").write_text(
        "def score(response, answer):\n    return float(str(answer) in response)\n"
    )
    words = ["--task.train", "train.jsonl", "--task.test", "test.jsonl", "--task.reward", "planned_rewards:score"]
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 2
    assert "of the tokens of the prompts are unknown to 'demo', so it cannot read them." in capsys.readouterr().err


def test_a_dry_run_lists_every_mistake_and_plans_only_what_was_asked_for(capsys):
    assert run(["train", "--dry-run", "--rollout.max-tokens", "600", "--learn.lr", "-1", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "learn.lr = -1.0: give a number greater than 0" in said.err
    assert said.err.count("rollout.max_tokens=600") == 1
    assert run(["train", "--dry-run", "--lerning-rate", "1"]) == 2
    assert capsys.readouterr().out == ""


def test_a_dry_run_does_not_count_the_room_of_a_place_where_nothing_can_be_written(capsys):
    assert run(["train", "--dry-run", "--device", "cpu", "--out", "/proc/bapo/run"]) == 2
    said = capsys.readouterr()
    assert "nothing can be written to /proc" in said.err
    assert "are free" not in said.out
    assert "Nothing stops this run" not in said.out


def test_bounds_that_cannot_be_are_refused_in_a_line(capsys):
    for words, told in (
        (("--objective.low", "0.2", "0.2", "--objective.high", "0.28", "0.28"), "do not enclose 1"),
        (("--objective.low", "0.9", "0.8"), "low=(0.9, 0.8) is not ordered"),
        (("--objective.name", "clip_higher", "--objective.options", "low", "0.2", "high", "0.28"), "do not enclose 1"),
        (("--objective.name", "dual_clip", "--objective.options", "cap", "0.5"), "the dual clip is 0.5"),
        (("--objective.name", "bapo", "--objective.options", "dual_clip", "0.5"), "the dual clip is 0.5"),
        (("--objective.name", "rloo"), "objective.name='rloo' is not known"),
    ):
        for command in (["train", "--dry-run"], ["train"]):
            assert run([*command, "--device", "cpu", *words]) == 2
            (line,) = [line for line in capsys.readouterr().err.splitlines() if told in line]
            assert "Traceback" not in line


def test_doubts_about_a_plan_are_warnings(here, capsys):
    (here / "zero_rewards.py").write_text("def score(response, answer):\n    return float(answer == 0)\n")
    words = ["--task.train", "train.jsonl", "--task.test", "test.jsonl", "--task.reward", "zero_rewards:score"]
    words += ["--steps", "4", "--offpolicy.reuse", "2", "--checkpoint-keep", "1000000000", "--checkpoint-every", "1"]
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 0
    said = capsys.readouterr().out
    assert "answer     '0' gets reward 0, however it is written" in said
    assert "warning    a right response may get no reward. Check task.reward, to which answers come as text" in said
    assert "warning    learn.warmup_updates=10, but the run makes 8 updates" in said
    assert "may not fit on its disk" not in said  # four steps write four checkpoints
    assert "Nothing stops this run." in said
    assert run(["train", "--dry-run", "--device", "cpu", "--steps", "100000000", *words[8:]]) == 0
    assert "warning    the run directory may not fit on its disk. Lower checkpoint_keep" in capsys.readouterr().out


def test_a_dry_run_warns_of_a_token_limit_that_not_even_the_answer_keeps(here, capsys):
    (here / "planned_rewards.py").write_text("def score(response, answer):\n    return float(answer in response)\n")
    row = json.dumps({"question": "1+1=", "answer": "12345678"}) + "\n"
    (here / "train.jsonl").write_text(row)
    words = ["--task.train", "train.jsonl", "--task.test", "test.jsonl", "--task.reward", "planned_rewards:score"]
    for limit, told in ((7, True), (8, False)):  # a token per character
        assert run(["train", "--dry-run", "--device", "cpu", "--rollout.max-tokens", str(limit), *words]) == 0
        said = capsys.readouterr().out
        assert ("warning    this answer alone has 8 tokens, but rollout.max_tokens=7 cuts" in said) == told
        assert "longer responses are cut off and scored as they are; each step shows their share as `cut`" in said


def test_a_dry_run_names_each_default_that_a_large_model_has_from_the_embedded_one(here, capsys):
    shutil.copytree(model_path(), here / "large")
    settings = AutoConfig.from_pretrained(model_path(), intermediate_size=8_000)
    AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(here / "large")
    told = [
        "steps = 60 (TRL: 3 epochs, verl: 30)",
        "rollout.prompts = 16 (verl: 1,024)",
        "rollout.max_tokens = 64 (TRL and verl: 512)",
        "offpolicy.reuse = 4 (TRL and verl: 1)",
        "learn.batch_groups = 16 (verl: 256)",
        "learn.lr = 3e-05 (TRL and verl: 1e-6)",
    ]
    plan = ["train", "--dry-run", "--device", "cpu", "--model.path"]
    assert run([*plan, "./large"]) == 0
    said = capsys.readouterr().out
    first = "\ndefaults   chosen for the embedded model; set those that do not fit this one\n"
    assert first + "".join(f"           {line}\n" for line in told) in said
    given = {"steps": "60", "offpolicy.reuse": "4", "learn.lr": "3e-5"}  # a value that is given is nobody's default
    assert run([*plan, "./large", *(word for key, value in given.items() for word in (f"--{key}", value))]) == 0
    said = capsys.readouterr().out
    assert [line in said for line in told] == [line.split(" = ")[0] not in given for line in told]
    shutil.copytree(model_path(), here / "small")
    for path in ("demo", "./small"):
        assert run([*plan, path]) == 0
        assert "defaults" not in capsys.readouterr().out


def test_a_dry_run_says_once_that_there_is_no_such_model(capsys):
    assert run(["train", "--dry-run", "--model.path", "./nowhere", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("nowhere") == 1


def test_a_dry_run_says_once_how_long_responses_may_be(capsys):
    assert run(["train", "--dry-run", "--rollout.max-tokens", "600", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert "gets reward 1" in said.out
    (line,) = [line for line in said.err.splitlines() if "max_tokens" in line]
    longest = max(len(problem.prompt) for problem in (*Countdown().train, *Countdown().test))  # a token per character
    assert line.endswith(f"Set rollout.max_tokens <= {128 - longest}.")


def test_a_dry_run_that_cannot_say_how_long_responses_may_be_says_why(here, capsys):
    words = ["--rollout.max-tokens", "600", "--task.train", "train.jsonl", "--task.test", "nowhere.jsonl"]
    assert run(["train", "--dry-run", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rollout.max_tokens" in line]
    told = "; once nothing else is wrong, `bapo train --dry-run` says how many that is."
    assert line.endswith(told)
    assert run(["train", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_plan_says_how_an_update_is_made_when_it_is_evaluated_and_where_it_is_logged(capsys, monkeypatch):
    assert run(["train", "--dry-run", "--device", "cpu", "--steps", "30"]) == 0
    said = capsys.readouterr().out
    assert "learning rate 3e-05 (constant, warm-up 10 updates), 16 groups per update, sequence_mean" in said
    assert "\neval       before and after training, and every 20 steps; temperature 1\n" in said
    assert "\nlog " not in said
    monkeypatch.setattr("bapo.preflight.examine.find_spec", lambda name: True)  # a plan needs no tracker
    words = ["--learn.kl", "0.02", "--learn.warmup-updates", "0", "--learn.advantages", "rloo", "--eval.every", "20"]
    words += ["--eval.also-at", "0", "0.6", "--steps", "20", "--log.to", "wandb", "--log.project", "mine"]
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 0
    said = capsys.readouterr().out
    assert "sequence_mean loss, rloo advantages, KL penalty to the initial weights 0.02\n" in said
    assert "\neval       before and after training; temperature 1, before and after also 0 and 0.6\n" in said
    assert "\nlog        wandb; project mine\n" in said
    assert len(said.splitlines()) <= 24
    words = ["--learn.reduction", "balanced", "--learn.opsm", "0.1", "--learn.opsm-on", "used"]
    assert run(["train", "--dry-run", "--device", "cpu", *words]) == 0
    masked = "used tokens of negative responses that fell by more than 0.1 nats per token are masked"
    assert f"balanced loss, grpo advantages, {masked}\n" in capsys.readouterr().out


def test_a_dry_run_of_a_cluster_shows_its_processes_and_what_they_need(capsys, monkeypatch):
    monkeypatch.setattr("bapo.preflight.examine.find_spec", lambda name: True)  # Ray is not needed for a plan
    words = ["--cluster.rollouts", "3", "--cluster.learners", "2", "--threads", "10", "--device", "cpu", "--steps", "1"]
    words += ["--offpolicy.max-staleness", "40"]
    assert run(["train", "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    assert "processes  this one, 3 rollout actors and 2 learner ranks; Ray is started on this machine\n" in said
    assert "           rollout 0-2: engine in-process, 2 CPU threads each\n" in said
    assert "           learner 0-1: 2 CPU threads each\n" in said
    assert "sampling runs up to 4 updates ahead" in said
    assert re.search(r"memory     about .* in a rollout actor: .*\n           about .* in a learner rank: ", said)
    assert re.search(r"time       very roughly .*; sampling and learning go on at the same time\n", said)
    assert "disk       up to about" in said
    assert "sampling   1 step of 16 prompts" in said
    assert len(said.splitlines()) <= 24


def test_memory_is_the_arithmetic_of_the_page():
    shape = Shape(494_032_768, 494_032_768, layers=24, hidden=896, intermediate=4864, key_heads=2, head_width=64)
    values = {
        "device": "cuda",
        "model": {"dtype": "bfloat16"},
        "rollout": {"prompts": 64, "max_tokens": 8192, "slots": 64},
        "learn": {"activation_checkpointing": True, "batch_groups": 64},
    }
    found = memory(Config.model_validate(values), shape, longest_prompt=1024)
    assert round(found.states / GIB, 1) == 8.3  # docs/reference/sizes.md, Qwen2.5-0.5B
    assert round(found.sampler / GIB, 1) == 0.9
    assert round(found.cache / GIB, 1) == 6.8
    assert round(found.activations / GIB, 1) == 1.8
    eight = {**values, "rollout": {**values["rollout"], "precision": "fp8"}}
    known = replace(shape, matrices=357_826_560)  # of 24 layers
    assert memory(Config.model_validate(eight), known, longest_prompt=1024).sampler == found.sampler - 357_826_560
    adapted = memory(Config.model_validate(values), Shape(100, 10, 1, 1, 1, 1, 1), longest_prompt=0)
    assert adapted.states == 18 * 10 + 2 * 90
    near = {**values, "learn": {**values["learn"], "kl": 0.1}}
    held = memory(Config.model_validate(near), shape, longest_prompt=1024)
    assert (found.reference, held.reference) == (0, 2 * 494_032_768)
    assert held.in_all == found.in_all + held.reference
    near["model"] = {"dtype": "bfloat16", "lora": {"rank": 4}}
    assert memory(Config.model_validate(near), shape, longest_prompt=1024).reference == 0
    near["learn"] |= {"kl_reference": "every 9"}
    additions = Shape(100, 10, 1, 1, 1, 1, 1)
    moving = memory(Config.model_validate(near), additions, longest_prompt=0)
    assert moving.reference == 4 * 10  # they are float32, and checkpoints have them, too
    near["learn"] |= {"kl_reference": "initial"}
    staying = memory(Config.model_validate(near), additions, longest_prompt=0)
    assert moving.disk - staying.disk == 3 * moving.reference


def test_time_is_operations_over_speed_or_bytes_over_bandwidth():
    values = {"steps": 10, "rollout": {"prompts": 4, "responses": 2, "max_tokens": 90, "slots": 4}}
    values |= {"learn": {"batch_groups": 4}, "eval": {"problems": 8, "k": 1, "every": 0}, "model": {"dtype": "float32"}}
    config = Config.model_validate(values | {"offpolicy": {"reuse": 3}})
    shape = Shape(1000, 1000, 1, 1, 1, 1, 1)
    busy = seconds(config, shape, 10, flops=2.5e6, bandwidth=1e12)  # a million operations a second reach the model
    assert busy.sampling == pytest.approx(10 * 8 * 100 * 2000 / 1e6)
    assert busy.learning == pytest.approx(10 * 3 * 8 * 100 * 6000 / 1e6)
    assert busy.evaluating == pytest.approx(2 * 8 * 100 * 2000 / 1e6)
    near = config.model_copy(update={"learn": config.learn.model_copy(update={"kl": 0.1})})
    more = seconds(near, shape, 10, flops=2.5e6, bandwidth=1e12)  # every response passes once more
    assert more.learning == pytest.approx(busy.learning + 10 * 8 * 100 * 2000 / 1e6)
    waiting = seconds(config, shape, 10, flops=1e15, bandwidth=4000)  # a second to read the weights once
    assert waiting.sampling == pytest.approx(10 * 2 * 90)  # eight responses, four at a time, ninety tokens each


def test_a_cluster_divides_work_and_memory_among_its_processes():
    values = {"cluster": {"rollouts": 3, "learners": 2, "ahead": 0}, "device": "cpu", "threads": 8}
    config = Config.model_validate(values | {"model": {"dtype": "float32"}})
    shape = Shape(1000, 1000, layers=1, hidden=1, intermediate=1, key_heads=1, head_width=1)
    held, alone = memory(config, shape, longest_prompt=10), Seconds(sampling=60.0, learning=80.0, evaluating=6.0)
    found = on_cluster(config, shape, held, alone, threads=2)
    assert found.took == Seconds(80.0, 160.0, 8.0, least=140.0)  # 6 and 4 threads instead of 8
    assert found.took.in_all == 248.0
    assert found.actor == 4000 + held.cache
    assert found.rank == 16 * 1000 / 2 + held.activations
    ahead = config.model_copy(update={"cluster": config.cluster.model_copy(update={"ahead": 1})})
    assert on_cluster(ahead, shape, held, alone, threads=2).took.in_all == 168.0
    assert on_cluster(config, shape, held, None, threads=2).took is None
    large = {"rollouts": 3, "learners": 2, "engine": "vllm", "gpus_per_rollout": 2}
    config = Config.model_validate({"cluster": large, "device": "cuda"})
    assert on_cluster(config, shape, held, alone, threads=1).took.sampling == 10.0


def test_processes_on_one_machine_are_not_faster_than_the_machine(capsys, monkeypatch):
    shape = Shape(1000, 1000, layers=1, hidden=1, intermediate=1, key_heads=1, head_width=1)
    alone = Seconds(sampling=60.0, learning=20.0, evaluating=6.0)

    def took(**cluster):
        values = {"rollouts": 8, "learners": 1, "ahead": 0, **cluster}
        config = Config.model_validate(
            {"cluster": values, "device": "cpu", "threads": 2, "model": {"dtype": "float32"}}
        )
        return on_cluster(config, shape, memory(config, shape, 10), alone, threads=1).took

    taken = took()
    assert (taken.sampling, taken.learning, taken.evaluating, taken.in_all) == (60.0, 40.0, 6.0, 106.0)
    assert took(ahead=1).in_all == 86.0  # both threads are always busy
    assert took(rollouts=1, ahead=1).in_all == 132.0  # a thread each: sampling takes 120 seconds, evaluating 12
    assert took(address="ray://far:10001").sampling == 15.0  # machines of their own, with a thread of two each
    monkeypatch.setattr("bapo.preflight.examine.find_spec", lambda name: True)  # a plan needs no Ray
    words = ["--device", "cpu", "--threads", "2", "--offpolicy.max-staleness", "40", "--cluster.rollouts"]
    for rollouts, told in ((1, False), (8, True)):
        assert run(["train", "--dry-run", *words, str(rollouts)]) == 0
        assert ("9 processes share 2 CPU threads and slow each other down" in capsys.readouterr().out) == told
