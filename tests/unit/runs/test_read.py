import json
import math
import random
import shutil

import pytest

from bapo.core.bounds import StopReason
from bapo.evaluate.directory import FORMAT
from bapo.runs.read import STOP_REASONS, Defect, Run, find_runs, last_step, read_run, tail
from bapo.runs.statistics import aggregate, estimate, interval, measures, student_quantile, worst
from tests.tiny.runs import configured

TINY = {
    "steps": 2,
    "rollout": {"prompts": 2},
    "learn": {"batch_groups": 2},
    "offpolicy": {"reuse": 2},
    "objective": {"preset": "weak-model"},  # which searches, and says why it stopped
    "eval": {"problems": 2, "also_at": [0.0, 0.6]},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from bapo.train.run import start

    out = tmp_path_factory.mktemp("runs") / "run"
    start(configured(out, **TINY), plain=True)
    return out


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("*.safetensors"))


def without(text, unwanted):
    return "".join(f"{line}\n" for line in text.splitlines() if not unwanted(json.loads(line)))


def with_values(text, **values):
    return json.dumps(json.loads(text) | values)


def test_a_finished_run_is_read_whole(finished):
    run = read_run(finished)
    assert isinstance(run, Run)
    assert run.config["offpolicy"]["reuse"] == 2
    assert [line["step"] for line in run.rollouts] == [line["step"] for line in run.timing] == [1, 2]
    assert len(run.updates) == run.summary["updates"] == len(run.series("grad_norm"))
    assert [(line["step"], line["eval/temperature"]) for line in run.evals] == [
        *((0, 1.0), (0, 0.0), (0, 0.6)),
        *((2, 1.0), (2, 0.0), (2, 0.6)),
    ]
    assert run.summary["before"] == run.evals[0]
    assert run.summary["after"] == run.evals[3]
    assert [other["temperature"] for other in run.summary["also_at"]] == [0.0, 0.6]
    assert run.summary["also_at"][1]["after"] == run.evals[5]
    assert last_step(finished) == 2


def test_measures_of_a_run(finished):
    run = read_run(finished)
    values = measures(run)
    assert values["avg"] == run.evals[3]["eval/avg"]
    assert values["problems"] == run.evals[3]["eval/problems"]
    assert values["avg_reach"] == max(
        abs(line[f"eval/avg_{end}"] - line["eval/avg"])
        for line in (run.evals[0], run.evals[3])
        for end in ("low", "high")
    )
    assert values["entropy_before"] == run.evals[0]["eval/entropy"]
    assert values["avg_at_0.6"] == run.evals[5]["eval/avg"]
    assert values["max_grad_norm"] == max(line["grad_norm"] for line in run.updates)
    stops = {name: value for name, value in values.items() if name.startswith("stop_")}
    assert len(stops) == 5
    assert sum(stops.values()) == pytest.approx(1.0)


def test_a_directory_that_is_no_run(tmp_path):
    assert read_run(tmp_path / "nowhere").kind == "missing"
    assert "no config.json" in str(read_run(tmp_path))


def test_an_unfinished_run_is_a_problem_unless_asked_for(run):
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "roll')  # the line being written when someone looks
    problem = read_run(run)
    assert (problem.kind, "2 of 2 steps" in problem.message) == ("unfinished", True)
    seen = read_run(run, finished=False)
    assert isinstance(seen, Run)
    assert (seen.summary, len(seen.rollouts)) == ({}, 2)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("summary.json", lambda text: text[: len(text) // 2], "summary.json is not JSON"),
        ("summary.json", lambda text: "{}", "lacks a score"),
        ("summary.json", lambda text: "[" * 100_000, "summary.json is not JSON"),
        ("summary.json", lambda text: text.replace('"temperature": 0.6', '"temp": 0.6'), "also_at"),
        ("summary.json", lambda text: with_values(text, training_seconds="long"), "training_seconds"),
        ("summary.json", lambda text: with_values(text, also_at=10**400), "an integer of 401 digits"),
        (
            "summary.json",
            lambda text: with_values(text, after=json.loads(text)["after"] | {"eval/entropy": "x"}),
            "after",
        ),
        ("config.json", lambda text: text.replace('"steps": 2', '"steps": -2'), "steps = -2"),
        ("config.json", lambda text: "7", "config.json is not a JSON object"),
        ("metrics.jsonl", lambda text: text[:-20], "metrics.jsonl ends in the middle of line"),
        ("metrics.jsonl", lambda text: without(text, lambda line: line["kind"] == "update"), "has 0 updates, summary"),
        ("metrics.jsonl", lambda text: without(text, lambda line: line["step"] == 0), "lacks a score"),
        ("metrics.jsonl", lambda text: text.replace('"kind": "rollout"', '"kind": "roll"'), "unknown kind"),
        ("metrics.jsonl", lambda text: text.replace('"step": 2', '"step": 3'), "skips or repeats a step"),
        ("metrics.jsonl", lambda text: "\0" * len(text), "ends in the middle"),
        ("timing.jsonl", lambda text: "", "timing.jsonl has 0 of 2 steps"),
        ("timing.jsonl", lambda text: None, "timing.jsonl is missing"),
    ],
)
def test_damage_is_named(run, name, change, reason):
    changed = change((run / name).read_text())
    if changed is None:
        (run / name).unlink()
    else:
        (run / name).write_text(changed)
    problem = read_run(run)
    assert isinstance(problem, Defect)
    assert problem.kind == "damaged"
    assert reason in problem.message


