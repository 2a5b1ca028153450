"""The switch of the report from updates to sampled responses, in a real browser."""

import json
import shutil

import numpy as np
import pytest

from bapo.report import write_report
from tests.browser.test_report_chromium import ALLOWED, embedded, plot, redrawn, unfolded
from tests.compared_runs import COMPARED

BOLD = "plot.data.filter(trace => trace.showlegend).map(({name, x, y}) => ({name, x: [...x], y: [...y]}))"
HOLLOW = "plot.data.filter(trace => trace.meta?.apart).map(({name, x, y}) => ({name, x: [...x], y: [...y]}))"
THIN = "plot.data.filter(trace => trace.line.width === 0.8).map(({x, y}) => ({x: [...x], y: [...y]}))"
TITLE = "plot.layout.xaxis.title.text"
RESPONSES = 4
"""Responses per group in the compared runs."""


@pytest.fixture(scope="module")
def switched(lasting, report):
    page = lasting.open(f"{report}#x=responses", ALLOWED)
    unfolded(page)
    return page


@pytest.fixture
def page(switched, watched):
    """The report over sampled responses. Tests share it, and leave it as they found it."""
    return switched


@pytest.fixture
def opened(watched):
    """A function that opens a page and waits until it is drawn."""

    def open_page(url):
        page = watched(url, ALLOWED)
        unfolded(page)
        return page

    return open_page


def panels(page):
    return [panel for figure in embedded(page)["figures"] for panel in figure["panels"]]


def name_of(page, key):
    return next(panel["id"] for panel in panels(page) if panel.get("key") == key)


def by_step(directory, kind, key):
    """Responses by the end of each step, counted from the groups begun, and the mean of the step's values."""
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    total, points = 0, []
    for rollout in (line for line in logged if line["kind"] == "rollout"):
        total += RESPONSES * rollout["rollout/admitted"]
        here = [line[key] for line in logged if (line["kind"], line["step"]) == (kind, rollout["step"])]
        points += [(total, np.mean(here))] if here else []
    return np.array(points).T


def test_the_keyboard_switches_every_curve_and_nothing_else(opened, report):
    page = opened(report)
    before = {panel["id"]: plot(page, panel["id"], "plot.data") for panel in panels(page)}
    page.locator(".axis input[value=updates]").focus()
    place = page.evaluate("scrollY")
    redrawn(page, lambda: page.keyboard.press("ArrowRight"))
    assert page.url.endswith("#x=responses")
    assert page.evaluate("[document.activeElement.value, scrollY]") == ["responses", place]
    for panel in panels(page):
        curve = panel["kind"] == "curves"
        assert (plot(page, panel["id"], TITLE) == "sampled responses") == curve
        assert (plot(page, panel["id"], "plot.data") != before[panel["id"]]) == curve
    redrawn(page, lambda: page.keyboard.press("ArrowLeft"))
    assert {name: plot(page, name, "plot.data") for name in before} == before
    redrawn(page, page.go_back)
    assert page.locator(".axis input:checked").get_attribute("value") == "responses"


@pytest.mark.parametrize(
    ("arm", "kind", "key"),
    [
        ("reuse-4/bapo", "update", "grad_norm"),
        ("reuse-4/clip_higher", "update", "entropy"),  # a step without an update
        ("reuse-4/bapo", "rollout", "reward"),
    ],
)
def test_updates_of_a_step_share_the_responses_sampled_by_then(page, arm, kind, key):
    setting, objective = arm.split("/")
    curve = next(c for c in plot(page, name_of(page, key), BOLD) if c["name"] == f"{objective} · {setting}")
    x, y = by_step(COMPARED / arm / "seed-0", kind, key)
    assert curve["x"] == list(x)
    assert curve["y"] == pytest.approx(y, rel=1e-5)


def test_evaluations_are_placed_after_their_step(page):
    name = name_of(page, "eval/avg")
    curve = next(c for c in plot(page, name, BOLD) if c["name"] == "bapo · reuse-4")
    assert curve["x"] == [0, 60]  # before and after training; 4 + 5 + 6 groups of 4
    hollow = next(c for c in plot(page, name, HOLLOW) if c["name"] == "bapo · reuse-4")
    assert hollow["x"] == [16, 36]  # in between, on one problem instead of four


