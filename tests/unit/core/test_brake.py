"""The brake: its sensor and its bound against a literal loop in float64, in every path that computes them."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from bapo import ClipSettings, bounds_from_table, policy_loss, solve_bounds
from bapo.config.run import Config
from bapo.core.brake import braked
from bapo.core.checks import MAX_LOG_RATIO
from bapo.core.kernels.bounds import choose_bounds, signal_partials
from bapo.core.kernels.clipped import clipped_loss
from bapo.core.loss import update_table
from bapo.core.objectives import grpo
from bapo.core.settings import BRAKES
from bapo.core.tokens import Tokens
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack
from tests.tiny.optimizers import copies_of, put_back
from tests.unit.core.kernels.test_bounds import DEVICE
from tests.unit.core.test_loss_uses import stale
from tests.unit.learn.test_learner import CPU, model, sampled_groups

ULP = 2.0**-24
"""Half the distance of float32 numbers from .5 to 1, and so the error of one rounding there; an ulp is twice that."""


def by_loop(tokens, low, delta, on="used"):
    """Drift and bound, one token after the other, in Python's float64."""
    fallen, count = 0.0, 0
    for logprob, behavior, advantage, chosen, uses in zip(*(x.flatten().tolist() for x in tokens), strict=True):
        if chosen and advantage < 0 and (on == "all" or uses > 0) and abs(logprob - behavior) < MAX_LOG_RATIO:
            fallen -= logprob - behavior
            count += 1
    drift = fallen / count if count else 0.0
    return drift, low + (1 - low) * min(max(drift / delta, 0.0), 1.0)


def near(found, expected):
    return abs(float(found) - expected) <= 2 * ULP


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 60),
    low=st.sampled_from([0.8, 0.5, 1.0]),
    delta=st.sampled_from([0.01, 0.03, 0.3, 5.0]),
    shift=st.sampled_from([-0.3, -0.02, 0.0, 0.05]),
    parts=st.integers(1, 3),
)
def test_every_path_has_the_drift_and_the_bound_of_the_loop(seed, count, low, delta, shift, parts):
    logprobs, behavior, advantages, mask, uses = stale(count, seed)
    logprobs = (logprobs + shift).clamp(max=0)
    logprobs[0], behavior[0] = -30.0, -1.0  # past the ratio limit, if it is negative and used
    mask[-1] = True
    given = logprobs, behavior, advantages, mask
    drift, bound = by_loop((*given, uses), low, delta)
    out = policy_loss(*given, objective="brake", low=low, delta=delta, uses=uses)
    assert near(out.bounds.used_low, bound)
    assert float(out.bounds.drift) == pytest.approx(drift, rel=2 * ULP, abs=1e-12)
    assert (out.metrics["drift"], out.metrics["used_low"]) == (out.bounds.drift, out.bounds.used_low)
    assert (float(out.bounds.low), float(out.bounds.high)) == pytest.approx((low, 1.2))

    clip = BRAKES["brake"](low=low, delta=delta)
    tables = [update_table(*(x[i::parts] for x in given), clip, uses=uses[i::parts]) for i in range(min(parts, count))]
    assert near(bounds_from_table(sum(tables), clip).used_low, bound)

    everywhere = policy_loss(*given, objective="brake_all", low=low, delta=delta)
    assert near(everywhere.bounds.low, by_loop((*given, uses), low, delta, "all")[1])
    assert everywhere.bounds.used_low is None


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("objective", ["brake", "brake_all"])
def test_it_goes_by_what_the_sampler_had_before_it_truncated(objective, by_kernel, monkeypatch):
    if by_kernel:
        monkeypatch.setattr("bapo.core.kernels.usable", lambda tensor: True)
    for seed in range(3):
        logprobs, whole, advantages, mask, uses = (x.to(DEVICE) for x in stale(300, seed))
        behavior = (whole + 0.4 * torch.rand(300, generator=torch.Generator().manual_seed(seed)).to(DEVICE)).clamp(
            max=0
        )
        on, given = ("all", None) if objective == "brake_all" else ("used", uses)
        drift, _ = by_loop((logprobs, whole, advantages, mask, uses), 0.8, 0.1, on)
        log_kept = torch.where(mask, whole - behavior, math.nan)
        options = {"objective": objective, "delta": 0.1, "uses": given, "log_kept": log_kept}
        out = policy_loss(logprobs, behavior, advantages, mask, **options)
        assert float(out.bounds.drift) == pytest.approx(drift, abs=8 * ULP)
        plain = policy_loss(logprobs, behavior, advantages, mask, **options | {"log_kept": None})
        assert float(plain.bounds.drift) > drift + 0.1
        ratios = [
            policy_loss(logprobs, behavior, advantages, mask, objective="grpo", log_kept=x) for x in (None, log_kept)
        ]
        assert torch.equal(*(one.loss for one in ratios))


