"""The script that draws the pictures of docs/results.md, on run directories whose numbers are known."""

import importlib.util
import json
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.compared_runs import COMPARED

SVG = "{http://www.w3.org/2000/svg}"
FILE = Path(__file__).parents[2] / "docs" / "figures.py"


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("docs_figures", FILE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def make_run(path, source, score, log_ratio):
    """A copy of a run with these scores after training, and with this log r of negative tokens in the last bin."""
    shutil.copytree(source, path)
    logged = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in logged:
        if line["kind"] == "update":
            first = line["version"] == 1  # this update has a third of the weight of the others in the last bin
            line["use_histogram"] = [10, 10, 10, 10 if first else 30, 0]
            line["use_negative"] = [0.0, -0.01, -0.02, 4 * log_ratio if first else log_ratio, 0.0]
            line["use_below"] = [0.5, 0.4, 0.4, 0.4, 0.0]
    summary = json.loads((path / "summary.json").read_text())
    after = summary["after"] | {"eval/avg": score, "eval/pass": score}
    logged[logged.index(summary["after"])] = after
    summary |= {"after": after, "also_at": [{"temperature": 0.6, "before": summary["before"], "after": after}]}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    root = tmp_path_factory.mktemp("uses")
    for rate in ("3e-5", "1e-4"):
        for passes in (1, 2, 4, 8):
            for objective, source in (("grpo", "reuse-4/clip_higher"), ("push-once", "reuse-4/push-once")):
                for seed in (0, 1) if (passes, objective) != (1, "push-once") else ():
                    score = (0.5 if objective == "grpo" else 0.5 + 0.05 * passes) + 0.01 * seed
                    place = root / f"{passes}x-{rate}" / objective / f"seed-{seed}"
                    make_run(place, COMPARED / source / "seed-0", score, -0.06 if objective == "grpo" else -0.03)
    return root


def test_an_update_counts_by_its_tokens_in_the_bin(figures, grid):
    run = figures.runs_of(grid, "8x-1e-4", "grpo")[0]
    assert len(run.updates) == 8
    # (10 · 4 + 7 · 30) · -0.06 / (10 + 7 · 30)
    assert figures.by_use(run, "use_negative") == pytest.approx([0, -0.01, -0.02, -0.06 * 250 / 220])


def test_one_pass_is_the_same_run_for_both(figures, grid):
    one, other = (figures.score(grid, "3e-5", 1, objective, "avg_at_0.6") for objective in ("grpo", "push-once"))
    assert one == other == pytest.approx((0.505, 12.706 * 0.01 / 2), rel=1e-4)  # t(0.975, 1) s / √2
    assert figures.score(grid, "3e-5", 8, "push-once", "pass")[0] == pytest.approx(0.905)


def test_the_mean_curve_ends_with_the_shortest_seed(figures):
    assert figures.mean_curve([[(1, 2.0), (3, 4.0)], [(1, 4.0)]]) == [(1, 3.0)]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([0.641, 0.71], [0.64, 0.66, 0.68, 0.7, 0.72]), ([-0.093, 0], [-0.1, -0.08, -0.06, -0.04, -0.02, 0])],
)
def test_ranges_end_at_ticks(figures, values, ticks):
    ends, found = figures.nice_range(values)
    assert found == pytest.approx(ticks)
    assert ends == (found[0], found[-1])


@pytest.mark.parametrize(("name", "plots"), [("tokens_picture", 3), ("scores_picture", 8)])
def test_the_pictures_hold_what_they_should_and_nothing_from_elsewhere(figures, grid, name, plots):
    text = getattr(figures, name)(grid)
    root = ET.fromstring(text)
    assert len(text) < 100_000
    assert text.count("http") == 1  # the namespace
    assert len([t for t in root.iter(f"{SVG}text") if t.get("class") == "title"]) == plots
    bold = [line for line in root.iter(f"{SVG}polyline") if line.get("class") == "bold"]
    assert len(bold) == 2 * plots
    width, height = (float(root.get(side)) for side in ("width", "height"))
    for line in root.iter(f"{SVG}polyline"):
        for x, y in (map(float, point.split(",")) for point in line.get("points").split()):
            assert 0 < x < width
            assert 0 < y < height
    assert len(list(root.iter(f"{SVG}circle"))) == (2 * 2 * 4 if plots == 3 else 8 * 2 * 4)


def test_better_scores_are_higher_up(figures, grid):
    root = ET.fromstring(figures.scores_picture(grid))
    grpo, push_once = [line for line in root.iter(f"{SVG}polyline") if line.get("class") == "bold"][:2]
    ys = [[float(point.split(",")[1]) for point in line.get("points").split()] for line in (grpo, push_once)]
    assert ys[0] == [ys[0][0]] * 4
    assert ys[1][0] == ys[0][0] > ys[1][1] > ys[1][2] > ys[1][3]


def test_missing_and_unfinished_runs_are_named(figures, grid, tmp_path):
    with pytest.raises(SystemExit, match=r"8x-1e-4/grpo: no runs"):
        figures.tokens_picture(tmp_path)
    copy = shutil.copytree(grid, tmp_path / "copy")
    (copy / "8x-1e-4/push-once/seed-1/summary.json").unlink()
    with pytest.raises(SystemExit, match=r"push-once/seed-1: unfinished"):
        figures.tokens_picture(copy)