@pytest.mark.parametrize("window", [1, 3])
def test_seeds_are_averaged_at_equal_numbers_of_responses(page, window):
    redrawn(page, lambda: page.locator(".smooth input").fill(str(window)))
    name = name_of(page, "grad_norm")
    curve = next(c for c in plot(page, name, BOLD) if c["name"] == "grpo · reuse-2")
    seeds = [by_step(COMPARED / "reuse-2/grpo" / f"seed-{seed}", "update", "grad_norm") for seed in (0, 1)]
    assert [list(x) for x, _ in seeds] == [[16, 36, 56], [16, 36, 60]]
    assert curve["x"] == [16, 36, 56]  # the mean ends where the first seed ends
    near = (lambda y: [(y[0] + y[1]) / 2, sum(y) / 3, (y[1] + y[2]) / 2]) if window == 3 else list
    smoothed = [(x, near(y)) for x, y in seeds]
    assert curve["y"] == pytest.approx(np.mean([np.interp(curve["x"], x, y) for x, y in smoothed], axis=0), rel=1e-5)
    shown = [(thin["x"], pytest.approx(thin["y"], rel=1e-5)) for thin in plot(page, name, THIN)]
    assert all((list(x), list(y)) in shown for x, y in seeds)  # a thin line goes on to the end of its seed, unsmoothed
    redrawn(page, lambda: page.locator(".smooth input").fill("1"))


def test_the_mean_over_seeds_by_hand(page):
    def over(counts, runs):
        return page.evaluate("([counts, runs]) => lines.drawn({ runs }, 1, counts)", [counts, runs])

    three = over([[10, 10, 20, 40], [10, 20, 30, 60], [5, 15, 16, 17]], [[1, 3, 4, 8], [0, 10, None, 30], [None] * 4])
    # the first seed is (10, 2), (20, 4), (40, 8), the second (10, 0), (20, 10), (60, 30), and the third has no value
    assert [seed["x"] for seed in three["seeds"]] == [[10, 20, 40], [10, 20, 60]]
    assert (three["x"], three["mean"]) == ([10, 20, 40], [1, 7, 14])  # at 40 the second seed is at 20
    assert (three["low"], three["high"]) == ([0, 4, 8], [2, 10, 20])
    between = over([[0, 10, 30], [0, 20, 40]], [[0, 10, 30], [5, 5, 5]])
    assert (between["x"], between["mean"]) == ([0, 15, 30], [2.5, 10, 17.5])  # 15 is the mean of 10 and 20
    apart = over([[10, 20], [30, 40]], [[1, 2], [3, 4]])
    assert (apart["x"], apart["mean"]) == ([], [])  # no number of responses that both have
    assert over([[None]], [[1]])["seeds"] == []


def test_the_address_keeps_the_choice_and_the_contents_do_not_change_it(page):
    assert plot(page, name_of(page, "grad_norm"), TITLE) == "sampled responses"
    page.get_by_role("link", name="Clip bounds over time").click()
    page.wait_for_url("**#bounds")
    for _ in ("dark", "light"):
        redrawn(page, lambda: page.locator("#theme").click())
    assert plot(page, name_of(page, "grad_norm"), TITLE) == "sampled responses"
    assert page.locator(".axis input:checked").get_attribute("value") == "responses"


def test_arms_without_counts_are_named_and_stay_over_updates(opened, tmp_path):
    grid = shutil.copytree(COMPARED, tmp_path / "grid")

    def forget(run):
        text = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(text.replace("rollout/finished_groups", "rollout/groups"))

    forget(grid / "reuse-4/bapo/seed-0")
    write_report([grid], tmp_path / "report.html")
    page = opened((tmp_path / "report.html").as_uri())
    name = name_of(page, "grad_norm")
    assert len(plot(page, name, BOLD)) == 6
    assert not page.locator("#uncounted").is_visible()
    redrawn(page, lambda: page.get_by_text("sampled responses", exact=True).first.click())
    assert [curve["name"] for curve in plot(page, name, BOLD)] == [
        *("bapo · reuse-2", "grpo · reuse-2", "bapo · partial", "clip_higher · reuse-4", "push-once · reuse-4")
    ]
    assert page.locator("#uncounted").inner_text().endswith("only drawn over updates: bapo · reuse-4.")
    write_report([grid / "reuse-4/bapo"], tmp_path / "old.html")
    old = opened(f"{(tmp_path / 'old.html').as_uri()}#x=responses")
    assert old.locator(".axis").count() == 0
    assert plot(old, name_of(old, "grad_norm"), TITLE) == "update"