@pytest.mark.parametrize("options", [{}, {"measure": "surrogate"}, {"order": "low_first", "target_share": 0.6}])
def test_the_kernels_have_the_bounds_of_the_torch_path(options):
    for seed, delta in enumerate((0.02, 0.3, 2.0)):
        logprobs, behavior, advantages, mask, uses = stale(700, seed)
        logprobs = (logprobs - 0.1).clamp(max=0)
        logprobs[3], behavior[3] = -30.0, -1.0
        clip = ClipSettings(brake=delta, **options)
        expected = policy_loss(logprobs, behavior, advantages, mask, settings=clip, uses=uses).bounds
        low, high = (torch.tensor(grid, dtype=torch.float64) for grid in (clip.low_grid, clip.high_grid))
        thresholds = torch.cat([-low.flip(0), torch.zeros(1, dtype=torch.float64), high]).float()
        given = [x.to(DEVICE) for x in (logprobs, advantages, mask, low, high, thresholds)]
        partials = signal_partials(
            *given,
            surrogate=clip.measure == "surrogate",
            weighted=False,
            behavior_logprobs=behavior.to(DEVICE),
            uses=uses.to(DEVICE),
            brake=True,
            log_ratio_limit=MAX_LOG_RATIO,
        )
        found, (bound, drift) = choose_bounds(
            partials.sum(1),
            *given[3:5],
            target_share=clip.target_share,
            high_first=clip.order == "high_first",
            dtype=torch.float32,
            brake=delta,
        )
        assert (float(found[0]), float(found[1])) == (float(expected.low), float(expected.high))
        assert near(bound, float(expected.used_low))
        assert_close(drift.cpu(), expected.drift, rtol=8 * ULP, atol=1e-9)


def test_the_kernel_of_the_loss_takes_a_bound_from_the_device():
    logprobs, behavior, advantages, mask, uses = stale(900)
    leaf = logprobs.clone().requires_grad_()
    bounds = [torch.tensor(x) for x in (0.8, 1.2, 0.93)]
    theirs = grpo(Tokens(leaf, behavior, advantages, mask, uses=uses), used_low=0.93)
    torch.where(mask, theirs.loss, 0.0).sum().div(mask.sum()).backward()
    ours_leaf = logprobs.to(DEVICE).requires_grad_()
    rest = [x.to(DEVICE) for x in (behavior, advantages, mask)]
    options = {"log_ratio_limit": MAX_LOG_RATIO, "uses": uses.to(DEVICE)}
    low, high, used_low = (x.to(DEVICE) for x in bounds)
    ours = clipped_loss(ours_leaf, *rest, low, high, used_low=used_low, **options)
    ours.loss.backward()
    assert_close(ours_leaf.grad.cpu(), leaf.grad, rtol=1e-6, atol=0)
    assert torch.equal(ours.retained.cpu(), theirs.retained)
    assert clipped_loss(ours_leaf, *rest, low, high, used_low=used_low * math.nan, **options).loss.isnan()


