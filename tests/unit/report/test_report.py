"""The numbers of a report are those of its runs, whatever state their directories are in."""

import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from math import inf, nan
from pathlib import Path
from statistics import fmean

import pytest

from bapo.cli import run as cli
from bapo.compare import table_lines
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.report import contents, find_arms, serve, write_report
from bapo.report.arms import arms_of
from bapo.report.contents import samples
from bapo.report.figures import figures
from bapo.report.panels import MAX_POINTS, curves, scores
from bapo.report.tables import overview
from bapo.runs.comparison import compare_arms as by_seed
from bapo.runs.history import Restart, record_restart
from bapo.runs.metrics import METRICS
from bapo.runs.read import Run, read_run
from bapo.runs.statistics import measures
from tests.compared_runs import COMPARED, TINY


def embedded(path):
    """The values inside a report."""
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(found[1])


def lines(directory, kind):
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in logged if line["kind"] == kind]


def arm_number(values, setting, objective):
    return next(i for i, a in enumerate(values["arms"]) if (a["setting"], a["objective"]) == (setting, objective))


def panel(values, key, figure=None):
    return next(p for f in values["figures"] if figure in (None, f["id"]) for p in f["panels"] if p.get("key") == key)


@pytest.fixture(scope="module")
def compared():
    return COMPARED


@pytest.fixture(scope="module")
def report(compared, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert cli(["report", str(compared), "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("key", ["grad_norm", "entropy", "share", "clip_high", "clip_fraction", "positive_tokens"])
def test_curves_hold_what_every_seed_logged(report, compared, key):
    values = embedded(report)
    arm = arm_number(values, "reuse-2", "bapo")
    series = next(s for s in panel(values, key)["series"] if s["arm"] == arm)
    for seed, drawn in zip((0, 1), series["runs"], strict=True):
        logged = lines(compared / "reuse-2" / "bapo" / f"seed-{seed}", "update")
        assert series["x"] == [line["version"] for line in logged]
        assert drawn == pytest.approx([line[key] for line in logged], rel=1e-5)


def test_the_table_is_the_mean_of_the_summaries(report, compared):
    values = embedded(report)
    row = values["table"]["rows"][arm_number(values, "reuse-2", "grpo")]["cells"]
    summaries = [json.loads((compared / f"reuse-2/grpo/seed-{s}/summary.json").read_text()) for s in (0, 1)]
    assert row["avg"]["value"] == pytest.approx(fmean(s["after"]["eval/avg"] for s in summaries), rel=1e-5)
    assert row["avg"]["text"] == f"{fmean(s['after']['eval/avg'] for s in summaries):.3f}"
    assert row["avg"]["below"] == f"from {fmean(s['before']['eval/avg'] for s in summaries):.3f}"
    assert values["table"]["caption"].startswith("Two seeds are too few for an interval, so they have a mean only.")
    assert row["staleness"]["value"] == max(s["staleness_max"] for s in summaries) == 1
    assert row["staleness"]["below"] == "bound 16"
    updates = [lines(compared / f"reuse-2/grpo/seed-{s}", "update") for s in (0, 1)]
    assert row["max_grad_norm"]["value"] == pytest.approx(
        fmean(max(line["grad_norm"] for line in run) for run in updates), rel=1e-5
    )
    assert row["stop"]["text"] == "–"  # grpo searches no bounds
    tokens = fmean(sum(line["tokens"] for line in run) for run in updates)
    assert (row["responses"]["text"], row["responses"]["below"]) == ("58", f"{tokens / 1000:.3g} k tokens")  # 56 and 60


def test_of_two_evaluations_of_one_version_the_one_on_more_problems_is_drawn(compared, tmp_path):
    """A first step without an update leaves the version at 0, where the evaluation of all problems was."""
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    at = next(index for index, line in enumerate(lines) if line["kind"] == "eval")
    small = lines[at] | {"step": 1, "eval/problems": 1, "eval/avg": 0.99}
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines[: at + 1], small, *lines[at + 1 :]])
    )
    write_report([run], tmp_path / "report.html")
    figures = {figure["id"]: figure for figure in embedded(tmp_path / "report.html")["figures"]}
    (series,) = figures["held-out"]["panels"][0]["series"]
    assert series["x"][0] == 0
    assert series["runs"][0][0] == lines[at]["eval/avg"]
    assert not series.get("apart", [False])[0]


