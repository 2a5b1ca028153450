"""Uses in a diagnosis: what their rules would do equals a loop and the core; reuse is recognised, and never made up."""

import io
import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo import policy_loss
from bapo.diagnose.diagnosis import as_json, diagnose
from bapo.diagnose.diagnosis_page import html_page
from bapo.diagnose.dumps import Dump, LoggedUpdate, read_dump
from bapo.diagnose.measure import measure, total
from bapo.diagnose.tables import parts, print_diagnosis, rules_of_used, uses
from bapo.diagnose.uses import UNKNOWN, Pushes, first, joined, later, of_uses, pushes_by_use, recognise, with_uses
from tests.processes import bapo, script
from tests.unit.diagnose.test_diagnosis import CLEAN, EXAMPLES, batch, changed, only, tensors

OWN = {"logprobs": "log_prob", "behavior_logprobs": "rollout_log_probs"}
RECOMPUTED = {"logprobs": "log_prob", "behavior_logprobs": "old_log_prob"}
BEFORE_THE_FIRST_STEP = {"logprobs": "old_log_probs", "behavior_logprobs": "rollout_log_probs"}


def tokens(count=800, seed=0):
    """Ratios on both sides of every bound, at 1 and beyond the limit; uses known and unknown."""
    random = np.random.default_rng(seed)
    log_ratio = random.normal(0, 0.3, count)
    log_ratio[::11] = 0.0
    log_ratio[5::50], log_ratio[6::50] = 25.0, -25.0
    behavior = np.where(np.abs(log_ratio) > 20, -30.0, -random.random(count) - 2)
    advantages = random.normal(-0.2, 1, count)
    advantages[::7] = 0
    return behavior + log_ratio, behavior, advantages, random.choice([UNKNOWN, 0, 0, 1, 2, 5], count)


def by_loop(logprobs, behavior, advantages, uses, low=0.8, high=1.2):
    """The definitions, token by token."""
    found = {}
    for logprob, sampled, advantage, use in zip(logprobs, behavior, advantages, uses, strict=True):
        here = found.setdefault(int(use), dict.fromkeys((one.name for one in fields(Pushes)), 0))
        log_ratio = float(logprob) - float(sampled)
        mass = math.exp(max(-20.0, min(20.0, log_ratio))) * abs(float(advantage))
        limited, ratio = abs(log_ratio) >= 20, math.exp(max(-20.0, min(20.0, log_ratio)))
        if advantage > 0 and ratio < high and not limited:
            here["positive_gradient"] += mass
        if advantage >= 0:
            continue
        here["negative"] += 1
        here["log_ratio"] += max(-20.0, min(20.0, log_ratio))
        here["below"] += ratio < 1
        if ratio > low and not limited:
            here["gradient"] += mass
            if ratio < 1:
                here["pushed"] += 1
                here["pushed_gradient"] += mass
        if ratio > (1.0 if use > 0 else low) and not limited:
            here["kept"] += 1
            here["kept_gradient"] += mass
    return found


@pytest.mark.parametrize("seed", range(4))
def test_pushes_equal_a_loop(seed):
    given = tokens(seed=seed)
    expected = by_loop(*given)
    found = pushes_by_use(*given)
    assert set(found) == set(expected) == {UNKNOWN, 0, 1, 2, 5}
    for use, part in found.items():
        assert asdict(part) == pytest.approx(expected[use], rel=1e-12)
    assert all(part.pushed and part.kept < part.negative for part in found.values())
    (unknown,) = pushes_by_use(*given[:3], None).values()
    assert asdict(unknown) == pytest.approx(by_loop(*given[:3], np.full(len(given[0]), UNKNOWN))[UNKNOWN])


