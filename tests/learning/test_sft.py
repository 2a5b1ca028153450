"""Supervised training that really learns, from the command line to a model that RL can start from, and its report."""

import json
import os
import re
import shutil

import pytest
import torch

from bapo.models.loading import load_policy
from bapo.report import find_arms, write_report
from bapo.rollout.engine import Request, Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.runs.read import Defect, Run, read_run
from bapo.runs.statistics import measures
from tests.compared_runs import COMPARED
from tests.processes import bapo
from tests.rollouts import sitting
from tests.supervised import saved_model, sums, write_rows

LEARN = [
    *("--device", "cpu", "--threads", "1", "--epochs", "60", "--task.holdout", "0.05"),
    *("--learn.batch-sequences", "12", "--learn.lr", "5e-3", "--eval.every", "100"),
]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "chat"])
def learned(request, tmp_path_factory):
    """A tiny random Llama that was shown every sum of two digits but five, by the command line."""
    root = tmp_path_factory.mktemp("sft")
    model = saved_model(root / "model", chat=request.param)
    data = write_rows(root / "sums.jsonl", sums())
    result = bapo("sft", "--model.path", model, "--task.train", data, *LEARN, "--out", root / "run")
    assert result.returncode == 0, result.stderr
    return root / "run", result.stdout, data


def test_the_model_writes_the_responses_and_stops(learned):
    run, _, _ = learned
    policy = load_policy(str(run / "model"), dtype="float32", device="cpu")
    asked = [policy.encode(row["prompt"]) for row in sums()]
    requests = [Request(context, 0, seed, 8) for seed, context in enumerate(asked)]
    segments = sitting(LocalEngine(policy.model), requests, Sampling(0.0, policy.stop_ids), version=0)
    written = [policy.decode(segment.tokens).removesuffix("<|im_end|>") for segment in segments]
    right = sum(text == row["response"] for text, row in zip(written, sums(), strict=True))
    assert right >= 95, right
    assert all(segment.tokens[-1] in policy.stop_ids for segment in segments)  # it has learned to stop


def test_the_run_directory_tells_what_happened(learned):
    run, output, _ = learned
    data = json.loads((run / "data.json").read_text())
    assert (data["read"], data["train"], data["held_out"], data["updates"]) == (100, 95, 5, 480)
    logged = lines(run / "metrics.jsonl")
    updates = [line for line in logged if line["kind"] == "imitation"]
    measured = [line for line in logged if line["kind"] == "held_out"]
    assert [line["step"] for line in updates] == list(range(1, 481))
    assert [line["step"] for line in measured] == [0, 100, 200, 300, 400, 480]
    assert updates[-1]["imitation/loss"] < 0.3 < 2 < updates[0]["imitation/loss"]
    assert updates[-1]["imitation/epoch"] == 60
    assert max(line["lr"] for line in updates) == pytest.approx(5e-3)
    assert updates[-1]["lr"] < 1e-6  # cosine, to the end
    assert sum(line["imitation/sequences"] for line in updates) == 60 * 95
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["before"], summary["after"]) == (measured[0], measured[-1])
    assert "100 rows read, 95 to learn from, 5 held out" in output
    assert f"bapo train RECIPE --model.path {run / 'model'}" in output


def test_the_run_is_read_and_reported(learned, tmp_path):
    run, _, _ = learned
    read = read_run(run)
    assert isinstance(read, Run)
    assert (read.sft, read.planned, len(read.updates), read.rollouts) == (True, 480, 480, [])
    values = measures(read)
    assert values["held_out"] == read.evals[-1]["held_out/loss"]
    assert values["held_out_before"] > 2
    assert bapo("report", run, "--out", tmp_path / "one.html").returncode == 0
    page = embedded(tmp_path / "one.html")
    assert page["title"] == "run: model on sums, supervised"
    assert [figure["id"] for figure in page["figures"]] == ["sft"]
    train, held_out = page["figures"][0]["panels"][:2]
    assert (train["key"], held_out["key"]) == ("imitation/loss", "held_out/loss")
    assert held_out["series"][0]["x"] == [0, 100, 200, 300, 400, 480]
    assert (page["table"]["rows"], len(page["sft"]["rows"])) == ([], 1)
    assert page["sft"]["rows"][0]["cells"]["held_out"]["text"] == f"{values['held_out']:.3f}"


def test_a_report_of_both_kinds_of_runs(learned, tmp_path):
    run, _, _ = learned
    here = tmp_path / "mixed"
    shutil.copytree(run, here / "warm", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(COMPARED / "reuse-2" / "bapo" / "seed-0", here / "rl")
    found = write_report([here], here / "report.html")
    assert [(arm.objective, arm.sft) for arm in found.arms] == [("bapo", False), ("sft", True)]
    assert found.defects == []
    page = embedded(here / "report.html")
    assert page["title"] == "rl: demo on countdown, bapo, reuse 2, with supervised runs"  # not "bapo against sft"
    assert [row["arm"] for row in page["table"]["rows"]] == [0]
    assert [row["arm"] for row in page["sft"]["rows"]] == [1]
    arms = {series["arm"] for figure in page["figures"] for panel in figure["panels"] for series in panel["series"]
            if "arm" in series and figure["id"] == "sft"}  # fmt: skip
    assert arms == {1}
    assert page["samples"][1]["note"] == "Supervised training samples no responses."
    assert page["samples"][0]["shown"]


def embedded(path):
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("summary.json", lambda text: "{}", "lacks a score before"),
        ("summary.json", lambda text: text.replace('"training_seconds": ', '"training": '), "training_seconds"),
        ("summary.json", lambda text: text.replace('"updates": 480', '"updates": 479'), "has 480 updates"),
        ("data.json", lambda text: text.replace('"updates"', '"update"'), "how many updates"),
        ("config.json", lambda text: text.replace('"epochs": 60', '"epochs": 0'), "epochs = 0"),
        ("metrics.jsonl", lambda text: text.replace('"kind": "imitation"', '"kind": "update"'), "unknown kind"),
        ("metrics.jsonl", lambda text: text.replace('"step": 7,', '"step": 8,'), "skips or repeats a step"),
        ("metrics.jsonl", lambda text: "".join(text.splitlines(keepends=True)[1:]), "lacks a score before"),
        ("timing.jsonl", lambda text: "", "has 0 of 480 steps"),
    ],
)
def test_damage_is_named(learned, tmp_path, name, change, reason):
    run = shutil.copytree(learned[0], tmp_path / "run", ignore=shutil.ignore_patterns("*.safetensors"))
    (run / name).write_text(change((run / name).read_text()))
    problem = read_run(run)
    assert isinstance(problem, Defect)
    assert (problem.kind, reason in problem.message) == ("damaged", True), problem.message