def test_the_positive_share_is_the_one_that_compare_prints(report, compared):
    """The mean over all updates, then over seeds; below it the first and the last tenth, here one update each."""
    values = embedded(report)
    row = values["table"]["rows"][arm_number(values, "reuse-2", "bapo")]["cells"]
    shares = [[line["share"] for line in lines(compared / f"reuse-2/bapo/seed-{s}", "update")] for s in (0, 1)]
    assert row["share"]["text"] == f"{fmean(fmean(run) for run in shares):.3f}"
    first, last = (fmean(run[at] for run in shares) for at in (0, -1))
    assert row["share"]["below"] == f"{first:.3f} → {last:.3f}"
    runs = [
        {
            "setting": "s",
            "objective": "bapo",
            "seed": s,
            "measures": measures(read_run(compared / f"reuse-2/bapo/seed-{s}")),
        }
        for s in (0, 1)
    ]
    results = {"name": "g", "k": 2, "settings": by_seed(runs, ["s"], ["bapo"]), "across_settings": None, "verdict": []}
    _, _, headings, printed, *_ = table_lines(results)
    assert "positive share" in headings
    assert row["share"]["text"] in printed


def test_restarts_on_a_cluster_stand_below_the_time(compared):
    run = read_run(compared / "reuse-2/grpo/seed-0")
    assert overview(arms_of([run]))["rows"][0]["cells"]["seconds"]["below"] == ""
    run.summary["restarts"] = {"learner": 1, "rollout 0": 2}
    assert overview(arms_of([run]))["rows"][0]["cells"]["seconds"]["below"] == "3 restarts of actors"