def test_pushes_by_hand():
    # Used negatives at 0.7 (blocked), 0.9 (pushed on), 1 (at the bound of push once), 1.1 (kept), a fresh one at 0.9,
    # a positive at 1.1 and one at 1.3 (blocked).
    ratio = np.array([0.7, 0.9, 1.0, 1.1, 0.9, 1.1, 1.3])
    advantages = np.array([-1, -1, -1, -2, -1, 3, 3.0])
    found = pushes_by_use(np.log(ratio) - 2, np.full(7, -2.0), advantages, np.array([1, 1, 2, 3, 0, 1, 1]))
    used, whole = later(found), of_uses(found)
    assert (used.shares["below"], used.shares["pushed"], used.shares["kept"]) == (0.5, 0.25, 0.25)
    assert used.shares["pushed_of_gradient"] == pytest.approx(0.9 / (0.9 + 1 + 2.2))
    assert used.shares["kept_of_gradient"] == pytest.approx(2.2 / (0.9 + 1 + 2.2))
    assert used.shares["log_ratio"] == pytest.approx(math.log(0.7 * 0.9 * 1.1) / 4)
    assert first(found) == Pushes(1, 1, 1, 1, *(pytest.approx(x) for x in (math.log(0.9), 0.9, 0.9, 0.9, 0.0)))
    assert whole.shares["share"] == pytest.approx(3.3 / (3.3 + 0.9 + 1 + 2.2 + 0.9))
    assert whole.shares["share_kept"] == pytest.approx(3.3 / (3.3 + 2.2 + 0.9))


def test_pushes_are_those_of_the_core():
    logprobs, behavior, advantages, used = tokens(seed=9)
    used = used.clip(min=0)
    whole = of_uses(pushes_by_use(logprobs, behavior, advantages, used))
    inputs = [torch.from_numpy(values) for values in (logprobs, behavior, advantages)]
    inputs[0].requires_grad_()
    negative, below = inputs[2] < 0, inputs[0] < inputs[1]
    shares = []
    for options, retained in (({}, whole.pushed), ({"used_low": 1.0, "uses": torch.from_numpy(used)}, whole.kept)):
        mask = torch.ones(len(used), dtype=torch.bool)
        out = policy_loss(*inputs, mask, objective="grpo", denominator=1.0, **options)
        assert retained == int((out.retained & negative & (below if not options else mask)).sum())
        (gradient,) = torch.autograd.grad(out.loss, inputs[0])
        shares.append(float(gradient[~negative].abs().sum() / gradient.abs().sum()))
    assert [whole.shares["share"], whole.shares["share_kept"]] == pytest.approx(shares)


def test_pushes_add_up():
    one, two = tokens(seed=1), tokens(300, seed=2)
    both = pushes_by_use(*map(np.concatenate, zip(one, two, strict=True)))
    added = joined([pushes_by_use(*one), pushes_by_use(*two)])
    assert list(added) == list(both)
    for use, part in added.items():
        assert asdict(part) == pytest.approx(asdict(both[use]), rel=1e-12)


def with_count(update, count):
    return replace(update, uses=np.full(len(update.logprobs), count))


def test_the_objective_is_tried_where_uses_are_known():
    assert "push_once" not in measure(CLEAN).fates
    update = replace(CLEAN, uses=np.arange(len(CLEAN.logprobs)) % 3)
    fate = measure(update).fates["push_once"]
    out = policy_loss(*tensors(update), objective="grpo", used_low=1.0, uses=torch.from_numpy(update.uses))
    keys = ("clip_fraction", "clip_fraction_positive", "clip_fraction_negative")
    assert fate.clipped == pytest.approx([float(out.metrics[key]) for key in keys])
    assert fate.gradient.share == pytest.approx(float(out.bounds.share), abs=1e-6)
    assert fate.gradient.share == pytest.approx(of_uses(measure(update).pushes).shares["share_kept"], abs=1e-6)
    fresh = measure(with_count(CLEAN, 0)).fates
    assert fresh["push_once"] == fresh["grpo"]
    both = total([measure(update), measure(with_count(CLEAN, 0))])
    assert both.fates["push_once"].blocked.negative > both.fates["grpo"].blocked.negative


def test_the_brake_is_that_of_the_core():
    update = replace(CLEAN, uses=np.arange(len(CLEAN.logprobs)) % 3)
    numbers, given = measure(update), torch.from_numpy(update.uses)
    log_ratio = (update.logprobs.astype(np.float64) - update.behavior_logprobs)[
        (update.advantages < 0) & (given > 0).numpy()
    ]
    (found,) = numbers.brakes
    assert found.drift == pytest.approx(-log_ratio.mean(), rel=1e-5)
    assert found.used_low == pytest.approx(0.8 + 0.2 * found.drift / 0.03)
    assert 0.81 < found.used_low < 0.99

    out = policy_loss(*tensors(update), objective="brake", uses=given)
    fate, whole = numbers.fates["brake"], of_uses(numbers.braked)
    assert fate.blocked.negative == whole.negative - whole.kept
    assert whole.kept == int(out.retained[tensors(update)[2] < 0].sum())
    assert fate.gradient.share == pytest.approx(whole.shares["share_kept"], abs=1e-6)
    kept = [later(pushes).kept_gradient for pushes in (numbers.braked, numbers.pushes)]
    assert later(numbers.pushes).gradient > 1.01 * kept[0] > 1.02 * kept[1]
    assert first(numbers.braked) == first(numbers.pushes)


