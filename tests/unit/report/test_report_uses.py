"""What a report says about tokens that were trained on before, and about bounds that never move."""

import json
import shutil

import pytest

from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.config.sections import renamed
from bapo.report import contents, find_arms
from tests.compared_runs import COMPARED

USE_KEYS = ("use_negative", "use_positive", "use_below")
PUSH_ONCE, CLIP_HIGHER = COMPARED / "reuse-4/push-once/seed-0", COMPARED / "reuse-4/clip_higher/seed-0"


def updates(run):
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in logged if line["kind"] == "update"]


def with_updates(run, target, change):
    """A copy of a run in which `change` was called with every line of an update."""
    shutil.copytree(run, target)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in logged:
        if line["kind"] == "update":
            change(line)
    (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    return target


def drawn_figure(paths, name):
    values = contents(find_arms(paths))
    return values, next(figure for figure in values["figures"] if figure["id"] == name)


def arms_drawn(values, panel):
    """The values of each series by setting and objective."""
    arms = [values["arms"][series["arm"]] for series in panel["series"]]
    names = [f"{arm['setting']}/{arm['objective']}" for arm in arms]
    return dict(zip(names, (series["runs"] for series in panel["series"]), strict=True))


@pytest.mark.parametrize("key", USE_KEYS)
def test_a_run_counts_each_update_by_its_tokens_in_the_bin(key):
    values, figure = drawn_figure([COMPARED], "by-use")
    panel = next(panel for panel in figure["panels"] if panel["key"] == key)
    shown = arms_drawn(values, panel)
    assert set(shown) == {f"{arm['setting']}/{arm['objective']}" for arm in values["arms"]}
    for name in ("reuse-4/push-once", "reuse-2/grpo"):
        for seed, drawn in enumerate(shown[name]):
            lines = updates(COMPARED / name / f"seed-{seed}")
            assert len(drawn) == len(panel["bins"]) == 5
            for position, value in enumerate(drawn):
                weights = [line["use_histogram"][position] for line in lines]
                if sum(weights) < 20:
                    assert value is None
                    continue
                total = sum(weight * line[key][position] for weight, line in zip(weights, lines, strict=True))
                assert value == pytest.approx(total / sum(weights), rel=1e-5, abs=1e-12)
    assert [value is None for value in shown["reuse-4/push-once"][0]] == [False, False, False, True, True]
    assert [value is None for value in shown["reuse-2/grpo"][0]] == [False, False, True, True, True]


def test_push_once_pushes_no_used_token_below_where_it_was():
    values, figure = drawn_figure([COMPARED / "reuse-4"], "by-use")
    below = arms_drawn(values, figure["panels"][2])
    assert figure["panels"][2]["key"] == "use_below"
    assert below["reuse-4/push-once"][0][1:3] == [0, 0]
    assert min(below["reuse-4/clip_higher"][0][1:3]) > 0.1


def test_bins_are_named_after_the_uses_they_hold():
    _, figure = drawn_figure([PUSH_ONCE], "by-use")
    for panel in figure["panels"]:
        assert [tick["text"] for tick in panel["ticks"]] == ["never", "1", "2–3", "4–7", "8+"]
        assert [tick["at"] for tick in panel["ticks"]] == [0, 1, 2, 3, 4]


def test_the_brake_shows_the_drift_and_the_bound_that_follows(tmp_path):
    """used_low = 0.8 + 0.2 d / 0.04, as the run has logged it; a run without the brake has no such lines."""

    def brake(line):
        line["drift"] = 0.004 * (line["version"] - 1)
        line["used_low"] = 0.8 + 0.2 * min(1, line["drift"] / 0.04)

    braked = with_updates(CLIP_HIGHER, tmp_path / "braked", brake)
    config = json.loads((braked / "config.json").read_text())
    (braked / "config.json").write_text(json.dumps(config | {"objective": {"name": "brake"}}))
    logged = {key: [line[key] for line in updates(braked)] for key in ("drift", "used_low")}
    assert logged["used_low"][0] == 0.8 < logged["used_low"][-1]
    for figure, keys in (
        ("by-use", (*USE_KEYS, "drift", "used_low")),
        ("bounds", ("clip_high", "clip_low", "used_low")),
    ):
        values, drawn = drawn_figure([braked, PUSH_ONCE], figure)
        panels = {panel["key"]: panel for panel in drawn["panels"]}
        assert set(panels) == set(keys)
        for key in logged.keys() & panels.keys():
            (series,) = panels[key]["series"]
            assert values["arms"][series["arm"]]["objective"] == "brake"
            assert series["x"] == [line["version"] for line in updates(braked)]
            assert series["runs"] == [pytest.approx(logged[key], rel=1e-5)]
    _, without = drawn_figure([PUSH_ONCE], "by-use")
    assert [panel["key"] for panel in without["panels"]] == ["use_negative", "use_positive", "use_below"]


def test_the_brake_is_no_fixed_clip(tmp_path):
    """Its low and high stay where they are, but its bound of used tokens moves."""
    braked = with_updates(PUSH_ONCE, tmp_path / "braked", lambda line: line.update(drift=0.01, used_low=0.85))
    config = json.loads((braked / "config.json").read_text())
    (braked / "config.json").write_text(json.dumps(config | {"objective": {"name": "brake"}}))
    values, figure = drawn_figure([braked, PUSH_ONCE, CLIP_HIGHER], "fixed-clips")
    drawn = {values["arms"][series["arm"]]["objective"] for panel in figure["panels"] for series in panel["series"]}
    assert drawn == {"push-once", "clip_higher"}


def use_once(line):
    line["use_histogram"] = [int(line["tokens"]), 0, 0, 0, 0]


def test_arms_that_used_every_token_once_are_left_out(tmp_path):
    once = with_updates(PUSH_ONCE, tmp_path / "once", use_once)
    values, figure = drawn_figure([once, CLIP_HIGHER], "by-use")
    assert len(values["arms"]) == 2
    shown = [{values["arms"][series["arm"]]["objective"] for series in panel["series"]} for panel in figure["panels"]]
    assert shown == [{"clip_higher"}] * 3
    (reason,) = contents(find_arms([once]))["undrawn"]
    assert "used every token once" in reason["reason"]


def test_runs_without_numbers_of_uses_are_left_out(tmp_path):
    def forget(line):
        for key in [key for key in line if key.startswith("use_")]:
            del line[key]

    old = with_updates(PUSH_ONCE, tmp_path / "old", forget)
    (reason,) = contents(find_arms([old]))["undrawn"]
    assert "used every token once" in reason["reason"]
    values, figure = drawn_figure([old, CLIP_HIGHER], "by-use")
    assert len(values["arms"]) == 2
    assert [len(panel["series"]) for panel in figure["panels"]] == [1, 1, 1]


@pytest.mark.parametrize("key", ["use_histogram", *USE_KEYS, "use_retained"])
@pytest.mark.parametrize("damage", [lambda line, key: line.pop(key), lambda line, key: line[key].pop()])
def test_uses_that_cannot_be_drawn_are_a_defect(tmp_path, key, damage):
    run = with_updates(PUSH_ONCE, tmp_path / "run", lambda line: damage(line, key))
    found = find_arms([run])
    assert not found.arms
    assert [defect.message for defect in found.defects] == [
        f"metrics.jsonl has updates whose {key} is missing or of another length."
    ]


def test_bounds_that_are_not_searched_are_flat_lines():
    assert not any(key in line for line in updates(PUSH_ONCE) for key in ("stop", "share_at_start", "share_at_end"))
    values, figure = drawn_figure([PUSH_ONCE], "bounds")
    high, low = (panel["series"][0]["runs"][0] for panel in figure["panels"])
    assert (set(high), set(low)) == ({1.2}, {0.8})
    assert values["table"]["rows"][0]["cells"]["stop"]["text"] == "–"
    assert all(panel["series"] for figure in values["figures"] for panel in figure["panels"])


def test_only_a_search_has_a_target():
    def marks(*paths):
        _, figure = drawn_figure(paths, "balance")
        return [[mark["value"] for mark in panel["marks"]] for panel in figure["panels"][:3]]

    assert marks(PUSH_ONCE) == [[]] * 3
    assert marks(PUSH_ONCE, COMPARED / "reuse-4/bapo/seed-0") == [[0.45]] * 3


def test_push_once_is_a_fixed_clip_of_its_own():
    _, figure = drawn_figure([PUSH_ONCE, COMPARED / "reuse-2/grpo", COMPARED / "reuse-4/bapo"], "fixed-clips")
    assert "grpo 0.8, 1.2; push-once 0.8, 1.2 (1 instead of 0.8 for used tokens)." in figure["caption"]
    assert [len(panel["series"]) for panel in figure["panels"]] == [2, 2]


def test_a_stored_preset_of_another_objective_is_not_held_against_it():
    today = parse(Config, {"objective": {"name": "grpo"}}, source="test")
    stored = today.model_dump(mode="json")
    del stored["objective"]["used_low"]  # which older runs do not state
    stored["objective"]["preset"] = "weak-model"
    stored["objective"] = renamed(stored["objective"])
    assert parse(Config, stored, source="test") == today
