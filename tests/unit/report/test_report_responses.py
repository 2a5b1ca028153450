"""Curves over sampled responses: the counts beside them are those of the runs, whatever their logs hold."""

import json
import shutil
from itertools import accumulate

import pytest

from bapo.cli import run as cli
from bapo.report import contents, find_arms
from bapo.report.arms import arms_of
from bapo.report.panels import MAX_POINTS, curves
from bapo.rollout.scheduler import Scheduler
from bapo.runs.read import Run, read_run
from bapo.runs.statistics import measures, sampled_responses
from tests.compared_runs import COMPARED
from tests.tiny.runs import configured
from tests.unit.report.test_report import arm_number, edited, embedded, lines, panel

RESPONSES = 4
"""Responses per group in the compared runs."""


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert cli(["report", str(COMPARED), "--out", str(out)]) == 0
    return embedded(out)


def admitted(directory):
    """Responses after each step, from the groups begun: without partial rollout each is finished in its step."""
    begun = [line["rollout/admitted"] for line in lines(directory, "rollout")]
    return [0, *accumulate(RESPONSES * groups for groups in begun)]


def directory_of(values, series, seed):
    return COMPARED / values["arms"][series["arm"]]["runs"][seed].removeprefix(f"{COMPARED}/")


def test_every_curve_has_the_responses_sampled_by_then(values):
    panels = [p for f in values["figures"] for p in f["panels"] if p["kind"] == "curves"]
    assert len(panels) == 19
    seen = set()
    for drawn in panels:
        kind = "rollout" if drawn["x"] == "step" else "eval" if drawn["markers"] else "update"
        for series in drawn["series"]:
            if values["arms"][series["arm"]]["setting"] == "partial":
                continue
            for seed, place in enumerate(series["responses"]):
                directory = directory_of(values, series, seed)
                total = admitted(directory)
                axis = "step" if kind == "rollout" else "version"
                logged = {line[axis]: line["step"] for line in lines(directory, kind)}
                for x, count, y in zip(series["x"], values["counts"][place], series["runs"][seed], strict=True):
                    assert (count is None) == (y is None)
                    assert count is None or count == total[logged[x]]
                    seen.add((kind, count))
    assert {("eval", 0), ("rollout", 68), ("update", 56), ("eval", 56)} <= seen  # 4, 5, 8 and 4, 5, 5 groups of 4


def test_seeds_have_counts_of_their_own(values):
    arm = arm_number(values, "reuse-2", "grpo")
    series = next(s for s in panel(values, "grad_norm")["series"] if s["arm"] == arm)
    assert [values["counts"][place] for place in series["responses"]] == [
        [16, 16, 36, 36, 56, 56],  # two updates a step
        [16, 16, 36, 36, 60, 60],
    ]


def counts(values, key, arm):
    series = next(s for s in panel(values, key)["series"] if s["arm"] == arm)
    return series["x"], values["counts"][series["responses"][0]]


def test_parked_responses_count_when_their_group_is_finished(values):
    arm = arm_number(values, "partial", "bapo")
    # groups finished in steps 1 to 8: 0, 4, 0, 8, 0, 0, 8, 0; updates in steps 2, 4 and 7
    assert counts(values, "reward", arm) == ([2, 4, 7], [16, 48, 80])
    assert counts(values, "grad_norm", arm) == (list(range(1, 7)), [16, 16, 48, 48, 80, 80])
    assert counts(values, "eval/avg", arm) == ([0, 2, 4, 6], [0, 16, 48, 80])