def test_without_used_negative_tokens_there_is_no_brake():
    for update in (with_count(CLEAN, 0), with_count(replace(CLEAN, advantages=np.abs(CLEAN.advantages)), 1)):
        numbers = measure(update)
        assert numbers.brakes == []
        assert numbers.fates["brake"] == numbers.fates["grpo"]
        assert rules_of_used(numbers) is None
    numbers = measure(CLEAN)  # uses are not known
    assert numbers.brakes == []
    assert "brake" not in numbers.fates
    assert numbers.fates["brake_all"].blocked.negative > numbers.fates["grpo"].blocked.negative


def test_the_brake_of_several_updates_is_solved_in_each():
    updates = [with_count(moved(CLEAN, seed=seed), 1) for seed in range(2)] + [with_count(pushed_down(CLEAN), 2)]
    alone = [measure(update) for update in updates]
    both = total([measure(with_count(CLEAN, 0)), *alone])
    assert both.brakes == [numbers.brakes[0] for numbers in alone]
    assert both.brakes[2].used_low == 1 > both.brakes[0].used_low
    assert later(both.braked).kept == sum(of_uses(numbers.braked).kept for numbers in alone)
    brake, once = rules_of_used(both).rows
    lows = [one.used_low for one in both.brakes]
    assert brake[1] == f"{np.mean(lows):.2f} ({min(lows):.2f} to 1.00)"
    for row, pushes in ((brake, both.braked), (once, both.pushes)):
        shares = later(pushes).shares
        assert row[2:4] == [f"{shares['kept']:.1%}", f"{shares['kept_of_gradient']:.1%}"]
        assert row[4] == f"{of_uses(pushes).shares['share_kept']:.3f}"


def moved(update, drift=0.1, seed=0):
    """The learner a little further on: only its own log-probs differ."""
    random = np.random.default_rng(seed)
    return replace(update, logprobs=(update.logprobs + random.normal(0, drift, len(update.logprobs))).clip(max=0))


def some(update, chosen, name="1"):
    """The chosen responses in the chosen order, numbered anew: a mini-batch."""
    places = [np.flatnonzero(update.sequence_ids == one) for one in chosen]
    at = np.concatenate(places)
    arrays = {key: getattr(update, key)[at] for key in ("logprobs", "behavior_logprobs", "advantages")}
    return LoggedUpdate(name, **arrays, sequence_ids=np.repeat(np.arange(len(places)), [len(p) for p in places]))


def test_passes_in_mini_batches_are_recognised():
    """Three passes over 64 responses in batches that are drawn anew each time, and one batch of other responses."""
    random = np.random.default_rng(0)
    rollout, other = batch(responses=64), batch(responses=16, seed=1)
    updates, expected = [], []
    for count in range(3):
        order = random.permutation(64)
        for part in order.reshape(4, 16):
            updates.append(some(moved(rollout, seed=len(updates)), part))
            expected.append(np.full(len(updates[-1].logprobs), count))
    updates.append(some(other, range(16)))
    expected.append(np.zeros(len(updates[-1].logprobs)))
    dump, known = with_uses(Dump(updates, OWN))
    assert known.source == "inferred"
    for update, counts in zip(dump.updates, expected, strict=True):
        np.testing.assert_array_equal(update.uses, counts)
    assert "128 of 208 responses have, bit for bit" in dump.notes[0]


def test_tokens_of_responses_that_lie_mixed_up_are_put_in_order():
    one = some(CLEAN, range(8))
    order = np.argsort(np.random.default_rng(0).random(len(one.logprobs)))
    inside = np.argsort(one.sequence_ids[order], kind="stable")  # each response keeps the order of its tokens
    shuffled = np.empty_like(order)
    shuffled[inside] = np.arange(len(order))
    arrays = {name: getattr(one, name)[shuffled] for name in ("logprobs", "behavior_logprobs", "advantages")}
    mixed = replace(one, **arrays, sequence_ids=one.sequence_ids[shuffled])
    assert (np.diff(mixed.sequence_ids) != 0).sum() > 100
    assert (recognise([one, mixed]).before[1] == 1).all()