def test_gradients_by_hand():
    """Two used negatives have fallen by 0.02 and risen by 0.01, so d = .005; with delta .01 the bound is .9."""
    log_ratio = torch.tensor([-0.02, 0.01, math.log(0.85), math.log(0.85), math.log(0.95)], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    uses = torch.tensor([1, 2, 1, 0, 0])
    behavior = torch.full((5,), -2.0, dtype=torch.float64)
    logprobs = (behavior + log_ratio).requires_grad_()
    out = policy_loss(
        logprobs, behavior, advantages, torch.ones(5), objective="brake", delta=0.01, uses=uses, denominator=1.0
    )
    out.loss.backward()
    assert float(out.bounds.drift) == pytest.approx(0.005)
    assert float(out.bounds.used_low) == pytest.approx(0.9)
    ratio = log_ratio.exp().tolist()
    assert logprobs.grad.tolist() == pytest.approx([ratio[0], ratio[1], -ratio[2], ratio[3], ratio[4]])
    again = (behavior + log_ratio).requires_grad_()
    policy_loss(
        again, behavior, advantages, torch.ones(5), objective="brake", delta=0.005, uses=uses, denominator=1.0
    ).loss.backward()  # d reaches delta: the token that has fallen is blocked, the one that has risen is not
    assert again.grad.tolist() == pytest.approx([0, ratio[1], -ratio[2], ratio[3], ratio[4]])


def test_between_grpo_and_push_once():
    """Bit for bit: GRPO without used tokens and where nothing has fallen, push once where enough has."""
    logprobs, behavior, advantages, mask, uses = stale()
    used_negative = (advantages < 0) & (uses > 0)
    for shift, objective, options in (
        (0.5, "grpo", {"uses": None}),
        (-0.5, "push_once", {"uses": uses}),
        (None, "grpo", {"uses": None}),
    ):
        moved = logprobs if shift is None else torch.where(used_negative, behavior + shift, logprobs)
        moved = moved.clamp(max=0)
        counts = torch.zeros_like(uses) if shift is None else uses
        leaves = [moved.clone().requires_grad_() for _ in range(2)]
        ours = policy_loss(leaves[0], behavior, advantages, mask, objective="brake", uses=counts)
        theirs = policy_loss(leaves[1], behavior, advantages, mask, objective=objective, **options)
        for out in (ours, theirs):
            out.loss.backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad)
        assert torch.equal(ours.loss, theirs.loss)
        assert torch.equal(ours.retained, theirs.retained)
        assert float(ours.bounds.used_low) == pytest.approx(1.0 if objective == "push_once" else 0.8)


def test_the_bound_is_exactly_low_and_exactly_one_at_its_ends():
    for low in (0.1, 0.3, 0.8, 0.7, 1.0):
        ends = [braked(low, torch.tensor(drift, dtype=torch.float64), 0.03) for drift in (-1.0, 0.0, 0.03, 7.0)]
        assert [float(end) for end in ends] == [low, low, 1.0, 1.0]


def test_beside_a_search_it_changes_no_candidate():
    logprobs, behavior, advantages, mask, uses = stale(800, 3)
    for options in ({}, {"measure": "surrogate"}, {"weight": "rollout_prob"}):
        plain, rule = ClipSettings(**options), ClipSettings(brake=0.05, **options)
        found = policy_loss(logprobs, behavior, advantages, mask, settings=rule, uses=uses).bounds
        without = policy_loss(logprobs, behavior, advantages, mask, settings=plain).bounds
        for name in ("low", "high", "share", "stop"):
            assert torch.equal(getattr(found, name), getattr(without, name))
        low = min(plain.low_grid, key=lambda bound: abs(bound - float(found.low)))
        assert near(found.used_low, by_loop((logprobs, behavior, advantages, mask, uses), low, 0.05)[1])
        ratio = (logprobs.double() - behavior.double()).exp()
        alone = solve_bounds(ratio, advantages, mask, rule, behavior_logprobs=behavior, uses=uses)
        assert float(alone.drift) == pytest.approx(float(found.drift), rel=1e-6)


def test_what_is_not_finite_is_refused_or_poisons_the_bound():
    logprobs, behavior, advantages, mask, uses = stale(50)
    broken = logprobs.clone()
    broken[mask.nonzero()[0]] = math.nan
    with pytest.raises(ValueError, match="logprobs is nan"):
        policy_loss(broken, behavior, advantages, mask, objective="brake", uses=uses)
    clip = BRAKES["brake"]()
    table = update_table(logprobs, behavior, advantages, mask, clip, uses=uses)
    table[-1] = math.nan
    bounds = bounds_from_table(table, clip)
    assert bounds.low.isnan()
    assert bounds.used_low.isnan()
    assert bounds.drift.isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "brake"}, "needs uses="),
        ({"objective": "brake", "uses": 1, "delta": 0.0}, "brake=0.0 must be a finite number"),
        ({"objective": "brake", "uses": 1, "low": 1.1}, "do not enclose 1"),
        ({"objective": "brake", "uses": 1, "used_low": 1.0}, "takes: low, high, delta"),
        ({"objective": "brake", "uses": 1, "settings": ClipSettings()}, "settings= is used by objective='bapo' only"),
        ({"objective": "brake_all", "uses": 1}, "nothing asks for it"),
        ({"objective": "brake", "uses": 1, "delta": None}, "brake=None must be a finite number"),
        ({"objective": "brake_all", "delta": None}, "brake=None must be a finite number"),
        ({"settings": ClipSettings(brake=0.03)}, "needs uses="),
    ],
)
def test_the_rule_and_uses_come_together_and_bad_options_are_refused(options, message):
    logprobs, behavior, advantages, mask, uses = stale(50)
    options = options | ({"uses": uses} if "uses" in options else {})
    with pytest.raises(ValueError, match=message):
        policy_loss(logprobs, behavior, advantages, mask, **options)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "0.03"])
