"""Uses in a diagnosis: what their rules would do equals a loop and the core; reuse is recognised, and never made up."""

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
from bapo.diagnose.tables import parts, print_diagnosis, uses
from bapo.diagnose.uses import UNKNOWN, Pushes, first, joined, later, of_uses, recognise, with_uses
from tests.processes import bapo, script
from tests.unit.diagnose.test_diagnosis import CLEAN, EXAMPLES, batch, changed, only, said, tensors

OWN = {"logprobs": "log_prob", "behavior_logprobs": "rollout_log_probs"}
RECOMPUTED = {"logprobs": "log_prob", "behavior_logprobs": "old_log_prob"}
BEFORE_THE_FIRST_STEP = {"logprobs": "old_log_probs", "behavior_logprobs": "rollout_log_probs"}


def tokens(count=800, seed=0):
    """An update with ratios on both sides of every bound, at 1 and beyond the limit, and uses known and unknown."""
    random = np.random.default_rng(seed)
    log_ratio = random.normal(0, 0.3, count)
    log_ratio[::11] = 0.0
    log_ratio[5::50], log_ratio[6::50] = 25.0, -25.0
    behavior = np.where(np.abs(log_ratio) > 20, -30.0, -random.random(count) - 2)
    advantages = random.normal(-0.2, 1, count)
    advantages[::7] = 0
    uses = random.choice([UNKNOWN, 0, 0, 1, 2, 5], count)
    return LoggedUpdate("1", behavior + log_ratio, behavior, advantages, uses=uses)


def by_loop(update, used_low, low=0.8):
    """The definitions, token by token. `used_low`: that of the brake."""
    found = {}
    columns = (update.logprobs, update.behavior_logprobs, update.advantages, update.uses)
    for logprob, sampled, advantage, use in zip(*columns, strict=True):
        here = found.setdefault(int(use), dict.fromkeys((one.name for one in fields(Pushes)), 0))
        if advantage >= 0:
            continue
        log_ratio = max(-20.0, min(20.0, float(logprob) - float(sampled)))
        limited, ratio = abs(log_ratio) == 20, math.exp(log_ratio)
        mass = ratio * abs(float(advantage))
        here["negative"] += 1
        here["log_ratio"] += log_ratio
        here["below"] += ratio < 1
        if ratio > low and not limited:
            here["gradient"] += mass
            if ratio < 1:
                here["pushed"] += 1
                here["pushed_gradient"] += mass
        for rule, bound in (("brake", used_low), ("push_once", 1.0)):
            if ratio > (bound if use > 0 else low) and not limited:
                here[rule] += 1
                here[f"{rule}_gradient"] += mass
    return found


@pytest.mark.parametrize("seed", range(4))
def test_pushes_equal_a_loop(seed):
    update = tokens(seed=seed)
    numbers = measure(update)
    (brake,) = numbers.brakes
    expected = by_loop(update, brake.used_low)
    assert set(numbers.pushes) == set(expected) == {UNKNOWN, 0, 1, 2, 5}
    for use, part in numbers.pushes.items():
        assert asdict(part) == pytest.approx(expected[use], rel=1e-12)
    assert all(part.pushed and part.push_once <= part.brake < part.negative for part in numbers.pushes.values())
    (unknown,) = measure(replace(update, uses=None)).pushes.values()
    together = by_loop(replace(update, uses=np.full(len(update.uses), UNKNOWN)), 1.0)[UNKNOWN]
    rules = ("brake", "brake_gradient", "push_once", "push_once_gradient")
    assert asdict(unknown) == pytest.approx(together | dict.fromkeys(rules, math.nan), nan_ok=True)


def test_pushes_by_hand():
    # Used negatives at 0.7 (blocked), 0.9 (pushed on), 1 (at the bound of push once), 1.1 (kept), a fresh one at 0.9,
    # a positive at 1.1 and one at 1.3 (blocked).
    ratio = np.array([0.7, 0.9, 1.0, 1.1, 0.9, 1.1, 1.3])
    advantages = np.array([-1, -1, -1, -2, -1, 3, 3.0])
    uses = np.array([1, 1, 2, 3, 0, 1, 1])
    found = measure(LoggedUpdate("1", np.log(ratio) - 2, np.full(7, -2.0), advantages, uses=uses)).pushes
    used = later(found)
    assert (used.shares["below"], used.shares["pushed"], used.shares["push_once"]) == (0.5, 0.25, 0.25)
    assert used.shares["pushed_of_gradient"] == pytest.approx(0.9 / (0.9 + 1 + 2.2))
    assert used.shares["push_once_of_gradient"] == pytest.approx(2.2 / (0.9 + 1 + 2.2))
    assert used.shares["log_ratio"] == pytest.approx(math.log(0.7 * 0.9 * 1.1) / 4)
    assert asdict(first(found)) == pytest.approx(asdict(Pushes(1, math.log(0.9), 1, 1, 1, 1, 0.9, 0.9, 0.9, 0.9)))