def test_reuse_is_not_made_up():
    one = some(CLEAN, range(8))
    changed_once = changed(one, "behavior_logprobs", 3, np.nextafter(one.behavior_logprobs[3], np.float32(-9)))
    before = recognise([one, changed_once]).before[1]
    assert (before == (one.sequence_ids != one.sequence_ids[3])).all()
    longer = replace(
        one,
        **{
            name: np.append(getattr(one, name), getattr(one, name)[-1])
            for name in ("logprobs", "behavior_logprobs", "advantages", "sequence_ids")
        },
    )
    assert (recognise([one, longer]).before[1][longer.sequence_ids == 7] == 0).all()
    wider = replace(one, behavior_logprobs=one.behavior_logprobs.astype(np.float64))
    assert (recognise([one, wider]).before[1] == 1).all()


def test_responses_that_chance_repeats_are_not_recognised():
    certain = np.repeat(np.arange(4), 30)
    twins = LoggedUpdate("1", *[np.tile(-np.linspace(0.001, 0.3, 30), 4)] * 2, np.ones(120), certain)
    coarse = replace(twins, behavior_logprobs=np.tile([-4.0, -8.0], 60))  # improbable, but of two values only
    for update in (twins, coarse):
        assert (np.concatenate(recognise([update, update]).before) == UNKNOWN).all()
        dump, known = with_uses(Dump([update, update], OWN))
        assert known.source == "unknown"
        assert "only 0% of the tokens are in responses that are long and uncertain enough" in known.words
        assert dump.updates[0].uses is None
    mostly = [
        replace(
            update,
            **{
                name: np.concatenate([getattr(update, name), getattr(twins, name)[:30]])
                for name in ("logprobs", "behavior_logprobs", "advantages")
            },
            sequence_ids=np.append(update.sequence_ids, np.full(30, 64)),
        )
        for update in (some(CLEAN, range(64)), some(moved(CLEAN), range(64)))
    ]
    dump, known = with_uses(Dump(mostly, OWN))
    assert known.source == "inferred"
    assert "% of the tokens are in responses too short or too certain" in known.words
    assert set(dump.updates[1].uses[:-30]) == {1}
    assert set(dump.updates[1].uses[-30:]) == {UNKNOWN}
    rows = {row[0]: row for row in uses(diagnose(Dump(mostly, OWN)).overall).rows}
    assert list(rows) == ["1", "2", "not known", "all"]
    assert rows["not known"][1] == "0"
    assert [row[-2:] == ["", ""] for row in rows.values()] == [True, True, True, False]


@pytest.mark.parametrize(
    ("updates", "columns", "said"),
    [
        ([CLEAN], OWN, "there is only one update"),
        ([replace(CLEAN, sequence_ids=None, rewards=None)] * 2, OWN, "does not say which response"),
        ([CLEAN, batch(seed=1)], RECOMPUTED, "if old_log_prob is recomputed for every update"),
        ([CLEAN, batch(seed=1)], BEFORE_THE_FIRST_STEP, "before the first step on each rollout batch"),
    ],
)
def test_where_uses_cannot_be_inferred_they_are_unknown(updates, columns, said):
    result = diagnose(Dump(updates, columns))
    assert result.uses.source == "unknown"
    assert said in " ".join(result.unknown)
    assert not re.search("Push once|brake", " ".join(result.advice))
    assert set(result.overall.pushes) == {UNKNOWN}
    plain = as_json(result)
    push_once = plain["overall"]["push_once"]
    assert (plain["uses"], set(push_once)) == ("unknown", {"share", "share_push_once", "all", "by_use"})
    assert push_once["share_push_once"] is push_once["all"]["kept"] is None
    assert push_once["all"]["pushed"] > 0.3
    assert plain["overall"]["brake"]["updates"] == []
    assert plain["overall"]["brake"]["share_brake"] is None
    table = uses(result.overall)
    assert table.title == "Negative tokens"
    assert [row[0] for row in table.rows] == ["not known"]
    assert not {"push_once", "brake"} & set(result.overall.fates)
    assert "brake_all" in result.overall.fates