def test_a_delta_that_cannot_be_is_refused(value):
    with pytest.raises(ValueError, match="must be a finite number"):
        ClipSettings(brake=value)
    with pytest.raises(ValueError, match="both set the lower bound"):
        ClipSettings(brake=0.03, used_low=1.0)
    with pytest.raises(ValueError, match="brake is not set"):
        ClipSettings(brake_on="all")


def moved_learner(start, **options):
    learner = Learner(copy.deepcopy(start), LearnerSettings(objective="brake", temperature=0.8, **options))
    calls = []
    passes = learner.logprobs
    learner.logprobs = lambda batch: calls.append(len(batch.targets)) or passes(batch)
    return learner, calls


def test_the_learner_looks_ahead_only_where_it_must():
    """A pass more for the update's own drift, unless its tokens are new; none for that of the update before."""
    start = model()
    fresh = sampled_groups(start)
    used = [replace(group, uses=1) for group in fresh]
    cuts = len(pack(fresh, estimator="grpo", micro_tokens=60, device=CPU))
    assert cuts > 1
    for sensor, groups, passes in (
        ("update", fresh, cuts),
        ("update", used, 2 * cuts - 1),
        ("previous", fresh, cuts),
        ("previous", used, cuts),
    ):
        learner, calls = moved_learner(start, sensor=sensor, micro_tokens=60)
        learner.step(groups)
        assert len(calls) == passes, (sensor, passes)


@pytest.mark.parametrize("sensor", ["update", "previous"])
def test_without_used_tokens_an_update_is_that_of_grpo_bit_for_bit(sensor):
    start = model()
    groups = sampled_groups(start)
    for micro_tokens in (60, 10**6):
        learner, _ = moved_learner(start, sensor=sensor, micro_tokens=micro_tokens, lr=1e-2)
        settings = LearnerSettings(objective="grpo", temperature=0.8, micro_tokens=micro_tokens, lr=1e-2)
        plain = Learner(copy.deepcopy(start), settings)
        for _ in range(2):
            ours, theirs = learner.step(groups).metrics, plain.step(groups).metrics
            assert {name: ours[name] for name in theirs} == theirs
            assert {"drift", "used_low"}.isdisjoint(ours)  # there is nothing to measure
        assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), plain.model.parameters(), strict=True))


def test_the_learner_goes_by_the_drift_of_the_update_before():
    """And its update is that of GRPO with the bound that follows, bit for bit, across a save and a load."""
    start = model()
    groups = [replace(group, uses=1) for group in sampled_groups(start)]
    moved(start)
    learner, _ = moved_learner(start, micro_tokens=60, options={"delta": 0.5})
    first = learner.step(groups).metrics
    (batch,) = pack(groups, estimator="grpo", micro_tokens=10**6, device=CPU)
    logprobs, _ = Learner(copy.deepcopy(start), LearnerSettings(temperature=0.8)).logprobs(batch)
    tokens = logprobs.double(), batch.behavior_logprobs.double(), batch.advantages, logprobs < 9, batch.uses
    drift, _ = by_loop(tokens, 0.8, 0.5)
    assert first["used_low"] == 0.8
    assert first["drift"] == pytest.approx(drift, abs=1e-6)
    assert drift > 0.001

    half = copy.deepcopy(learner.model)
    twin = Learner(half, LearnerSettings(objective="grpo", temperature=0.8, micro_tokens=60))
    expected = 0.8 + (1 - 0.8) * first["drift"] / 0.5
    twin.settings = replace(twin.settings, options={"low": 0.8, "high": 1.2, "used_low": expected})
    put_back(twin.optimizer, copies_of(learner.optimizer))
    twin.version = learner.version
    second = learner.step(groups).metrics
    assert second["used_low"] == expected
    twin.step(groups)
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), twin.model.parameters(), strict=True))


