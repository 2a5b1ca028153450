"""Diagnose: numbers equal those of the core called directly, every problem is found where it is and only there."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo import ClipSettings, policy_loss
from bapo.core.bounds import StopReason, solve_bounds
from bapo.core.entropy_rule import positive_share
from bapo.core.objectives import OBJECTIVES
from bapo.diagnose.diagnosis import as_json, diagnose
from bapo.diagnose.dumps import Dump, LoggedUpdate, read_dump
from bapo.diagnose.measure import SETTINGS, Fate, Signal, measure, total
from bapo.diagnose.problems import REMARKS, SERIOUS, find_problems
from bapo.diagnose.tables import bounds, print_diagnosis
from tests.processes import bapo, script

EXAMPLES = Path(__file__).parents[3] / "examples"


def softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def batch(drift=0.2, temperature=1.0, longer=1.0, top=None, responses=128, seed=0, positives=0.5):
    """A clean update: tokens really sampled from the behaviour policy, a learner that has drifted from it at random.

    `temperature` and `top` (keep only that many tokens) change how tokens are sampled, not what is logged.
    """
    random = np.random.default_rng(seed)
    sampler = random.normal(0, 2, (300, 24))
    right = np.arange(responses) < positives * responses
    advantages = np.where(right, 1.0, -1.0)
    advantages = advantages - advantages.mean()
    lengths = random.poisson(np.where(right, 40, 40 * longer)).clip(20)
    ids = np.repeat(np.arange(responses), lengths)
    state = random.integers(0, len(sampler), len(ids))
    used = sampler / temperature
    if top is not None:
        used = np.where(used >= np.sort(used)[:, [-top]], used, -np.inf)
    token = (softmax(used)[state] + random.gumbel(size=(len(ids), sampler.shape[1]))).argmax(-1)
    learner = softmax(sampler + random.normal(0, drift, sampler.shape))
    return LoggedUpdate(
        name="1",
        logprobs=learner[state, token].astype(np.float32),
        behavior_logprobs=softmax(sampler)[state, token].astype(np.float32),
        advantages=advantages[ids].astype(np.float32),
        sequence_ids=ids,
        entropy=-(np.exp(learner) * learner).sum(-1)[state].astype(np.float32),
        anchor=(softmax(sampler)[state, token] + random.normal(0, 0.004, len(ids))).astype(np.float32),
        staleness=np.ones(len(ids), dtype=np.int64),
        rewards=right.astype(np.float64),
    )


CLEAN = batch()


def tensors(update):
    mask = torch.ones(len(update.logprobs), dtype=torch.bool)
    named = (update.logprobs, update.behavior_logprobs, update.advantages)
    return *(torch.from_numpy(values) for values in named), mask


def names(update):
    return {finding.name for finding in find_problems([update])}


def changed(update, name, here, value):
    """The update with some values of one array replaced."""
    values = getattr(update, name).copy()
    values[here] = value
    return replace(update, **{name: values})


def only(update, count):
    """The first `count` responses."""
    keep = update.sequence_ids < count
    arrays = ("logprobs", "behavior_logprobs", "advantages", "sequence_ids", "entropy", "anchor", "staleness")
    return replace(update, **{name: getattr(update, name)[keep] for name in arrays}, rewards=update.rewards[:count])


def test_fates_are_those_of_policy_loss():
    numbers = measure(CLEAN)
    ids = torch.from_numpy(CLEAN.sequence_ids)
    assert set(numbers.fates) == {*OBJECTIVES, *SETTINGS} - {"push_once", "brake"}  # which need uses
    for name, fate in numbers.fates.items():
        objective = "bapo" if name in SETTINGS else name
        out = policy_loss(*tensors(CLEAN), objective=objective, settings=SETTINGS.get(name), sequence_ids=ids)
        keys = ("clip_fraction", "clip_fraction_positive", "clip_fraction_negative")
        assert fate.clipped == pytest.approx([float(out.metrics[key]) for key in keys])
        if out.bounds is not None and objective != "dual_clip":
            logprobs, behavior, advantages, _ = tensors(CLEAN)
            pair = out.bounds.low, out.bounds.high
            share = positive_share((logprobs - behavior).exp(), advantages, *pair, "gradient")
            assert fate.gradient.share == pytest.approx(float(share), abs=1e-6)


def test_bounds_are_those_of_the_solver():
    logprobs, behavior, advantages, mask = tensors(batch(drift=0.4, longer=2.0))
    numbers = measure(batch(drift=0.4, longer=2.0))
    stops = set()
    for name, settings in SETTINGS.items():
        expected = solve_bounds((logprobs - behavior).exp(), advantages, mask, settings)
        (found,) = numbers.bounds[name]
        assert (found.low, found.high) == (float(expected.low), float(expected.high))
        assert found.stop == StopReason(int(expected.stop)).name
        assert found.share_at_start == pytest.approx(float(expected.share_at_start))
        stops.add(found.stop)
    assert len(stops) > 1


@pytest.mark.parametrize("measured", ["gradient", "surrogate"])
def test_shares_are_those_of_the_core(measured):
    numbers = measure(CLEAN)
    logprobs, behavior, advantages, _ = tensors(CLEAN)
    for label, pair in {"unclipped": (-1.0, torch.inf), "(0.8, 1.2)": (0.8, 1.2), "(0.8, 1.28)": (0.8, 1.28)}.items():
        expected = positive_share((logprobs - behavior).exp(), advantages, *pair, measured)
        assert numbers.shares[measured][label].share == pytest.approx(float(expected), abs=1e-6)


def test_a_batch_by_hand():
    # Ratios 2, 1 (positive) and 0.5, 1 (negative), advantages 1 and -1; responses of two tokens each.
    logprobs = np.log([0.5, 0.25, 0.1, 0.25])
    behavior = np.log([0.25, 0.25, 0.2, 0.25])
    update = LoggedUpdate("x", logprobs, behavior, np.array([1.0, 1, -1, -1]), np.array([0, 0, 1, 1]))
    numbers = measure(update)
    assert numbers.shares["gradient"]["unclipped"].share == pytest.approx(3 / 4.5)
    assert numbers.shares["gradient"]["(0.8, 1.2)"].share == pytest.approx(0.5)
    assert numbers.shares["surrogate"]["(0.8, 1.2)"].share == pytest.approx(2.2 / 4.0)
    assert numbers.sequence_mean.share == pytest.approx(3 / 4.5)
    assert numbers.fates["grpo"] == Fate(Signal(2, 2), Signal(1, 1), Signal(1.0, 1.0))
    # P_i, N_i = (3, 0), (0, 1.5); residuals 3 - 2 and 0 - 1; sqrt(2 (1 + 1)) / 4.5
    assert numbers.share_error == pytest.approx(2 / 4.5)
    assert numbers.ratios["ess"] == pytest.approx(4.5**2 / (4 * 6.25))
    assert numbers.ratios["wide"] == 0.5
    assert numbers.quadrants is numbers.staleness is numbers.mismatch is None


def test_totals_are_over_all_tokens():
    first, second = only(batch(seed=1), 64), only(batch(seed=2, drift=0.4), 96)
    joined = replace(
        first,
        **{
            name: np.concatenate([getattr(first, name), getattr(second, name)])
            for name in ("logprobs", "behavior_logprobs", "advantages", "entropy", "anchor", "staleness", "rewards")
        },
        sequence_ids=np.concatenate([first.sequence_ids, second.sequence_ids + 64]),
    )
    both, once = total([measure(first), measure(second)]), measure(joined)
    assert (both.tokens, both.sequences, both.updates) == (once.tokens, 160, 2)
    assert both.ratios == pytest.approx(once.ratios)
    assert both.lengths == pytest.approx(once.lengths)
    assert both.mismatch == pytest.approx(once.mismatch)
    assert both.staleness == once.staleness
    assert both.entropy == pytest.approx(once.entropy)
    for label, signal in both.shares["gradient"].items():
        assert signal.share == pytest.approx(once.shares["gradient"][label].share)
    for name in ("grpo", "clip_higher", "gspo", "topr"):  # not those that look at a whole update
        assert both.fates[name].clipped == pytest.approx(once.fates[name].clipped)
        assert both.fates[name].gradient.share == pytest.approx(once.fates[name].gradient.share, abs=1e-6)
    assert len(both.bounds["bapo"]) == 2


def test_without_responses_there_is_less():
    numbers = measure(replace(CLEAN, sequence_ids=None, rewards=None))
    assert numbers.sequences is numbers.sequence_mean is numbers.share_error is None
    assert not {"gspo", "topr"} & set(numbers.fates)
    assert numbers.lengths == {}


@pytest.mark.parametrize("drift", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("longer", [1.0, 3.0])
def test_nothing_is_wrong_with_a_clean_batch(drift, longer):
    assert names(batch(drift=drift, longer=longer, seed=3)) == set()


TOKENS = np.arange(len(CLEAN.logprobs))
TAIL = np.concatenate([np.flatnonzero(CLEAN.sequence_ids == one)[-18:] for one in range(20)])
FEW = TOKENS % 200 == 0
ROUNDED = (CLEAN.logprobs.view(np.uint32) & 0xFFFF0000).view(np.float32)
BROKEN = {
    "no_tokens": only(CLEAN, 0),
    "not_finite": changed(CLEAN, "behavior_logprobs", slice(5, 7), -np.inf),
    "above_zero": replace(CLEAN, logprobs=-CLEAN.logprobs),
    "same_logprobs": replace(CLEAN, logprobs=CLEAN.behavior_logprobs),
    "coarse": replace(CLEAN, logprobs=ROUNDED),
    "shifted": replace(CLEAN, behavior_logprobs=np.roll(CLEAN.behavior_logprobs, 1)),
    "temperature": replace(CLEAN, behavior_logprobs=CLEAN.behavior_logprobs / 0.6),
    "mean_ratio": replace(CLEAN, behavior_logprobs=CLEAN.behavior_logprobs + np.float32(np.log(0.93))),
    "other_sampling": batch(temperature=0.6),
    "unmasked_padding": changed(changed(CLEAN, "logprobs", TAIL, 0.0), "behavior_logprobs", TAIL, 0.0),
    "two_kinds": changed(batch(drift=0.05), "behavior_logprobs", FEW, -12.0),
    "low_ess": batch(drift=1.5),
    "no_signal": replace(CLEAN, advantages=CLEAN.advantages * 0),
    "one_sign": replace(CLEAN, advantages=np.abs(CLEAN.advantages)),
    "off_centre": replace(CLEAN, advantages=CLEAN.advantages + np.float32(0.7)),
    "idle_responses": changed(CLEAN, "advantages", CLEAN.sequence_ids % 3 == 0, 0.0),
    "varying_advantages": changed(CLEAN, "advantages", FEW, 0.5),
    "engine_mismatch": replace(CLEAN, anchor=CLEAN.anchor + 0.15 * np.sin(TOKENS).astype(np.float32)),
    "fresh_mismatch": replace(CLEAN, fresh=CLEAN.sequence_ids % 2 == 0),
    "copied_anchor": replace(CLEAN, anchor=CLEAN.behavior_logprobs),
    "future_versions": changed(CLEAN, "staleness", FEW, -1),
    "few_responses": replace(only(batch(seed=9, positives=0.25), 63)),
}


def test_every_problem_has_a_case():
    assert set(BROKEN) == {check.__name__ for check in SERIOUS | REMARKS}


@pytest.mark.parametrize("name", BROKEN)
def test_problems_are_found(name):
    (found,) = (finding for finding in find_problems([BROKEN[name], CLEAN]) if finding.name == name)
    assert found.evidence
    assert found.action
    assert found.updates == [BROKEN[name].name]


def test_problems_of_updates_with_one_name_are_all_counted():
    updates = [BROKEN["one_sign"], CLEAN, BROKEN["one_sign"]]
    assert len({update.name for update in updates}) == 1
    (found,) = (finding for finding in find_problems(updates) if finding.name == "one_sign")
    assert found.updates == ["1", "1"]


def test_truncated_sampling_cannot_pass_for_the_whole_distribution():
    # Only the top 4 tokens are sampled, and the engine reports their log-probs renormalised, the trainer does not.
    update = batch(top=4, drift=0.02)
    kept = update.behavior_logprobs - np.float32(np.log(0.9))
    assert "mean_ratio" in names(replace(update, behavior_logprobs=kept))
    assert "other_sampling" in names(update)


def test_truncation_that_the_dump_knows_of_is_not_accused():
    whole = batch(top=4, drift=0.0)
    log_kept = np.full_like(whole.logprobs, np.log(0.85))
    update = replace(whole, behavior_logprobs=whole.behavior_logprobs - log_kept, fresh=whole.staleness == 1)
    wrong = {"mean_ratio", "engine_mismatch", "fresh_mismatch"}
    assert wrong <= names(update)
    assert not (wrong | {"other_sampling"}) & names(replace(update, log_kept=log_kept))


def test_the_mean_ratio_accuses_nobody_whose_learner_is_far_away():
    def with_offset(drift):
        update = batch(drift=drift)
        return replace(update, behavior_logprobs=update.behavior_logprobs + np.float32(np.log(0.95)))

    assert "mean_ratio" in names(with_offset(0.1))
    assert "mean_ratio" not in names(with_offset(0.6))


def test_shift_in_the_other_direction():
    assert (
        "one token ahead"
        in find_problems([replace(CLEAN, behavior_logprobs=np.roll(CLEAN.behavior_logprobs, -1))])[0].evidence
    )
    assert "one token behind" in find_problems([BROKEN["shifted"]])[0].evidence


def test_temperature_is_named():
    (found,) = (p for p in find_problems([BROKEN["temperature"]]) if p.name == "temperature")
    assert re.search(r"sampled at 0\.(5|6)\d* times the temperature", found.evidence)


def test_bad_tokens_are_left_out_of_the_numbers():
    broken = changed(CLEAN, "advantages", slice(0, 10), np.nan)
    assert measure(broken).tokens == len(CLEAN.logprobs) - 10
    assert measure(BROKEN["above_zero"]) is None
    diagnosis = diagnose(Dump([BROKEN["above_zero"]], {"behavior_logprobs": "behavior_logprobs"}))
    assert "No token is usable" in said(diagnosis)
    assert as_json(diagnosis)["overall"] is None


def said(diagnosis):
    """Headline and advice."""
    return " ".join([diagnosis.headline.text, *diagnosis.advice])


def advice(*updates):
    return said(diagnose(Dump(list(updates), {"behavior_logprobs": "behavior_logprobs"})))


def test_advice_on_entropy_counts_both_quadrants_of_each_side():
    """The gradient raises entropy on improbable good tokens and on probable bad ones."""
    update = batch(drift=0.4, longer=2.0)
    expected = []
    for objective in ("grpo", "bapo"):
        masses = measure(update).quadrants[objective]
        for sides in (("low_prob_high_adv", "high_prob_low_adv"), ("high_prob_high_adv", "low_prob_low_adv")):
            blocked = sum(masses[f"{side}_blocked"] for side in sides)
            expected.append(f"{blocked / (blocked + sum(masses[f'{side}_retained'] for side in sides)):.1%}")
    assert len(set(expected)) == 4
    text = advice(update)
    assert re.findall(r"[\d.]+%", text[text.index("Entropy-Clip Rule") :])[:4] == expected


@pytest.mark.parametrize(
    ("update", "parts"),
    [
        (batch(drift=0.3), ["A fixed clip will do", "bounds would stay where", "Do not use the `paper` preset"]),
        (
            batch(drift=0.01, longer=3.0),
            [
                "BAPO's bounds cannot repair the balance",
                "0.0% of ratios lie outside",
                "3.0 times as long",
                "sequence_mean",
            ],
        ),
        (
            batch(drift=0.4, longer=2.0),
            ["BAPO, with ClipSettings(), would move", "in 1 of 1 updates", "that raises entropy"],
        ),
        (BROKEN["low_ess"], ["the effective sample size is 0.", "Reduce staleness: the KL is"]),
        (BROKEN["same_logprobs"], ["Every ratio is 1, so no clip does anything here"]),
        (BROKEN["no_signal"], ["No token has an advantage"]),
        (BROKEN["temperature"], ["Something cannot be right (temperature, engine_mismatch). First repair these"]),
        (only(batch(drift=0.4), 16), ["With 16 responses per update", "the share is known to ±"]),
    ],
)
def test_advice_fits_the_case(update, parts):
    text = advice(update)
    for part in parts:
        assert part in text
    cases = (
        "A fixed clip will do",
        "cannot repair the balance",
        "BAPO, with",
        "Every ratio is 1",
        "No token has",
    )
    assert sum(case in text for case in cases) == 1


SILENT = replace(CLEAN, name="silent", advantages=CLEAN.advantages * 0)


@pytest.mark.parametrize("update", [batch(drift=0.4, longer=2.0), batch(drift=0.01, longer=3.0), batch(drift=0.3)])
@pytest.mark.parametrize("silent", [1, 4])
def test_updates_without_a_signal_have_no_say(update, silent):
    """Their share is 1 by definition: counted, they would make every clip look balanced."""
    alone, among = (
        diagnose(Dump(list(u), {"behavior_logprobs": "q"})) for u in ([update], [update] + [SILENT] * silent)
    )
    case = ("BAPO, with", "cannot repair the balance", "A fixed clip will do")
    assert [text in said(alone) for text in case] == [text in said(among) for text in case]
    for name, searched in alone.overall.bounds.items():
        assert among.overall.searched(name) == searched
        assert among.overall.stops(name) == alone.overall.stops(name) | {"NO_SIGNAL": silent}
    rows = [bounds(diagnosis.overall).rows for diagnosis in (alone, among)]
    assert [row[:-1] for row in rows[0]] == [row[:-1] for row in rows[1]]
    assert all(row[-1].endswith(f", {silent} no signal") for row in rows[1])


def test_counts_are_of_the_updates_with_a_signal():
    text = advice(batch(drift=0.4, longer=2.0), SILENT, SILENT)
    assert "in 1 of 1 updates with a signal" in text
    assert bounds(measure(SILENT)).rows[0][2:] == ["no signal"] * 4 + ["1 no signal"]


def test_a_few_ratios_that_are_not_one_are_seen():
    """Two tokens in three hundred move neither the first percentile nor the largest ratio."""
    few = TOKENS % 150 == 0
    update = changed(BROKEN["same_logprobs"], "logprobs", few, BROKEN["same_logprobs"].logprobs[few] - 1)
    assert measure(update).ratios["ratio_p01"] == measure(update).ratios["ratio_max"] == 1
    assert "Every ratio is 1" not in advice(update)


def test_advice_is_short_and_says_what_the_numbers_say():
    update = batch(drift=0.4, longer=2.0)
    out = policy_loss(*tensors(update), settings=ClipSettings())
    assert f"({float(out.bounds.low):.2f}, {float(out.bounds.high):.2f})" in advice(update)
    for one in [CLEAN, update, *BROKEN.values()]:
        assert 1 <= len(diagnose(Dump([one, CLEAN], {"behavior_logprobs": "old_log_probs"})).advice) <= 10


def test_what_is_not_known_is_said():
    bare = replace(CLEAN, entropy=None, staleness=None, rewards=None, sequence_ids=None, anchor=None)
    unknown = " ".join(diagnose(Dump([bare], {"behavior_logprobs": "old_log_probs"})).unknown)
    said = ("recomputed old_log_probs", "log entropies", "log staleness", "log uses", "log rewards", "log sequence_ids")
    for part in said:
        assert part in unknown
    complete = replace(CLEAN, uses=CLEAN.staleness)
    (parts,) = diagnose(Dump([complete], {"behavior_logprobs": "rollout_log_probs"})).unknown
    assert "without an `update` number" in parts
    numbered = {"behavior_logprobs": "rollout_log_probs", "update": "global_steps"}
    assert diagnose(Dump([complete], numbered)).unknown == []


def test_text_needs_no_letters_that_a_stream_lacks(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    print_diagnosis(diagnose(Dump([replace(CLEAN, name="é")], {"behavior_logprobs": "é\x1b[2J"})))
    stream.seek(0)
    text = stream.read()
    assert "behavior_logprobs = ??[2J" in text
    for part in ("Recommendation", "Positive share", "gspo", "Entropy-Clip quadrants", "Engine against trainer"):
        assert part in text


def test_command(tmp_path):
    assert script(EXAMPLES / "make_dump.py", tmp_path / "dump", "--names", "verl").returncode == 0
    done = bapo("diagnose", tmp_path / "dump", "--html", tmp_path / "a.html", "--json", tmp_path / "a.json")
    assert (done.returncode, done.stderr) == (0, "")
    printed = " ".join(done.stdout.split())
    assert "read as logprobs = log_prob, behavior_logprobs = rollout_log_probs" in printed
    assert "update = global_steps" in printed
    assert "without an `update` number" not in done.stdout
    assert "What this dump cannot tell" not in done.stdout + (tmp_path / "a.html").read_text()
    assert "Problems: none found" in done.stdout
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    result = json.loads((tmp_path / "a.json").read_text())
    assert [update["name"] for update in result["updates"]] == ["0", "1", "2", "3"]
    (update,) = read_dump([tmp_path / "dump" / "update_3.safetensors"]).updates
    expected = policy_loss(*tensors(update), objective="grpo").metrics["clip_fraction"]
    assert result["updates"][3]["objectives"]["grpo"]["clip_fraction"] == pytest.approx(float(expected))


def test_command_refuses_with_a_reason(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    for arguments, part in (
        ([tmp_path / "a.npz"], "It has: x [3]"),
        ([tmp_path / "a.npz", "--map", "logprobs"], "--map logprobs must have the form"),
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path / "a.npz", "--html", tmp_path / "no" / "a.html"], "is not a directory"),
        ([], "DUMP"),
    ):
        done = bapo("diagnose", *arguments)
        assert done.returncode == 2
        assert part in done.stderr + done.stdout
        assert "Traceback" not in done.stderr