def test_only_runs_on_a_cluster_have_a_section_about_it(compared, tmp_path):
    assert contents(find_arms([compared]))["cluster"] is None
    run = shutil.copytree(compared / "reuse-2/grpo/seed-0", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["cluster"] = {"rollouts": 2, "ahead": 1}
    (run / "config.json").write_text(json.dumps(config))
    logged = [(1, 10.0, 4.0, 0.5, 100.0), (2, 30.0, 6.0, 0.1, 300.0), (3, 60.0, 0.0, 0.2, 0.0)]
    keys = ("step", "seconds", "rollout_seconds", "sampling_share", "tokens_per_second")
    (run / "timing.jsonl").write_text("".join(json.dumps(dict(zip(keys, v, strict=True))) + "\n" for v in logged))
    quiet = contents(find_arms([run]))["cluster"]
    assert quiet["caption"].endswith("No actor was restarted.")
    (table,) = quiet["tables"]
    shown = dict(zip([heading for heading, _ in table["headings"]], table["rows"][0], strict=True))
    assert shown == {
        "Rollout actors": "2 × in-process", "Learner ranks": "1", "Ahead": "1", "Restarts": "0", "Log-prob gap": "–",
        "Actors sampled": "20%",  # (5 + 3 + 12) of 100 seconds
        "Learner waited": "10%",  # (4 + 6 + 0) of 100 seconds
        "Tokens/s": "100",  # (1000 + 9000) tokens in 100 seconds
    }  # fmt: skip
    for restart, step in (
        (Restart("rollout 1", "it was silent for 60 s", responses=3, tokens=40), 1),
        (Restart("rollout 1", "the actor died:\n" + "x" * 500, responses=2), 2),
        (Restart("learner", "rank 0 hangs", updates=4), 2),
    ):
        record_restart(run, restart, step=step)
    broken = contents(find_arms([run]))["cluster"]
    assert broken["tables"][0]["rows"][0][-1] == "3"
    silent, dead, learner = broken["tables"][1]["rows"]
    assert silent == ["rollout 1", "1", "3", "", "it was silent for 60 s"]
    assert dead[:4] == ["rollout 1", "2", "2", ""]
    assert dead[4].startswith("the actor died: xxx")
    assert len(dead[4]) == 240
    assert learner == ["learner ranks", "2", "", "4", "rank 0 hangs"]


def with_scores(compared, root, **scores):
    """A run directory per seed, with these values of `eval/KEY` after training: KEY=(one per seed)."""
    for seed, values in enumerate(zip(*scores.values(), strict=True)):
        run = shutil.copytree(compared / "reuse-4/bapo/seed-0", root / f"run{seed}")
        for name, change in (("config.json", {"seed": seed}), ("summary.json", {})):
            held = json.loads((run / name).read_text())
            for key, value in zip(scores, values, strict=True):
                held.get("after", {})[f"eval/{key}"] = value
            (run / name).write_text(json.dumps(held | change))
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        logged[-1] |= {f"eval/{key}": value for key, value in zip(scores, values, strict=True)}
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    return root


def test_three_seeds_have_an_interval_and_that_of_a_share_ends_at_one(compared, tmp_path):
    """avg .1 .2 .3: ± 4.3027 · .1 / √3 = .248. pass .9 1 1: .967 ± 4.3027 · .057735 / √3 = .143, from .823 to 1.110."""
    avg, passed = (0.1, 0.2, 0.3), (0.9, 1.0, 1.0)
    values = contents(find_arms([with_scores(compared, tmp_path / "three", **{"avg": avg, "pass": passed})]))
    cells = values["table"]["rows"][0]["cells"]
    assert (cells["avg"]["text"], cells["pass"]["text"]) == ("0.200 ± 0.248", "0.967 [0.823, 1.000]")
    assert values["table"]["caption"].startswith("Mean over seeds ± half width of its 95% interval (Student's t)")
    points = [one["series"][0]["ends"] for one in scores(find_arms([tmp_path / "three"]).arms, "2", "after training")]
    assert points == [pytest.approx([-0.0484, 0.4484], abs=1e-4), pytest.approx([0.8232, 1.0], abs=1e-4)]


def test_bars_at_evaluations_are_the_intervals_of_the_table_over_seeds(compared, tmp_path):
    """Half a width is 4.3027 / √3 = 2.4841 standard deviations of three seeds."""
    values = contents(find_arms([with_scores(compared, tmp_path / "three", **{"avg": (0.1, 0.2, 0.3)})]))
    drawn = panel(values, "eval/avg")
    (series,) = drawn["series"]
    assert [run[-1] for run in series["runs"]] == [0.1, 0.2, 0.3]
    assert drawn["reach"] == [None, None, None, pytest.approx(2.48414, abs=1e-5)]
    assert (drawn["bars"], drawn["ends"]) == ("bars: 95% intervals over seeds", [None, None])
    assert panel(values, "eval/pass")["ends"] == [0, 1]
    assert "problems" not in series
    assert "Bars: 95% intervals over seeds. Small dots are seeds." in values["figures"][0]["caption"]
    two = contents(find_arms([compared / "reuse-2"]))
    assert (panel(two, "eval/avg")["bars"], panel(two, "eval/avg")["reach"]) == ("", [None] * 3)
    assert "Bars" not in two["figures"][0]["caption"]


def test_bars_of_single_runs_are_their_intervals_over_problems(compared):
    one, other = (compared / f"reuse-4/{name}/seed-0" for name in ("bapo", "push-once"))
    for paths in ([one], [one, other]):
        values = contents(find_arms(paths))
        drawn = panel(values, "eval/avg")
        for series in drawn["series"]:
            directory = values["arms"][series["arm"]]["runs"][0]
            kept = {line["version"]: line for line in lines(Path(directory), "eval")}
            logged = [kept[version] for version in series["x"]]
            assert len(logged) > 2
            assert series["problems"] == [
                pytest.approx([line[f"eval/avg_{end}"] for line in logged], rel=1e-5) for end in ("low", "high")
            ]
        assert drawn["bars"] == "bars: 95% intervals over problems"
        assert "Bars: 95% intervals over problems." in values["figures"][0]["caption"]
        assert not any("problems" in series for series in panel(values, "eval/entropy")["series"])
    mixed = panel(contents(find_arms([compared / "reuse-2", one])), "eval/avg")
    assert not any("problems" in series for series in mixed["series"])  # bars of two kinds in one plot mislead
    assert mixed["bars"] == ""


def test_profiles_weigh_by_tokens(report, compared):
    values = embedded(report)
    arm = arm_number(values, "reuse-4", "bapo")
    drawn = next(s for s in panel(values, "ratio_prob")["series"] if s["arm"] == arm)["runs"][0]
    logged = lines(compared / "reuse-4" / "bapo" / "seed-0", "update")
    for position, value in enumerate(drawn):
        counts = [line["ratio_histogram"][position] for line in logged]
        if value is None:
            assert sum(counts) < 20
        else:
            mass = sum(c * line["ratio_prob"][position] for c, line in zip(counts, logged, strict=True))
            assert value == pytest.approx(mass / sum(counts), rel=1e-5)
    assert drawn[7] is not None  # around ratio 1


def test_staleness_bars_are_shares_of_the_tokens(report):
    values = embedded(report)
    bars = next(f for f in values["figures"] if f["id"] == "staleness")["panels"][0]
    series = {s["arm"]: s["values"] for s in bars["series"]}
    reuse = series[arm_number(values, "reuse-2", "bapo")]
    assert sum(reuse) == pytest.approx(1, abs=1e-4)
    assert reuse[0] == pytest.approx(0.5, abs=0.1)  # every token is used once fresh and once after one update
    assert all(sum(shares) == pytest.approx(1, abs=1e-4) for shares in series.values())


def test_quadrants_sum_to_one(report):
    retained, blocked = next(f for f in embedded(report)["figures"] if f["id"] == "quadrants")["panels"][:2]
    for kept, lost in zip(retained["series"], blocked["series"], strict=True):
        assert sum(kept["values"]) + sum(lost["values"]) == pytest.approx(1, abs=1e-4)


def test_every_curve_is_a_declared_metric_and_every_figure_says_something(report):
    values = embedded(report)
    for figure in values["figures"]:
        assert figure["caption"].endswith(".")
        assert figure["panels"] or figure["note"]
        assert all(p["key"] in METRICS for p in figure["panels"] if p["kind"] in ("curves", "profile"))
    paper = "The BAPO paper (arXiv:2510.18927) shows this in its "
    assert {f["caption"].partition(paper)[2] for f in values["figures"]} == {
        *(f"figure {n}." for n in (2, 4, 6, 7, 8, 9, 11, 12)),
        *("figures 5 and 10.", ""),
    }
    assert all(f["panels"] for f in values["figures"])  # these runs have all that the figures need


def test_what_these_arms_cannot_show_is_said_once(compared):
    values = contents(find_arms([compared / "reuse-2"]))
    reasons = {undrawn["title"]: undrawn["reason"] for undrawn in values["undrawn"]}
    assert list(reasons) == ["Score by staleness", "Score under partial rollout", "Fixed clips, symmetric and not"]
    assert "at least two values" in reasons["Score by staleness"]
    assert "partial_budget" in reasons["Score under partial rollout"]
    assert "fixed bounds" in reasons["Fixed clips, symmetric and not"]
    assert all(figure["panels"] for figure in values["figures"])


def test_a_page_of_one_run_does_not_speak_of_a_comparison(compared):
    values = contents(find_arms([compared / "reuse-2" / "bapo" / "seed-0"]))
    assert values["undrawn"] == values["differences"] == []
    assert {"by-staleness", "under-partial", "fixed-clips"}.isdisjoint(figure["id"] for figure in values["figures"])
    said = json.dumps([values["verdict"], values["table"]["caption"], [f["caption"] for f in values["figures"]]])
    for word in ("compar", "against", " arm", "seeds", "GRPO", "grpo"):
        assert word not in said


def test_responses_come_from_start_middle_and_end(compared):
    directory = compared / "partial" / "bapo" / "seed-0"
    shown = samples(directory)["shown"]
    logged = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    assert [group["moment"] for group in shown] == ["start", "middle", "end"]
    assert [group["step"] for group in shown] == [logged[i]["step"] for i in (0, len(logged) // 2, -1)]
    last = logged[-1]
    for index, response in enumerate(shown[-1]["responses"]):
        assert response["reward"] == last["trajectories"][index]["reward"]
        assert "".join(text for _, text in response["pieces"]) == last["responses"][index]
        versions = last["trajectories"][index]["versions"]
        assert [version for version, _ in response["pieces"]] == sorted(set(versions))
    several = [r for group in logged for r in group["written_by"] if len(r) > 1]
    assert several, "partial rollout has responses by several versions"


def test_long_texts_are_cut_and_say_so(tmp_path):
    trajectory = {"versions": [3, 4], "reward": 0.0, "status": "truncated", "tokens": [1, 2]}
    line = {
        **{"step": 1, "problem": {"prompt": "p"}, "trajectories": [trajectory]},
        **{"responses": ["a" * 3000], "written_by": [[[3, "a" * 1500], [4, "a" * 1500]]]},
    }
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n" + '{"half')
    group = samples(tmp_path)["shown"][0]
    assert group["moment"] == "only sample"
    assert group["responses"][0]["cut"] == 1000
    assert [(v, len(t)) for v, t in group["responses"][0]["pieces"]] == [(3, 1500), (4, 500)]
    (tmp_path / "rollouts.jsonl").write_text("not JSON, and longer\n")
    assert "cannot be read" in samples(tmp_path)["note"]


def test_runs_are_named_by_what_differs(compared):
    read = [read_run(compared / "reuse-2" / "bapo" / "seed-0"), read_run(compared / "reuse-4" / "bapo" / "seed-0")]
    moved = [Run(**{**vars(run), "path": run.path.parents[3] / f"run{i}"}) for i, run in enumerate(read)]
    assert [(arm.setting, arm.objective) for arm in arms_of(moved)] == [("reuse 2", "bapo"), ("reuse 4", "bapo")]
    other_seed = Run(**{**vars(moved[0]), "config": moved[0].config | {"seed": 7, "threads": 5}})
    assert [len(arm.runs) for arm in arms_of([*moved, other_seed])] == [2, 1]
    other_lr = moved[0].config | {"learn": moved[0].config["learn"] | {"lr": 0.5}}
    named = arms_of([moved[0], Run(**{**vars(moved[0]), "config": other_lr})])
    assert sorted(arm.setting for arm in named) == ["lr 0.0003", "lr 0.5"]


def test_long_curves_become_means_of_stretches(compared):
    run = read_run(compared / "reuse-2" / "bapo" / "seed-0")
    many = [{"kind": "update", "step": 1, "version": i, "loss": float(i)} for i in range(1, 2 * MAX_POINTS + 1)]
    series = curves(arms_of([Run(**{**vars(run), "updates": many})]), "loss", "Loss")["series"][0]
    assert series["stretch"] == 2
    assert series["x"] == list(range(2, 2 * MAX_POINTS + 1, 2))
    assert series["runs"][0] == [x - 0.5 for x in series["x"]]


def test_numbers_that_are_not_finite_become_null(compared):
    run = read_run(compared / "reuse-2" / "bapo" / "seed-0")
    bad = [line | {"grad_norm": float("nan"), "kl": float("inf")} for line in run.updates]
    arms = arms_of([Run(**{**vars(run), "updates": bad})])
    json.dumps([figures(arms), overview(arms)], allow_nan=False)
    assert set(curves(arms, "kl", "KL")["series"][0]["runs"][0]) == {None}


def edited(run, name, change):
    """Rewrite one file of a run: `change` gets its value, or its list of lines."""
    file = run / name
    if name.endswith("jsonl"):
        values = [json.loads(line) for line in file.read_text().splitlines()]
        change(values)
        file.write_text("".join(json.dumps(value) + "\n" for value in values))
    else:
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))


def test_a_run_whose_settings_are_not_finite_is_named_with_the_key(compared, tmp_path, capsys):
    run = shutil.copytree(compared / "reuse-2/grpo/seed-0", tmp_path / "run")
    edited(run, "config.json", lambda config: config["learn"].update(lr=inf))
    assert cli(["report", str(run)]) == 2
    told = capsys.readouterr().err
    assert str(run) in told
    assert "learn.lr" in told


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [("reward", nan, None), ("reward", inf, None), ("status", {"a": inf}, "{'a': inf}"), ("reward", 0.25, 0.25)],
)
def test_samples_hold_only_what_a_page_can(compared, tmp_path, key, value, shown):
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")
    edited(run, "rollouts.jsonl", lambda groups: groups[0]["trajectories"][0].update({key: value}))
    assert cli(["report", str(run)]) == 0
    group = embedded(run / "report.html")["samples"][0]["shown"][0]
    assert group["responses"][0][key] == shown
    assert (group["mean_reward"] is None) == (key == "reward" and shown is None)


