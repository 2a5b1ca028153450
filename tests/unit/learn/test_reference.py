"""The reference of learn.kl: whose log-probs they are, when they are computed, and what they do to an update."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack
from bapo.learn.reference import Reference, initial
from bapo.models.layers import LoraSettings, add_lora
from bapo.types import Group, Problem, Status, Trajectory, group_from_state, group_state
from tests.rounding import carried, rounding
from tests.unit.learn.test_learner import CPU, literal_logprobs, model, sampled_groups

SETTINGS = LearnerSettings(objective="grpo", temperature=0.8, lr=1e-2, kl=0.5, micro_tokens=60)


def learner_of(start, settings=SETTINGS):
    """A learner with its reference, as `build` makes them."""
    kept = initial(start, moves=settings.kl_every is not None)
    learner = Learner(start, settings)
    learner.reference = Reference(kept, learner.whole, settings)
    return learner


def test_a_frozen_weight_without_additions_does_not_make_the_model_its_own_reference():
    start, added = model(0), with_additions()
    next(start.parameters()).requires_grad_(False)
    assert initial(start) is not start
    assert initial(added) is added


def with_additions(seed=0):
    start = model(seed)
    add_lora(start, LoraSettings(rank=4), seed=1)
    return start


def literal_penalty(start, groups, reduction, length=None):
    """The mean k3 of all responses and the mean over tokens, from GRPO's equation, one token at a time."""
    responses = [t for group in groups for t in group.trajectories]
    weighted, total, count = 0.0, 0.0, sum(len(t.tokens) for t in responses)
    divisor = {"token_mean": count, "sequence_mean": len(responses), "fixed_length": len(responses) * (length or 1)}
    for response in responses:
        now = literal_logprobs(start, response, 0.8)
        for logprob, reference in zip(now, response.reference_logprobs, strict=True):
            difference = reference - logprob
            value = difference.exp() - difference - 1
            weighted = weighted + value / (len(now) if reduction == "sequence_mean" else 1)
            total += value.item()
    return weighted / divisor[reduction], total / count


def shifted(start, seed=1, size=0.05):
    """The same model somewhere else."""
    moved = copy.deepcopy(start)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return moved


def without_signal(groups):
    """The same groups with equal rewards, so that all advantages are 0."""
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.reward = 1.0
    return groups


@pytest.mark.numeric
@pytest.mark.parametrize("make", [model, with_additions])
def test_every_group_gets_the_log_probs_of_the_weights_with_which_the_run_began(make):
    start = make()
    plain = model()  # what both began with
    learner = learner_of(start)
    for version in range(4):
        groups = sampled_groups(start, version=version)
        assert not any(t.reference_logprobs for group in groups for t in group.trajectories)
        learner.step(groups)
        responses = [t for group in groups for t in group.trajectories]
        limit = carried(
            lambda these=responses: torch.cat([literal_logprobs(plain, t, 0.8, torch.float32) for t in these]), draws=2
        )
        for trajectory in responses:
            expected = literal_logprobs(plain, trajectory, 0.8)
            assert_close(torch.tensor(trajectory.reference_logprobs).double(), expected, rtol=0, atol=limit)
    with torch.no_grad():
        moved = literal_logprobs(learner.model, trajectory, 0.8) - expected
    assert moved.abs().max() > 0.01


@pytest.mark.parametrize("make", [model, with_additions])
@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, {"float32_head": True, "dtype": torch.bfloat16}]
)
def test_the_reference_is_passed_as_the_learner_passes(make, options):
    """At the start the policy is its reference, so both have the same log-probs, bit for bit."""
    options = dict(options)
    start = make().to(options.pop("dtype", torch.float32))
    learner = learner_of(start, replace(SETTINGS, micro_tokens=10_000, **options))
    groups = sampled_groups(start)
    assert learner.step(groups).metrics["kl_reference"] == 0
    for _ in range(3):
        last = learner.step(groups).metrics
    assert last["kl_reference"] > 1e-4