def test_a_version_is_placed_at_its_last_evaluation(tmp_path):
    def finish(log):
        step = next(line for line in log if line["kind"] == "rollout" and line["step"] == 6)
        step |= {"rollout/finished_groups": 2, "reward": 0.25}  # without an update, as if both groups were filtered

    run = shutil.copytree(COMPARED / "partial/bapo/seed-0", tmp_path / "run")
    edited(run, "metrics.jsonl", finish)
    values = contents(find_arms([run]))
    assert counts(values, "reward", 0) == ([2, 4, 6, 7], [16, 48, 56, 88])
    assert counts(values, "eval/avg", 0) == ([0, 2, 4, 6], [0, 16, 56, 88])  # version 4 after steps 4, 5 and 6


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory):
    """A real run that filters, parks and drops, and the responses that left its scheduler in each step."""
    from bapo.train.run import start

    left = []
    take = Scheduler.take

    def watched(self):
        rollout = take(self)
        left.append(sum(len(group.trajectories) for group in [*rollout.groups, *rollout.dropped]))
        return rollout

    out = tmp_path_factory.mktemp("watched") / "run"
    sections = {
        "rollout": {"prompts": 2, "max_tokens": 64},
        "objective": {"name": "grpo"},
        "learn": {"batch_groups": 1},
        "offpolicy": {"reuse": 1, "partial_budget": 150, "partial_max_age": 2, "partial_over_age": "drop"},
        "eval": {"problems": 1, "k": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "take", watched)
        start(configured(out, steps=12, **sections), plain=True)
    return out, left


def test_filtered_and_dropped_responses_count(watched_run):
    out, left = watched_run
    rollouts = lines(out, "rollout")
    assert rollouts[-1]["buffer/filtered"] > 0
    assert sum(line["rollout/dropped"] for line in rollouts) > 0
    assert sampled_responses(read_run(out)) == [0, *accumulate(left)]
    assert measures(read_run(out))["responses"] == sum(left)
    cells = contents(find_arms([out]))["table"]["rows"][0]["cells"]
    assert cells["responses"]["value"] == sum(left)


def test_a_stretch_is_placed_after_its_last_step():
    run = read_run(COMPARED / "reuse-2/bapo/seed-0")
    steps = 3 * MAX_POINTS
    rollouts = [{"step": s, "rollout/finished_groups": s % 5, "rollout/dropped": s % 2} for s in range(1, steps + 1)]
    updates = [{"step": (v + 1) // 2, "version": v, "loss": 0.5} for v in range(1, 2 * steps + 1)]
    long = Run(**{**vars(run), "rollouts": rollouts, "updates": updates})
    series = curves(arms_of([long]), "loss", "Loss")["series"][0]
    total = [0, *accumulate(RESPONSES * (s % 5) + s % 2 for s in range(1, steps + 1))]
    assert series["stretch"] == 6
    assert series["responses"] == [[total[3 * n] for n in range(1, MAX_POINTS + 1)]]  # six updates are three steps


def test_the_page_holds_each_list_once(values):
    counts = [tuple(run) for run in values["counts"]]
    assert len(counts) == len(set(counts))
    used = {n for f in values["figures"] for p in f["panels"] for s in p["series"] for n in s.get("responses") or ()}
    assert used == set(range(len(counts)))
    assert len(json.dumps(values["counts"])) < 0.1 * len(json.dumps(values["figures"]))


@pytest.mark.parametrize(
    "spoil", [lambda line: line.pop("rollout/finished_groups"), lambda line: line.update({"rollout/dropped": None})]
)
def test_a_log_without_counts_is_drawn_over_updates(tmp_path, capsys, spoil):
    def spoiled(log):
        for line in (line for line in log if line["kind"] == "rollout"):
            spoil(line)

    grid = shutil.copytree(COMPARED, tmp_path / "grid")
    old = grid / "reuse-2/grpo/seed-1"
    edited(old, "metrics.jsonl", spoiled)
    assert sampled_responses(read_run(old)) is None
    assert "responses" not in measures(read_run(old))
    assert cli(["report", str(grid)]) == 0
    assert capsys.readouterr().err == ""
    values = embedded(grid / "report.html")
    arm = arm_number(values, "reuse-2", "grpo")
    for series in panel(values, "grad_norm")["series"]:
        assert (series["responses"] is None) == (series["arm"] == arm)
        assert all(run for run in series["runs"])
    edited(grid / "reuse-2/grpo/seed-0", "metrics.jsonl", spoiled)
    values = contents(find_arms([grid / "reuse-2/grpo"]))
    assert values["counts"] == []
    assert values["table"]["rows"][0]["cells"]["responses"]["text"] == "–"


def test_an_update_of_an_unknown_step_has_no_count(tmp_path):
    run = shutil.copytree(COMPARED / "reuse-2/bapo/seed-0", tmp_path / "run")
    (run / "summary.json").unlink()
    newer = lines(run, "update")[-1] | {"step": 10**30, "version": 7}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(newer) + "\n")
    values = contents(find_arms([run]))
    series = panel(values, "grad_norm")["series"][0]
    assert values["counts"][series["responses"][0]] == [16, 16, 36, 36, 56, 56, None]