@pytest.mark.parametrize(("key", "value"), [("versions", [nan]), ("versions", [inf]), ("reward", "x")])
def test_samples_that_make_no_sense_are_left_out_with_a_sentence(compared, tmp_path, key, value):
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")
    edited(run, "rollouts.jsonl", lambda groups: groups[0]["trajectories"][0].update({key: value}))
    assert cli(["report", str(run)]) == 0
    assert "cannot be read" in embedded(run / "report.html")["samples"][0]["note"]


DAMAGE = {
    "config.json": (lambda text: text[: len(text) // 2], "damaged"),
    "summary.json": (lambda text: "[]", "damaged"),
    "metrics.jsonl": (lambda text: text[:-100], "damaged"),
    "timing.jsonl": (lambda text: "", "damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_runs_are_named_and_skipped(compared, tmp_path, capsys, name):
    for seed in (0, 1):
        shutil.copytree(
            compared / f"reuse-2/bapo/seed-{seed}",
            tmp_path / f"grid/reuse-2/bapo/seed-{seed}",
        )
    file = tmp_path / "grid/reuse-2/bapo/seed-1" / name
    change, kind = DAMAGE[name]
    file.write_text(change(file.read_text()))
    assert cli(["report", str(tmp_path / "grid")]) == 0
    told = capsys.readouterr()
    assert f"seed-1: {kind}: {name}" in told.err
    values = embedded(tmp_path / "grid" / "report.html")
    assert values["arms"][0]["seeds"] == [0]
    assert [(p["kind"], p["path"]) for p in values["defects"]] == [(kind, str(file.parent))]


def test_odd_lines_and_lost_configurations_are_defects_too(compared, tmp_path):
    shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "odd")
    logged = (tmp_path / "odd/metrics.jsonl").read_text().splitlines()
    changed = [
        json.dumps(line | {"ratio_prob": [0.5]} if line["kind"] == "update" and line["version"] == 1 else line)
        for line in map(json.loads, logged)
    ]
    (tmp_path / "odd/metrics.jsonl").write_text("\n".join(changed) + "\n")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost/metrics.jsonl").write_text("")
    found = find_arms([tmp_path])
    assert not found.arms
    assert [(p.path.name, p.kind) for p in found.defects] == [("lost", "missing"), ("odd", "damaged")]
    assert "ratio_prob" in found.defects[1].message


def updates_of(values):
    return [line for line in values if line["kind"] == "update"]


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize(
    "keys",
    [("ratio_prob",), ("ratio_histogram",), ("ratio_entropy",), ("ratio_histogram", "ratio_prob", "ratio_entropy")],
)
def test_bins_that_cannot_be_drawn_are_a_problem(compared, tmp_path, keys, kept):
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")

    def cut(values):
        for line in updates_of(values):
            cut_off = {key: line.pop(key)[:kept] for key in keys}
            line |= cut_off if kept or len(keys) > 1 else {}  # one alone is also tried as missing

    edited(run, "metrics.jsonl", cut)
    found = find_arms([run])
    assert not found.arms
    assert [(p.kind, p.message) for p in found.defects] == [
        ("damaged", f"metrics.jsonl has updates whose {keys[0]} is missing or of another length.")
    ]


def test_an_integer_beyond_all_numbers_is_damage_and_not_a_full_disk(compared, tmp_path, capsys):
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")
    edited(run, "metrics.jsonl", lambda values: updates_of(values)[0].update(tokens=10**400))
    assert cli(["report", str(run)]) == 2
    assert "an integer of 401 digits" in capsys.readouterr().err


def test_numbers_whose_sum_overflows_are_damage(compared, tmp_path, capsys):
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")
    edited(run, "metrics.jsonl", lambda values: [line.update(grad_norm=1e308) for line in updates_of(values)])
    assert cli(["report", str(run)]) == 2
    assert "1e+308 is too large for a metric" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["share", "staleness_mean", "grad_norm", "tokens", "clip_high", "kl"])
def test_infinities_of_both_signs_are_drawn_as_nothing(compared, tmp_path, key):
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")

    def spoil(values):
        for line, value in zip(updates_of(values), (inf, -inf), strict=False):
            line[key] = value

    edited(run, "metrics.jsonl", spoil)
    assert cli(["report", str(run)]) == 0


@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_norm_that_is_not_a_number_is_not_hidden_by_its_place(compared, tmp_path, place):
    run = shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")
    edited(run, "metrics.jsonl", lambda values: updates_of(values)[place].update(grad_norm=nan))
    cells = contents(find_arms([run]))["table"]["rows"][0]["cells"]
    assert cells["max_grad_norm"] == {"value": None, "text": "nan", "below": ""}
    (run / "summary.json").unlink()
    assert contents(find_arms([run]))["table"]["rows"][0]["cells"]["max_grad_norm"]["text"] == "nan"


def test_a_copy_of_a_run_is_no_further_seed(compared, tmp_path, capsys):
    first, last = tmp_path / "a", tmp_path / "c"
    for path in (first, tmp_path / "b", last):
        shutil.copytree(compared / "reuse-2/bapo/seed-0", path)
    (first / "summary.json").unlink()  # so that it comes first, and is not the one to show
    assert cli(["report", str(tmp_path)]) == 0
    values = embedded(tmp_path / "report.html")
    printed = capsys.readouterr()
    assert values["verdict"]["lines"]
    for line in values["verdict"]["lines"]:
        assert f"\n  {line}\n" in printed.out
    assert values["arms"][0]["runs"] == [str(tmp_path / "b")]
    assert "±" not in values["table"]["rows"][0]["cells"]["avg"]["text"]
    assert [(p["kind"], p["path"]) for p in values["defects"]] == [("duplicate", str(first)), ("duplicate", str(last))]
    assert f"{last}: duplicate: it has the same configuration and seed as {tmp_path / 'b'}" in printed.err


def test_only_runs_of_a_grid_are_named_by_their_directories(compared, tmp_path):
    for place in ("mine/today/seed-0", "grid/mine/today/seed-0"):
        shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / place)
    (tmp_path / "grid/grid.json").write_text("{}")
    assert [(arm.setting, arm.objective) for arm in find_arms([tmp_path / "mine"]).arms] == [("reuse 2", "bapo")]
    assert [(arm.setting, arm.objective) for arm in find_arms([tmp_path / "grid"]).arms] == [("mine", "today")]


def test_a_grid_gives_the_report_its_name(report, compared, tmp_path):
    assert embedded(report)["title"] == "compared: demo on countdown"
    assert contents(find_arms([compared / "reuse-2/bapo"]))["title"] == "bapo, reuse-2: demo on countdown"
    copy = shutil.copytree(compared, tmp_path / "copy")
    for text in ("[]", '{"name": 3}', "{"):
        (copy / "grid.json").write_text(text)
        assert contents(find_arms([copy]))["title"].startswith("bapo, grpo, clip_higher, push-once: demo")


def test_the_title_names_the_run_the_model_and_the_task(compared, tmp_path):
    def titled(name, model, task, **more):
        run = shutil.copytree(compared / "reuse-4/bapo/seed-0", tmp_path / name)
        config = json.loads((run / "config.json").read_text())
        config["model"]["path"], config["task"] = model, task
        (run / "config.json").write_text(json.dumps(config | more))
        return contents(find_arms([run]))["title"]

    one = contents(find_arms([compared / "reuse-4/bapo/seed-0"]))["title"]
    assert one == "reuse-4/bapo/seed-0: demo on countdown"
    assert titled("small", "demo", {"name": "countdown"}) == "small: demo on countdown"
    data = {"name": "data", "train": ["gsm8k:train", "data/mine.jsonl"], "test": ["gsm8k"]}
    assert titled("mine", "Qwen/Qwen2.5-7B", data) == "mine: Qwen2.5-7B on gsm8k + mine"
    gym = {"name": "gym", "gym": {"basic_arithmetic": {}}}
    assert titled("gym", "models/small/", gym) == "gym: small on basic_arithmetic"
    names = contents(find_arms([tmp_path / "small", tmp_path / "mine"]))["title"]
    assert names.startswith("bapo, ")
    assert names.endswith(": Qwen2.5-7B and demo on gsm8k + mine and countdown")
    assert contents(find_arms([tmp_path]))["title"].endswith(": 3 models on 3 tasks")


def test_figures_that_say_how_a_rule_works_are_folded(report):
    folded = {figure["id"]: figure["folded"] for figure in embedded(report)["figures"]}
    assert [name for name, hidden in folded.items() if not hidden] == [
        *("held-out", "dynamics", "lengths", "by-staleness", "under-partial")
    ]
    assert list(folded.values()) == sorted(folded.values())  # the folded ones come last


def test_an_unfinished_run_is_shown_as_far_as_it_got(compared, tmp_path):
    shutil.copytree(compared / "reuse-4/bapo/seed-0", tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')
    values = contents(find_arms([tmp_path / "run"]))
    assert values["defects"][0]["kind"] == "unfinished"
    assert "3 of 3 steps" in values["defects"][0]["message"]
    cells = values["table"]["rows"][0]["cells"]
    assert (cells["avg"]["text"], cells["seeds"]["below"]) == ("–", "seed 0; 1 unfinished")
    assert len(panel(values, "grad_norm")["series"][0]["x"]) == 12


def test_nothing_is_written_without_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli(["report", "nowhere"]) == 2
    told = capsys.readouterr().err
    assert "no such directory" in told
    assert "nothing was written" in told
    assert list(tmp_path.iterdir()) == []


def test_bad_usage_and_bad_places(compared, tmp_path, capsys):
    assert cli(["report"]) == 2
    assert cli(["report", "--help"]) == 0
    assert cli(["report", str(compared), "--out", str(tmp_path / "none" / "r.html")]) == 4
    assert "cannot write the report" in capsys.readouterr().err


def test_a_report_replaces_the_last_one_whole(compared, tmp_path):
    out = tmp_path / "r.html"
    out.write_text("before")
    write_report([compared], out)
    assert out.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_the_page_is_one_file_of_moderate_size(report):
    text = report.read_text()
    assert report.stat().st_size < 6e6
    assert "src=" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "default-src 'none'" in text


def test_text_of_models_cannot_leave_its_place(compared, tmp_path):
    shutil.copytree(compared / "reuse-2/bapo/seed-0", tmp_path / "run")
    evil = "</script><script>alert(1)</script>"
    rollouts = tmp_path / "run/rollouts.jsonl"
    line = json.loads(rollouts.read_text().splitlines()[0])
    line["written_by"][0] = [[0, evil]]
    rollouts.write_text(json.dumps(line) + "\n")
    write_report([tmp_path / "run"], tmp_path / "r.html")
    assert evil not in (tmp_path / "r.html").read_text()
    assert embedded(tmp_path / "r.html")["samples"][0]["shown"][0]["responses"][0]["pieces"] == [[0, evil]]


def test_a_run_of_today_can_be_reported_on(tmp_path):
    from bapo.train.run import start

    config = {**TINY, "steps": 1, "out": str(tmp_path / "run"), "eval": {"problems": 2, "k": 1, "every": 0}}
    start(parse(Config, config, source="test"), plain=True)
    found = write_report([tmp_path], tmp_path / "r.html")
    assert (len(found.arms), found.defects) == (1, [])
    values = embedded(tmp_path / "r.html")
    assert values["arms"][0]["setting"] == "reuse 4"
    assert panel(values, "ratio_entropy")["series"]
    assert values["samples"][0]["shown"][0]["responses"]


# Live


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.status, answer.headers, answer.read()


@pytest.fixture
def serving(compared, tmp_path):
    shutil.copytree(compared / "reuse-4/bapo/seed-0", tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    with serve([tmp_path / "run"], 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server, tmp_path / "run"
        server.shutdown()
        thread.join()


def test_the_live_page_follows_the_log(serving):
    server, directory = serving
    assert server.server_address[0] == "127.0.0.1"
    assert b'data-live="true"' in get(server.url)[2]
    _, headers, body = get(f"{server.url}values.json")
    assert panel(json.loads(body), "grad_norm")["series"][0]["x"][-1] == 12
    with pytest.raises(urllib.error.HTTPError, match="304"):
        get(f"{server.url}values.json", **{"If-None-Match": headers["ETag"]})
    newer = lines(directory, "update")[-1] | {"version": 13, "grad_norm": 7.5}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(newer) + "\n")
    _, _, body = get(f"{server.url}values.json", **{"If-None-Match": headers["ETag"]})
    series = panel(json.loads(body), "grad_norm")["series"][0]
    assert (series["x"][-1], series["runs"][0][-1]) == (13, 7.5)


def test_the_server_answers_this_machine_only(serving):
    server, _ = serving
    for path, headers, status in (("", {"Host": "evil.example"}, "403"), ("../config.json", {}, "404")):
        with pytest.raises(urllib.error.HTTPError, match=status):
            get(server.url + path, **headers)


def test_a_client_that_has_gone_is_no_error(serving, capsys):
    server, _ = serving
    for _ in range(3):
        with socket.create_connection(server.server_address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing is a reset
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    get(f"{server.url}values.json")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_port_in_use_is_said_or_passed_over(compared, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli(["report", "--live", str(compared), "--port", str(port)]) == 4
    assert f"port {port} is in use" in capsys.readouterr().err
    assert cli(["report", "--live", str(compared), "--port", "70000"]) == 4
    assert "there is no port 70000" in capsys.readouterr().err
    with serve([compared]) as one, serve([compared]) as other:
        assert one.url != other.url


def test_ctrl_c_ends_following(compared):
    command = [sys.executable, "-m", "bapo.cli", "report", "--live", str(compared), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert "following" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "no longer following" in out
    assert err == ""