def test_additions_are_back_after_the_pass_and_still_trained():
    start = with_additions()
    learner = learner_of(start)
    learner.step(sampled_groups(start))
    trained = {name for name, p in start.named_parameters() if p.requires_grad}
    groups, ids = sampled_groups(start, version=1), torch.arange(10)[None]
    before = start(ids).logits
    learner.reference.add_logprobs(groups)
    assert torch.equal(start(ids).logits, before)
    assert {name for name, p in start.named_parameters() if p.requires_grad} == trained
    assert learner.reference.whole.model is start  # nothing was copied
    learner.step(groups)
    assert not torch.equal(start(ids).logits, before)


def test_the_copy_is_frozen_and_shares_no_memory_with_the_model():
    start = model()
    learner = learner_of(start)
    kept = learner.reference.whole.model
    assert not any(parameter.requires_grad for parameter in kept.parameters())
    ours, theirs = ({p.data_ptr() for p in m.parameters()} for m in (kept, start))
    assert not ours & theirs
    assert len(ours) == len(theirs)  # a tied head stays tied
    begun = learner.reference.fingerprint
    learner.step(sampled_groups(start))
    assert learner_of(model()).reference.fingerprint == begun
    assert learner_of(start).reference.fingerprint != begun


def test_a_group_is_passed_once_however_often_it_is_visited(monkeypatch):
    start = model()
    learner = learner_of(start)
    groups, passes = sampled_groups(start), []
    forward = learner.reference.whole.forward
    monkeypatch.setattr(learner.reference.whole, "forward", lambda *given: passes.append(0) or forward(*given))
    learner.step(groups[:2])
    first = [list(t.reference_logprobs) for t in groups[0].trajectories]
    assert passes
    passes.clear()
    learner.step(groups[:2])
    assert not passes
    learner.step(groups)  # two of them are new
    assert passes
    assert [t.reference_logprobs for t in groups[0].trajectories] == first