@pytest.mark.parametrize("columns", [RECOMPUTED, BEFORE_THE_FIRST_STEP])
def test_a_match_settles_the_doubt(columns):
    assert with_uses(Dump([CLEAN, moved(CLEAN)], columns))[1].source == "inferred"


def test_uses_that_only_some_updates_have_are_inferred_for_all():
    dump, known = with_uses(Dump([with_count(CLEAN, 7), moved(CLEAN)], OWN))
    assert known.source == "inferred"
    assert [set(update.uses) for update in dump.updates] == [{0}, {1}]


def test_what_the_dump_says_counts_and_is_checked():
    updates = [with_count(CLEAN, 4), with_count(moved(CLEAN), 5)]  # from the middle of a run
    dump, known = with_uses(Dump(updates, OWN))
    assert (known.source, dump.notes) == ("logged", [])
    assert dump.updates == updates
    (note,) = with_uses(Dump([updates[0], with_count(CLEAN, 0)], OWN))[0].notes
    assert f"uses cannot be right: {len(CLEAN.logprobs)} tokens" in note


def test_copies_within_an_update_count_as_one_use():
    twice = some(CLEAN, [*range(64), *range(64)])
    dump, _ = with_uses(Dump([twice, twice], OWN))
    assert [set(update.uses) for update in dump.updates] == [{0}, {1}]
    assert "128 responses appear more than once within one update" in dump.notes[0]


def advice(*updates, columns=OWN):
    return " ".join(diagnose(Dump(list(updates), columns)).advice)


def pushed_down(update, by=0.1):
    """Negative tokens made less likely, as training on them does."""
    return replace(update, logprobs=np.where(update.advantages < 0, update.logprobs - by, update.logprobs))


def test_advice_on_later_uses_says_what_the_numbers_say():
    again = pushed_down(moved(CLEAN))
    result = diagnose(Dump([CLEAN, again], OWN))
    pushes, braked, (brake,) = result.overall.pushes, result.overall.braked, result.overall.brakes
    used, whole = later(pushes), of_uses(pushes)
    assert used.shares["below"] > 0.7 > 0.6 > first(pushes).shares["below"]
    text = " ".join(result.advice)
    for part in (
        f"second or later use (uses inferred), {used.shares['below']:.0%} are already less likely",
        f"in their first use, {first(pushes).shares['below']:.0%} are",
        f"pushes {used.shares['pushed']:.0%} down further, and these hold "
        f"{used.shares['pushed_of_gradient']:.0%} of the gradient",
        f"their mean of -log r, {brake.drift:.3f}, makes used_low {brake.used_low:.2f}",
        f"keep {later(braked).shares['kept']:.0%} of the negative tokens in later uses",
        f"from {whole.shares['share']:.2f} to {of_uses(braked).shares['share_kept']:.2f}",
        f"stricter: it would keep {used.shares['kept']:.0%}, those",
        f"the share would be {whole.shares['share_kept']:.2f}",
        "objective.name = 'brake'",
        "bapo_objective='brake'",
    ):
        assert part in text
    assert "inferred" not in advice(with_count(CLEAN, 0), with_count(again, 1))
    assert "in their first use" not in advice(with_count(again, 1))


@pytest.mark.parametrize(
    ("updates", "said"),
    [
        ([with_count(CLEAN, 0)], "Every token is used for the first time, so the brake and push once would change no"),
        ([CLEAN, batch(seed=1)], "No response appears in two of these updates, so the brake and push once would chan"),
        (
            [with_count(replace(CLEAN, logprobs=np.where(CLEAN.advantages < 0, CLEAN.logprobs - 2, -0.5)), 1)],
            "lets no negative token pass that was used before",
        ),
        (
            [with_count(CLEAN, 0)] * 20 + [with_count(only(CLEAN, 72), 1)],
            "Push once (used_low = 1) would change little: it blocks 0.",
        ),
    ],
)
def test_where_push_once_does_nothing_the_advice_says_so(updates, said):
    text = advice(*updates)
    assert said in text
    assert "To set the brake" not in text