@pytest.mark.parametrize("sensor", ["update", "previous"])
def test_a_learner_that_was_saved_goes_on_bit_for_bit(tmp_path, sensor):
    start = model()
    groups = [replace(group, uses=1) for group in sampled_groups(start)]
    options = {"sensor": sensor, "options": {"delta": 0.001}, "lr": 1e-2}
    learner, _ = moved_learner(start, **options)
    learner.step(groups)
    learner.step(groups)
    learner.save(tmp_path)
    other, _ = moved_learner(model(seed=9), **options)
    other.load(tmp_path, version=learner.version)
    ours, theirs = (each.step(groups).metrics for each in (other, learner))
    assert ours == theirs
    assert theirs["used_low"] > 0.8
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True))


def test_beside_a_search_the_learner_takes_the_drift_of_the_update_before():
    start = model()
    groups = [replace(group, uses=1) for group in sampled_groups(start)]
    clip = ClipSettings(target_share=0.55, brake=0.001)
    settings = LearnerSettings(clip=clip, temperature=0.8, micro_tokens=60, lr=1e-2)
    learner = Learner(copy.deepcopy(start), settings)
    plain = Learner(copy.deepcopy(start), replace(settings, clip=ClipSettings(target_share=0.55)))
    first, alone = learner.step(groups).metrics, plain.step(groups).metrics
    assert (first["clip_low"], first["clip_high"]) == (alone["clip_low"], alone["clip_high"])
    assert first["used_low"] == pytest.approx(first["clip_low"])
    second = learner.step(groups).metrics
    assert second["used_low"] == pytest.approx(
        float(braked(second["clip_low"], torch.tensor(first["drift"], dtype=torch.float64), 0.001)), abs=2 * ULP
    )


def moved(start, seed=1):
    """The same model after somebody has trained it, so that ratios are not 1."""
    with torch.no_grad():
        for parameter in start.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return start


def test_new_tokens_do_not_release_the_brake():
    """With one update per pass, new and used tokens take turns. The brake then goes by the last used ones."""
    start = model()
    fresh = sampled_groups(start)
    used = [replace(group, uses=1) for group in fresh]
    learner, _ = moved_learner(moved(start), options={"delta": 0.5})
    first, new, second = (learner.step(groups).metrics for groups in (used, fresh, used))
    assert first["drift"] > 0.001
    assert {"drift", "used_low"}.isdisjoint(new)
    assert second["used_low"] == 0.8 + (1 - 0.8) * first["drift"] / 0.5


@pytest.mark.parametrize("extra", [{"remainder": "weigh"}, {"dual_clip": 1.05}])
def test_a_brake_beside_other_options_of_bapo_keeps_them(extra):
    """However the update is cut and whatever it goes by: at a drift of 0, this is bapo without a brake."""
    start = model()
    groups, start = sampled_groups(start), moved(start)
    options = {"dual_clip": 1.05} if "dual_clip" in extra else {}
    found = ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2), **({} if options else extra))
    base = LearnerSettings(clip=found, options=options, temperature=0.8)
    for micro_tokens in (60, 10**6):
        plain = Learner(copy.deepcopy(start), replace(base, micro_tokens=micro_tokens)).step(groups).metrics
        for sensor in ("update", "previous"):
            clip = replace(found, brake=0.5)
            settings = replace(base, clip=clip, sensor=sensor, micro_tokens=micro_tokens)
            ours = Learner(copy.deepcopy(start), settings).step(groups).metrics
            assert {name: ours[name] for name in plain} == plain, (micro_tokens, sensor)


def test_a_brake_on_all_tokens_beside_a_search_acts_once():
    start = model()
    groups, start = sampled_groups(start), moved(start)
    clip = ClipSettings(target_share=0.55, brake=0.5, brake_on="all")
    settings = LearnerSettings(clip=clip, temperature=0.8)
    plain = replace(settings, clip=ClipSettings(target_share=0.55))
    learner, alone = (Learner(copy.deepcopy(start), each) for each in (settings, plain))
    first, without = learner.step(groups).metrics, alone.step(groups).metrics
    assert first["drift"] > 0.001
    assert first["clip_low"] == without["clip_low"]
    alone = Learner(copy.deepcopy(learner.model), plain)
    second, low = learner.step(groups).metrics, alone.step(groups).metrics["clip_low"]
    assert second["clip_low"] == pytest.approx(low + (1 - low) * first["drift"] / 0.5, abs=2 * ULP)


def test_names_of_scope_and_sensor_are_checked():
    for options in ({"sensor": "nonsense"}, {"scope": "all"}):
        with pytest.raises(ValueError, match=f"objective.{next(iter(options))}"):
            Config(objective={"name": "brake", **options})
