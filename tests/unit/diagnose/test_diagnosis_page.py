"""The page of a diagnosis: its headline fits the case, its charts hold the numbers, and it loads nothing."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from bapo.diagnose.diagnosis import as_json, diagnose
from bapo.diagnose.diagnosis_page import RULES, charts, html_page
from bapo.diagnose.dumps import Dump
from bapo.diagnose.measure import SETTINGS, measure
from tests.unit.diagnose.test_diagnosis import CLEAN, batch, changed

COLUMNS = {"behavior_logprobs": "rollout_log_probs"}


def diagnosed(*updates):
    return diagnose(Dump([replace(update, name=str(place)) for place, update in enumerate(updates)], COLUMNS))


def again(update):
    """The same tokens in a second use, further from the sampler."""
    return replace(update, uses=np.ones(len(update.logprobs), dtype=np.int64))


FAR = batch(drift=0.4, longer=2.0)


@pytest.mark.parametrize(
    ("update", "text", "tone"),
    [
        (changed(CLEAN, "logprobs", slice(0, 50), 0.5), r"^Something cannot be right \(above_zero\)", "wrong"),
        (replace(CLEAN, advantages=np.zeros_like(CLEAN.advantages)), "^No token has an advantage", "wrong"),
        (replace(CLEAN, logprobs=CLEAN.behavior_logprobs), "^Every ratio is 1", "open"),
        (batch(drift=1.5), "^The data is too stale for any clip: the effective sample size is 0", "wrong"),
        (CLEAN, r"^A fixed clip will do: positive tokens hold 0\.\d\d of the gradient at \(0.8, 1.2\)", "decided"),
        (batch(drift=0.01, longer=2.0), r"^BAPO's bounds cannot repair the balance: .* gets it to 0\.\d\d", "open"),
        (
            FAR,
            r"^BAPO, with ClipSettings\(\), would move the positive share .* from 0\.\d\d to 0\.\d\d, with",
            "decided",
        ),
    ],
)
def test_the_headline_fits_the_case(update, text, tone):
    result = diagnosed(update)
    assert re.search(text, result.headline.text)
    assert result.headline.tone == tone
    assert as_json(result)["headline"] == result.headline.text
    assert "ush once" not in result.headline.text  # uses are not known


def test_the_headline_says_what_rules_of_used_tokens_would_do():
    """Their shares come from the same sums as the tables."""
    result = diagnosed(again(FAR))
    plain = as_json(result)["overall"]
    share, brake, once = (plain["objectives"][name]["share"] for name in ("grpo", "brake", "push_once"))
    kept = plain["uses"]["later"]
    assert result.headline.text == (
        f"The brake would move the positive share of the gradient from {share:.2f} to {brake:.2f} and keep "
        f"{kept['brake']:.0%} of the used negative tokens. Push once would keep {kept['push_once']:.0%} of them, and "
        f"move it to {once:.2f}."
    )
    assert any(line.startswith("BAPO, with ClipSettings(), would move") for line in result.advice)
    still = diagnosed(again(batch(drift=0.3, seed=4)))  # at its target without BAPO
    assert "BAPO's bounds would stay where they start." in " ".join(still.advice)
    fresh = diagnosed(replace(FAR, uses=np.zeros(len(FAR.logprobs), dtype=np.int64)))
    assert "ush once" not in fresh.headline.text


def test_curves_are_the_shares_and_bounds_of_every_update():
    updates = [again(batch(drift=drift, longer=2.0, seed=seed)) for seed, drift in enumerate((0.1, 0.3, 0.4))]
    result = diagnosed(*updates)
    share, upper, lower = charts(result)["figures"][0]["panels"]
    drawn = {RULES[series["arm"]]: series["runs"][0] for series in share["series"]}
    assert list(drawn) == ["unclipped", "(0.8, 1.2)", "brake", "push once", "bapo"]
    for name, fate in {"(0.8, 1.2)": "grpo", "push once": "push_once", "brake": "brake", "bapo": "bapo"}.items():
        assert drawn[name] == pytest.approx(
            [numbers.fates[fate].gradient.share for numbers in result.updates], rel=1e-5
        )
    for panel, side in ((upper, "high"), (lower, "low")):
        bounds = {RULES[series["arm"]]: series["runs"][0] for series in panel["series"]}
        assert set(bounds) == set(SETTINGS)
        for rule, values in bounds.items():
            assert values == pytest.approx([getattr(n.bounds[rule][0], side) for n in result.updates], rel=1e-5)
    assert [tick["text"] for tick in share["ticks"]] == ["0", "1", "2"]


def test_updates_without_a_signal_leave_a_gap():
    silent = replace(CLEAN, advantages=np.zeros_like(CLEAN.advantages))
    share, upper, _ = charts(diagnosed(CLEAN, silent, CLEAN))["figures"][0]["panels"]
    for panel in (share, upper):
        assert all([value is None for value in series["runs"][0]] == [False, True, False] for series in panel["series"])


def test_one_update_has_bars_and_ranges():
    result = diagnosed(FAR)
    share, ranges = charts(result)["figures"][0]["panels"]
    assert {row["name"]: row["value"] for row in share["rows"]}["(0.8, 1.2)"] == pytest.approx(
        measure(FAR).fates["grpo"].gradient.share, rel=1e-5
    )
    (chosen,) = measure(FAR).bounds["bapo"]
    found = {row["name"]: (row["low"], row["high"]) for row in ranges["rows"]}
    assert found["bapo"] == pytest.approx((chosen.low, chosen.high))
    assert found["(0.8, 1.2)"] == (0.8, 1.2)


def test_kept_and_blocked_tokens_are_shares_of_all_by_side():
    result = diagnosed(FAR, CLEAN)
    (panel,) = charts(result)["figures"][1]["panels"]
    assert [row["name"] for row in panel["rows"]] == list(result.overall.fates)
    for row in panel["rows"]:
        fate = result.overall.fates[row["name"]]
        kept_negative, blocked_negative, kept_positive, blocked_positive = row["parts"]
        assert sum(row["parts"]) == pytest.approx(1, abs=1e-5)
        whole = fate.tokens.positive + fate.tokens.negative
        assert kept_negative + blocked_negative == pytest.approx(fate.tokens.negative / whole, abs=1e-5)
        assert blocked_negative == pytest.approx(fate.clipped[2] * fate.tokens.negative / whole, abs=1e-5)
        assert blocked_positive == pytest.approx(fate.clipped[1] * fate.tokens.positive / whole, abs=1e-5)
        assert kept_positive >= 0


def test_nothing_to_draw_is_no_chart():
    nothing = replace(CLEAN, advantages=np.full_like(CLEAN.advantages, np.nan))
    result = diagnosed(nothing)
    assert charts(result)["figures"] == []
    assert result.headline.tone == "wrong"
    assert "No token is usable" in html_page(result)


def test_page_loads_nothing_and_escapes_names():
    wicked = replace(CLEAN, name="<script>alert(1)</script>")
    page = html_page(diagnose(Dump([wicked, changed(wicked, "advantages", 0, np.nan)], {"behavior_logprobs": "<b>"})))
    markup = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|//|@import|url\(|src=|<script", markup)
    assert re.findall(r"href=\S+", markup) == ['href="data:,">']
    assert "alert(1)</script>" not in page
    assert "&lt;script&gt;" in markup
    assert "connect-src 'none'" in markup
    assert 'name="viewport"' in markup
    assert markup.count("<svg") == markup.count("</svg>") > 10
    values = json.loads(re.search(r'id="values">(.*?)</script>', page, re.DOTALL)[1])
    assert len(values["figures"]) == 2