@pytest.mark.parametrize(
    "update",
    [
        with_count(replace(CLEAN, advantages=np.abs(CLEAN.advantages)), 1),
        with_count(replace(CLEAN, advantages=CLEAN.advantages * 0), 1),
        with_count(replace(CLEAN, logprobs=CLEAN.behavior_logprobs), 1),
    ],
    ids=["no negative token", "no signal", "every ratio is 1"],
)
def test_where_nothing_can_be_pushed_nothing_is_said(update):
    result = diagnose(Dump([update], OWN))
    assert not re.search("ush once|brake", " ".join(result.advice))
    titles = [part.title for part in parts(result)]
    assert ("Negative tokens by use" in titles) == bool((update.advantages < 0).any())
    assert "nan" not in json.dumps(as_json(result)).lower()
    stream = io.StringIO()
    print_diagnosis(result, stream)
    assert "nan%" not in stream.getvalue() + html_page(result)


def test_bad_tokens_are_left_out():
    broken = changed(with_count(CLEAN, 1), "logprobs", slice(0, 50), np.nan)
    good = slice(50, None)
    arrays = ("logprobs", "behavior_logprobs", "advantages", "uses")
    assert measure(broken).pushes == pushes_by_use(*(getattr(broken, name)[good] for name in arrays))


def test_the_table_by_use():
    updates = [with_count(moved(CLEAN, seed=use), use) for use in range(12)]
    result = diagnose(Dump(updates, OWN))
    table = uses(result.overall)
    assert [row[0] for row in table.rows] == [*map(str, range(1, 9)), "2 or more", "all"]
    whole, used = of_uses(result.overall.pushes), later(result.overall.pushes)
    assert int(table.rows[-1][1]) == whole.negative == 12 * int((CLEAN.advantages < 0).sum())
    assert table.rows[-1][-2:] == [f"{whole.shares['share']:.3f}", f"{whole.shares['share_kept']:.3f}"]
    assert table.rows[-2][2:6] == [
        f"{used.shares['log_ratio']:+.3f}",
        *(f"{used.shares[name]:.1%}" for name in ("below", "pushed", "pushed_of_gradient")),
    ]  # fmt: skip
    (alone,) = uses(measure(with_count(CLEAN, 0))).rows
    assert (alone[0], alone[6], alone[7]) == (
        "1",
        f"{first(measure(with_count(CLEAN, 0)).pushes).shares['kept']:.1%}",
        "100.0%",
    )
    assert alone[-1] == alone[-2]


@pytest.mark.parametrize("names", ["bapo", "trl", "verl"])
def test_text_page_and_data_agree(tmp_path, names):
    assert script(EXAMPLES / "make_dump.py", tmp_path / "dump", "--names", names, "--updates", 3).returncode == 0
    done = bapo("diagnose", tmp_path / "dump", "--html", tmp_path / "a.html", "--json", tmp_path / "a.json")
    assert (done.returncode, done.stderr) == (0, "")
    page, plain = Path(tmp_path / "a.html").read_text(), json.loads(Path(tmp_path / "a.json").read_text())
    assert plain["uses"] == ("logged" if names == "bapo" else "inferred")
    dump = read_dump([tmp_path / "dump"])
    assert all((update.uses is None) == (names != "bapo") for update in dump.updates)
    expected = joined(
        [
            pushes_by_use(
                update.logprobs, update.behavior_logprobs, update.advantages, np.full(len(update.logprobs), i)
            )
            for i, update in enumerate(dump.updates)
        ]
    )
    for use, part in expected.items():
        assert plain["overall"]["push_once"]["by_use"][str(use)] == pytest.approx(asdict(part))
    used, whole = later(expected), of_uses(expected)
    found = plain["overall"]["push_once"]
    assert found["later"]["pushed"] == pytest.approx(used.shares["pushed"])
    assert [found["share"], found["share_push_once"]] == pytest.approx(
        [whole.shares["share"], whole.shares["share_kept"]]
    )
    for text in (" ".join(done.stdout.split()), page):
        assert f"pushes {used.shares['pushed']:.0%} down further" in text
        assert f"from {whole.shares['share']:.2f} to {plain['overall']['brake']['share_brake']:.2f}" in text
        assert f"the share would be {whole.shares['share_kept']:.2f}" in text
        assert "Negative tokens by use" in text
        assert ("uses inferred" in text) == (names != "bapo")
    assert f"<td>{used.shares['kept']:.1%}</td>" in page