def test_an_unfinished_run_says_how_far_it_got(learned, tmp_path):
    run = shutil.copytree(learned[0], tmp_path / "run", ignore=shutil.ignore_patterns("*.safetensors"))
    (run / "summary.json").unlink()
    problem = read_run(run)
    assert (problem.kind, "480 of 480 steps" in problem.message) == ("unfinished", True)
    found = find_arms([run])
    assert [len(arm.runs) for arm in found.arms] == [1]


def test_reinforcement_learning_starts_from_its_model(tmp_path):
    """The embedded model and task, so that there is a reward; one epoch of a few of its own problems."""
    from bapo.tasks.countdown import Countdown

    rows = [{"prompt": problem.prompt, "response": "1+1+1=3."} for problem in Countdown().train[:8]]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "warm"
    common = ("--device", "cpu", "--threads", "1")
    warm = bapo("sft", "--task.train", data, *common, "--epochs", "1", "--out", out)
    assert warm.returncode == 0, warm.stderr
    small = (
        *("--steps", "1", "--rollout.prompts", "2", "--rollout.responses", "2", "--learn.batch-groups", "2"),
        *("--eval.problems", "2", "--eval.k", "2"),
    )
    result = bapo("train", "--model.path", out / "model", *common, *small, "--out", tmp_path / "rl")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "rl" / "summary.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "--task.holdout"),
        ([], 2, "task.train is empty, so there is nothing to learn from"),
        (["--task.train", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["--task.train", "rows.jsonl", "--task.prompt-column", "asked"], 2, "prompt_column"),
        (["--task.train", "rows.jsonl", "--task.max-tokens", "2"], 2, "gives no demonstration that can be used"),
        (["--task.train", "rows.jsonl", "--learn.lr", "-1"], 2, "greater than 0"),
        (["--task.train", "rows.jsonl", "--device", "cpu", "--learn.compile"], 2, "is for CUDA"),
        (["--task.train", "rows.jsonl", "--out", "."], 2, "exists already"),
        (["recipe.toml"], 2, "learn.lrr is not a known key. Did you mean learn.lr?"),
        (["--task.trian", "rows.jsonl"], 2, "trian"),
    ],
)
def test_usage_and_exit_codes(arguments, code, message, tmp_path):
    write_rows(tmp_path / "rows.jsonl", sums())
    (tmp_path / "recipe.toml").write_text("epochs = 1\n[learn]\nlrr = 1e-4\n")
    result = bapo("sft", *arguments, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"})
    assert result.returncode == code, result.stderr
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_a_supervised_recipe_is_no_recipe_for_training(tmp_path):
    (tmp_path / "recipe.toml").write_text('kind = "sft"\n[data]\nsources = ["rows.jsonl"]\n')
    result = bapo("train", tmp_path / "recipe.toml")
    assert (result.returncode, "Run it with `bapo sft" in result.stderr) == (2, True)


def test_without_anything_held_out(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", sums())
    model = saved_model(tmp_path / "model")
    from bapo.config.recipe import parse
    from bapo.config.sft import SftConfig
    from bapo.train.sft import start

    threads = torch.get_num_threads()
    values = {
        "model": {"path": str(model)}, "task": {"train": [str(data)], "holdout": 0}, "epochs": 1,
        "device": "cpu", "threads": 1, "out": str(tmp_path / "run"),
    }  # fmt: skip
    summary = start(parse(SftConfig, values, source="test"), plain=True)
    torch.set_num_threads(threads)
    assert (summary["before"], summary["after"], summary["updates"]) == (None, None, 3)
    read = read_run(tmp_path / "run")
    assert isinstance(read, Run)
    assert "held_out" not in measures(read)
    assert write_report([tmp_path / "run"], tmp_path / "report.html").arms


def test_low_rank_additions_learn_and_are_merged_into_the_model(tmp_path):
    from safetensors.torch import load_file

    data, model = write_rows(tmp_path / "rows.jsonl", sums()), saved_model(tmp_path / "model")
    learn = ("--epochs", "12", "--learn.lr", "1e-2", "--device", "cpu", "--threads", "1", "--checkpoint-every", "5")
    source = ("--model.path", model, "--task.train", data)
    result = bapo("sft", *source, *learn, "--model.lora.rank", "4", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["held_out/loss"] < 0.8 * summary["before"]["held_out/loss"]
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "run" / "model"))
    assert before.keys() == after.keys()  # a plain model
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("embed" in name or "norm" in name for name in changed)
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