MOVING = replace(SETTINGS, kl_every=2)


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same_weights(ours, theirs):
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("make", [model, with_additions])
def test_a_moving_reference_is_the_policy_of_the_last_multiple_of_n_updates(make):
    start = make()
    learner = learner_of(start, MOVING)
    others = {name: p.clone() for name, p in start.named_parameters() if not p.requires_grad}
    at = [trained(start)]
    for version in range(5):
        groups = sampled_groups(start, version=version)
        known = learner.step(groups).metrics["kl_reference"]
        at.append(trained(start))
        followed = at[(version + 1) // 2 * 2]
        assert same_weights({name: w.detach() for name, w in learner.reference.moving.items()}, followed)
        assert (known < 1e-9) == (version % 2 == 0)  # a group's first visit, right after the reference has moved
    assert not same_weights(at[2], at[4])
    frozen = {name: p for name, p in start.named_parameters() if not p.requires_grad}
    kept = dict(learner.reference.whole.model.named_parameters())
    assert same_weights(frozen, others)
    assert all(kept[name] is p for name, p in frozen.items())  # they are not copied
    assert not any(p.requires_grad for p in kept.values())


def test_log_probs_are_those_of_the_reference_at_the_first_visit():
    start = model()
    learner = learner_of(start, MOVING)
    early, late = sampled_groups(start), sampled_groups(start)
    learner.step(early)
    first = [list(t.reference_logprobs) for group in early for t in group.trajectories]
    learner.step(early)  # and the reference moves
    at = copy.deepcopy(start)
    learner.step(early + late)
    assert [t.reference_logprobs for group in early for t in group.trajectories] == first
    for trajectory in (t for group in late for t in group.trajectories):
        expected = literal_logprobs(at, trajectory, 0.8, torch.float32).tolist()
        assert trajectory.reference_logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_may_go_a_part_of_the_way(dtype):
    start = model().to(dtype)
    learner = learner_of(start, replace(MOVING, kl_mix=0.6))
    expected = {name: weight.double() for name, weight in trained(start).items()}
    for version in range(4):
        learner.step(sampled_groups(start, version=version))
        if version % 2:
            for name, weight in trained(start).items():
                mixed = 0.4 * expected[name] + 0.6 * weight.double()
                found = learner.reference.moving[name]
                limit = rounding(2, dtype=torch.float32) + rounding(1, dtype=dtype)
                assert_close(found.double(), mixed, rtol=0, atol=limit * float(mixed.abs().max()))
                expected[name] = found.double()
            assert not same_weights(trained(start), {n: w.detach() for n, w in learner.reference.moving.items()})


@pytest.mark.parametrize("make", [model, with_additions])
def test_a_learner_goes_on_with_the_reference_it_saved(make, tmp_path):
    start = make()
    learner = learner_of(start, MOVING)
    for version in range(3):
        learner.step(sampled_groups(start, version=version))
    learner.save(tmp_path)
    again = learner_of(make(), MOVING)
    again.load(tmp_path, version=3)
    saved = {name: weight.clone() for name, weight in learner.reference.moving.items()}
    assert same_weights(again.reference.moving, saved)
    assert not same_weights(trained(start), saved)  # it has moved on since
    for version in (3, 4):
        groups = sampled_groups(start, version=version)
        first = learner.step(groups).metrics
        for trajectory in (t for group in groups for t in group.trajectories):
            trajectory.reference_logprobs = []
        assert again.step(groups).metrics == first
    assert same_weights(trained(again.model), trained(start))
    Learner(make(), replace(MOVING, kl=0.0)).save(tmp_path)
    with pytest.raises(KeyError, match=r"reference\..* are missing"):
        again.load(tmp_path, version=3)


IN_REWARD = replace(SETTINGS, kl=0.0, kl_in_reward=0.25, advantages="dr_grpo")


@pytest.mark.parametrize(("truncated", "expected"), [("keep", (0.9, -0.15, -0.75)), ("mask", (0.9, -0.15))])
def test_a_penalty_in_the_reward_by_hand(truncated, expected):
    """Rewards 1, 0, 0 lose a quarter of 0.4, 0.6 and 3 nats, so they are 0.9, -0.15, -0.75, with mean 0."""
    gaps = [(0.1, 0.3), (0.6,), (2.0, 0.5, 0.5)]
    responses = [
        Trajectory(
            *([5, 6], 0, [7] * len(gap), [-1.0] * len(gap), [0.5] * len(gap), [0] * len(gap), Status.STOPPED),
            reward=float(index == 0),
            reference_logprobs=[-1.0 - each for each in gap],
        )
        for index, gap in enumerate(gaps)
    ]
    responses[2].status = Status.TRUNCATED
    group = Group(0, Problem("p", "", None), responses)
    options = {"estimator": "dr_grpo", "micro_tokens": 99, "device": CPU, "truncated": truncated}
    (batch,) = pack([group], kl_in_reward=0.25, **options)
    lengths = sorted((len(gap), value) for gap, value in zip(gaps, expected, strict=False))
    spread = [value for length, value in reversed(lengths) for _ in range(length)]
    assert batch.advantages.tolist() == pytest.approx(spread, abs=rounding(4))


def test_rewards_lose_the_log_ratio_of_their_response_to_the_reference():
    """The update is the one on rewards that were reduced beforehand, bit for bit, and what they lose is literal."""
    start = model()
    plain = copy.deepcopy(start)
    learner = learner_of(start, IN_REWARD)
    for version in range(2):
        groups = sampled_groups(start, version=version)
        learner.step(groups)
    groups = sampled_groups(start, version=2)
    before = copy.deepcopy(start)
    told = learner.step(groups).metrics
    lost = []
    for trajectory in (t for group in groups for t in group.trajectories):
        sampled, reference = (literal_logprobs(m, trajectory, 0.8).sum().item() for m in (before, plain))
        assert trajectory.reference_gap == pytest.approx(sampled - reference, abs=1e-4)
        lost.append(trajectory.reference_gap)
        trajectory.reward -= 0.25 * trajectory.reference_gap
    assert told["kl_response"] == pytest.approx(sum(lost) / len(lost))
    assert max(map(abs, lost)) > 0.05
    other = Learner(before, replace(IN_REWARD, kl_in_reward=0.0))
    other.version = 2
    metrics = other.step(groups).metrics
    assert (told["loss"], told["grad_norm"]) == (metrics["loss"], metrics["grad_norm"])


@pytest.mark.numeric
@pytest.mark.parametrize("micro_tokens", [60, 10_000])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length"])
def test_penalty_and_gradient_are_those_of_a_literal_loop(reduction, micro_tokens):
    start = model()
    groups = without_signal(sampled_groups(start))
    settings = replace(SETTINGS, reduction=reduction, length=12, micro_tokens=micro_tokens)
    learner = learner_of(start, settings)
    learner.reference.add_logprobs(groups)
    moved = shifted(start)
    assert (len(pack(groups, estimator="grpo", micro_tokens=micro_tokens, device=CPU)) > 1) == (micro_tokens == 60)
    exact = copy.deepcopy(moved).double()
    penalty, mean = literal_penalty(exact, groups, reduction, length=12)
    (0.5 * penalty).backward()
    gradient = sum(float(p.grad.square().sum()) for p in exact.parameters()) ** 0.5

    def learner_there():
        return Learner(copy.deepcopy(moved), settings)

    def told(learner):  # the groups have their log-probs already
        metrics = learner.step(groups).metrics
        return {name: metrics[name] for name in ("loss", "grad_norm", "kl_reference")}

    found, limits = told(learner_there()), carried(told, given=learner_there)
    for name, value in (("loss", 0.5 * penalty.item()), ("grad_norm", gradient), ("kl_reference", mean)):
        assert found[name] == pytest.approx(value, rel=0, abs=limits[name])
        assert limits[name] < 1e-2 * value
    assert mean > 0.01


def test_it_is_added_to_the_policy_loss_and_its_weight_counts():
    start = model()
    groups = sampled_groups(start)
    learner_of(start).reference.add_logprobs(groups)
    moved = shifted(start)
    losses = {}
    for kl in (0.0, 0.5, 1.0):
        losses[kl] = Learner(copy.deepcopy(moved), replace(SETTINGS, kl=kl)).step(groups).metrics
    penalty = literal_penalty(copy.deepcopy(moved).double(), groups, "token_mean")[0].item()
    for kl in (0.5, 1.0):
        assert losses[kl]["loss"] - losses[0.0]["loss"] == pytest.approx(kl * penalty, rel=1e-3)
        assert losses[kl]["grad_norm"] != losses[0.0]["grad_norm"]
    assert "kl_reference" not in losses[0.0]


def test_updates_without_a_signal_lead_back_to_the_reference():
    start = model()
    groups = without_signal(sampled_groups(start))
    learner_of(start).reference.add_logprobs(groups)
    learner = Learner(shifted(start), replace(SETTINGS, lr=3e-3))
    found = [learner.step(groups).metrics["kl_reference"] for _ in range(12)]
    assert found[-1] < 0.5 * found[0]


def test_without_the_penalty_nothing_is_added():
    start = model()
    groups = sampled_groups(start)
    learner = Learner(start, replace(SETTINGS, kl=0.0))
    update = learner.step(groups)
    assert learner.reference is None
    assert "kl_reference" not in update.metrics
    assert not any(t.reference_logprobs for group in groups for t in group.trajectories)
    assert all("reference_logprobs" not in t for t in group_state(groups[0])["trajectories"])
    (batch,) = pack(groups, estimator="grpo", micro_tokens=10_000, device=CPU)
    assert batch.reference_logprobs is None


def test_log_probs_that_are_not_finite_are_refused():
    start = model()
    learner = learner_of(start)
    with torch.no_grad():
        learner.reference.whole.model.get_output_embeddings().weight[0] = float("inf")
    with pytest.raises(ValueError, match=r"the reference gives a token .* not finite"):
        learner.step(sampled_groups(start))


def test_they_travel_with_their_group_and_are_packed_in_its_order():
    start = model()
    groups = sampled_groups(start)
    learner_of(start).reference.add_logprobs(groups)
    back = [group_from_state(json.loads(json.dumps(group_state(group)))) for group in groups]
    assert back == groups
    known = {(tuple(t.prompt), tuple(t.tokens)): t.reference_logprobs for group in groups for t in group.trajectories}
    for batch in pack(back, estimator="grpo", micro_tokens=60, device=CPU):
        for index in range(len(batch.offsets) - 1):
            mine = batch.sequence_ids == index
            tokens = tuple(batch.targets[mine].tolist())
            begin = int(batch.offsets[index])
            prompt = tuple(batch.input_ids[begin : int(batch.offsets[index + 1]) - len(tokens)].tolist())
            assert batch.reference_logprobs[mine].tolist() == known[prompt, tokens]