def test_pushes_add_up():
    one, two = tokens(seed=1), tokens(300, seed=2)
    columns = ("logprobs", "behavior_logprobs", "advantages", "uses")
    both = {name: np.concatenate([getattr(one, name), getattr(two, name)]) for name in columns}
    added = joined([measure(one).pushes, measure(two).pushes])
    assert list(added) == [UNKNOWN, 0, 1, 2, 5]
    for use, part in measure(replace(one, **both)).pushes.items():
        for name in ("negative", "log_ratio", "below", "pushed", "gradient", "push_once", "push_once_gradient"):
            assert getattr(added[use], name) == pytest.approx(getattr(part, name), rel=1e-12)


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
    pushes = of_uses(measure(update).pushes)
    assert fate.blocked.negative == pushes.negative - pushes.push_once
    assert fate.gradient.negative == pytest.approx(pushes.push_once_gradient)
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
    fate, whole, used = numbers.fates["brake"], of_uses(numbers.pushes), later(numbers.pushes)
    assert fate.blocked.negative == whole.negative - whole.brake
    assert whole.brake == int(out.retained[tensors(update)[2] < 0].sum())
    assert fate.gradient.negative == pytest.approx(whole.brake_gradient)
    assert used.gradient > 1.01 * used.brake_gradient > 1.02 * used.push_once_gradient
    assert first(numbers.pushes).brake == first(numbers.pushes).push_once


def test_without_used_negative_tokens_there_is_no_brake():
    for update in (with_count(CLEAN, 0), with_count(replace(CLEAN, advantages=np.abs(CLEAN.advantages)), 1)):
        numbers = measure(update)
        assert numbers.brakes == []
        assert numbers.fates["brake"] == numbers.fates["grpo"]
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
    assert later(both.pushes).brake == sum(of_uses(numbers.pushes).brake for numbers in alone)
    lows = [one.used_low for one in both.brakes]
    assert f"its used_low {np.mean(lows):.2f} ({min(lows):.2f} to 1.00)" in uses(both).reading


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
        for update in (some(CLEAN, range(32, 96)), some(moved(CLEAN), range(32, 96)))
    ]
    dump, known = with_uses(Dump(mostly, OWN))
    assert known.source == "inferred"
    assert "% of the tokens are in responses too short or too certain" in known.words
    assert set(dump.updates[1].uses[:-30]) == {1}
    assert set(dump.updates[1].uses[-30:]) == {UNKNOWN}
    rows = {row[0]: row for row in uses(diagnose(Dump(mostly, OWN)).overall).rows}
    assert list(rows) == ["1", "2", "not known", "all"]
    assert rows["not known"][1] == "0"
    assert int(rows["1"][1]) == int(rows["2"][1]) == int(rows["all"][1]) / 2 > 0


@pytest.mark.parametrize(
    ("updates", "columns", "why"),
    [
        ([CLEAN], OWN, "there is only one update"),
        ([replace(CLEAN, sequence_ids=None, rewards=None)] * 2, OWN, "does not say which response"),
        ([CLEAN, batch(seed=1)], RECOMPUTED, "if old_log_prob is recomputed for every update"),
        ([CLEAN, batch(seed=1)], BEFORE_THE_FIRST_STEP, "before the first step on each rollout batch"),
    ],
)
def test_where_uses_cannot_be_inferred_they_are_unknown(updates, columns, why):
    result = diagnose(Dump(updates, columns))
    assert result.uses.source == "unknown"
    assert why in " ".join(result.unknown)
    assert not re.search("Push once|brake", said(result))
    assert set(result.overall.pushes) == {UNKNOWN}
    plain = as_json(result)
    of_all = plain["overall"]["uses"]["all"]
    assert plain["uses"] == "unknown"
    assert of_all["push_once"] is of_all["brake"] is None
    assert of_all["pushed"] > 0.3
    assert plain["overall"]["brakes"] == []
    table = uses(result.overall)
    assert [row[0] for row in table.rows] == ["not known"]
    assert len(table.headings) == 6
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
    return said(diagnose(Dump(list(updates), columns)))


def pushed_down(update, by=0.1):
    """Negative tokens made less likely, as training on them does."""
    return replace(update, logprobs=np.where(update.advantages < 0, update.logprobs - by, update.logprobs))