def test_no_file_cut_or_overwritten_anywhere_makes_reading_raise(run):
    chance = random.Random(0)
    for name in ("config.json", "summary.json", "metrics.jsonl", "timing.jsonl"):
        whole = (run / name).read_bytes()
        for _ in range(40):
            place = chance.randrange(len(whole))
            noise = bytes(chance.randrange(256) for _ in range(3))
            for data in (whole[:place], whole[:place] + noise + whole[place + 3 :]):
                (run / name).write_bytes(data)
                found = read_run(run)
                assert isinstance(found, Run | Defect)
                assert isinstance(read_run(run, finished=False), Run | Defect)
                if isinstance(found, Run):
                    measures(found)
                tail(run / name)
        (run / name).write_bytes(whole)
    assert isinstance(read_run(run), Run)


def test_values_that_are_not_finite_make_measures_nan(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, second, *_ = (line for line in lines if line["kind"] == "update")
    first.update(share=math.inf, grad_norm=1.0, staleness_mean=math.nan)
    second.update(share=-math.inf, grad_norm=math.nan)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measures(read_run(run))
    assert all(math.isnan(found[name]) for name in ("share", "max_grad_norm", "staleness"))
    assert math.isfinite(found["clip_fraction"])


def test_the_largest_of_values_with_a_nan_is_nan_wherever_it_stands():
    assert worst([1.0, 3.0, 2.0]) == 3.0
    for values in ([math.nan, 1.0], [1.0, math.nan], [math.inf, math.nan]):
        assert math.isnan(worst(values))


def test_runs_are_found_and_models_are_not(run):
    assert (run / "model" / "config.json").exists()
    assert find_runs(run.parent) == find_runs(run) == [run]
    named = shutil.copytree(run, run.parent / "grid" / "a" / "seed-0")
    assert find_runs(run.parent) == [named, run]


def test_an_evaluation_is_no_run(run):
    evaluation = run.parent / "evals" / "demo"
    evaluation.mkdir(parents=True)
    (evaluation / "config.json").write_text(json.dumps({"format": FORMAT, "k": 4}))
    assert find_runs(run.parent) == [run]
    problem = read_run(evaluation)
    assert (problem.kind, problem.message) == (
        "missing",
        f"this is an evaluation, not a run; its report is {evaluation / 'report.html'}.",
    )


def test_a_message_ends_in_one_full_stop(run):
    (run / "config.json").write_text(json.dumps(TINY | {"objective": {"name": "bappo"}}))
    message = read_run(run).message
    assert message.endswith(".")
    assert not message.endswith("..")


def test_student_quantiles_are_those_of_the_tables():
    expected = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042, 120: 1.980}
    for freedom, quantile in expected.items():
        assert student_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


def test_aggregate_by_hand():
    mean, half = aggregate([1.0, 2.0, 3.0])  # s = 1, t = 4.303: 4.303 / √3
    assert (mean, half) == (2.0, pytest.approx(2.4841, abs=1e-4))
    assert aggregate([0.25]) == (0.25, None)
    for values in ([], [1.0, math.nan], [math.inf]):
        mean, half = aggregate(values)
        assert math.isnan(mean)
        assert half is None


def test_an_estimate_has_an_interval_from_three_seeds_on_and_a_share_stays_one():
    """.9 1 1: mean .96667, s = .057735, ± 4.3027 · s / √3 = .1434."""
    three = aggregate([0.9, 1.0, 1.0])
    assert estimate("max_grad_norm", *three, 3) == "0.967 ± 0.143"
    assert estimate("pass", *three, 3) == "0.967 [0.823, 1.000]"
    assert estimate("pass_at_0.6", 1 - three[0], three[1], 3) == "0.033 [0.000, 0.177]"
    assert estimate("share", 0.5, 0.25, 3) == "0.500 ± 0.250"
    assert estimate("pass", *aggregate([0.9, 0.96]), 2) == "0.930"
    assert estimate("entropy", 0.123456, None, 1, digits=2) == "0.12"


def test_an_interval_that_ends_at_one_holds_the_mean_as_often_as_a_whole_one():
    """A share is never outside, so nothing is lost: 92% of each hold the mean of shares that are skewed towards 1."""
    numbers = random.Random(0)
    held = [0, 0]
    for _ in range(2000):
        middle, half = aggregate([numbers.betavariate(18, 2) for _ in range(3)])
        for at, (low, high) in enumerate((interval("avg", middle, half), interval("pass", middle, half))):
            held[at] += low <= 0.9 <= high
    assert held[0] == held[1]
    assert held[1] / 2000 == pytest.approx(0.92, abs=0.02)  # three standard errors


def test_a_line_of_a_growing_log_is_taken_when_it_is_whole(tmp_path):
    log = tmp_path / "timing.jsonl"
    assert last_step(tmp_path) == 0
    log.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2')
    assert last_step(tmp_path) == 1
    log.write_text('{"step": 1}\n{"step": 2}\n')
    assert last_step(tmp_path) == 2


def test_stop_reasons_have_the_names_and_numbers_of_the_core():
    assert {name: number for number, name in enumerate(STOP_REASONS)} == {
        reason.name.lower(): int(reason) for reason in StopReason
    }