def test_advice_on_later_uses_says_what_the_numbers_say():
    again = pushed_down(moved(CLEAN))
    result = diagnose(Dump([CLEAN, again], OWN))
    pushes, (brake,), fates = result.overall.pushes, result.overall.brakes, result.overall.fates
    used = later(pushes)
    share, braked, once = (fates[name].gradient.share for name in ("grpo", "brake", "push_once"))
    assert used.shares["below"] > 0.7 > 0.6 > first(pushes).shares["below"]
    text = said(result)
    for part in (
        f"second or later use (uses inferred), {used.shares['below']:.0%} are already less likely",
        f"in their first use, {first(pushes).shares['below']:.0%} are",
        f"pushes {used.shares['pushed']:.0%} down further, and these hold "
        f"{used.shares['pushed_of_gradient']:.0%} of the gradient",
        f"their mean of -log r, {brake.drift:.3f}, makes used_low {brake.used_low:.2f}",
        f"keep {used.shares['brake']:.0%} of the used negative tokens",
        f"from {share:.2f} to {braked:.2f}",
        f"Push once would keep {used.shares['push_once']:.0%} of them, and move it to {once:.2f}.",
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
def test_where_nothing_can_be_pushed_nothing_is_said(update, capsys):
    result = diagnose(Dump([update], OWN))
    assert not re.search("ush once|brake", said(result))
    titles = [part.title for part in parts(result)]
    assert ("Negative tokens by use" in titles) == bool((update.advantages < 0).any())
    assert "nan" not in json.dumps(as_json(result)).lower()
    print_diagnosis(result)
    assert "nan%" not in capsys.readouterr().out + html_page(result)


def test_bad_tokens_are_left_out():
    broken = changed(with_count(CLEAN, 1), "logprobs", slice(0, 50), np.nan)
    good = slice(50, None)
    arrays = ("logprobs", "behavior_logprobs", "advantages", "uses", "sequence_ids")
    alone = LoggedUpdate("1", **{name: getattr(broken, name)[good] for name in arrays})
    assert measure(broken).pushes == measure(alone).pushes


def test_the_table_by_use():
    updates = [with_count(moved(CLEAN, seed=use), use) for use in range(12)]
    result = diagnose(Dump(updates, OWN))
    table = uses(result.overall)
    assert [row[0] for row in table.rows] == [*map(str, range(1, 9)), "2 or more", "all"]
    whole, used = of_uses(result.overall.pushes), later(result.overall.pushes)
    assert int(table.rows[-1][1]) == whole.negative == 12 * int((CLEAN.advantages < 0).sum())
    rules = ("brake", "brake_of_gradient", "push_once", "push_once_of_gradient")
    assert table.rows[-1][-4:] == [f"{whole.shares[name]:.1%}" for name in rules]
    assert table.rows[-2][2:6] == [
        f"{used.shares['log_ratio']:+.3f}",
        *(f"{used.shares[name]:.1%}" for name in ("below", "pushed", "pushed_of_gradient")),
    ]  # fmt: skip
    (alone,) = uses(measure(with_count(CLEAN, 0))).rows
    assert (alone[0], alone[6]) == ("1", f"{first(measure(with_count(CLEAN, 0)).pushes).shares['push_once']:.1%}")
    assert alone[7] == alone[9] == "100.0%"


@pytest.mark.parametrize("names", ["bapo", "trl", "verl"])
def test_text_page_and_data_agree(tmp_path, names):
    assert script(EXAMPLES / "make_dump.py", tmp_path / "dump", "--names", names, "--updates", 3).returncode == 0
    done = bapo("diagnose", tmp_path / "dump", "--html", tmp_path / "a.html", "--json", tmp_path / "a.json")
    assert (done.returncode, done.stderr) == (0, "")
    page, plain = Path(tmp_path / "a.html").read_text(), json.loads(Path(tmp_path / "a.json").read_text())
    assert plain["uses"] == ("logged" if names == "bapo" else "inferred")
    dump = read_dump([tmp_path / "dump"])
    assert all((update.uses is None) == (names != "bapo") for update in dump.updates)
    expected = joined([measure(with_count(update, i)).pushes for i, update in enumerate(dump.updates)])
    by_use = plain["overall"]["uses"]
    for use, part in expected.items():
        assert by_use[str(use)] == pytest.approx({"negative_tokens": part.negative, **part.shares})
    used, fates = later(expected), plain["overall"]["objectives"]
    assert by_use["later"]["pushed"] == pytest.approx(used.shares["pushed"])
    for text in (" ".join(done.stdout.split()), page):
        assert f"pushes {used.shares['pushed']:.0%} down further" in text
        assert f"from {fates['grpo']['share']:.2f} to {fates['brake']['share']:.2f}" in text
        assert f"and move it to {fates['push_once']['share']:.2f}" in text
        assert "Negative tokens by use" in text
        assert ("uses inferred" in text) == (names != "bapo")
    assert f"<td>{used.shares['push_once']:.1%}</td>" in page
