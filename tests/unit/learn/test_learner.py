"""Packing and the learner: shapes by hand, the sampler's own log-probs, and updates that do not depend on the cut."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from bapo.core.bounds import solve_bounds
from bapo.core.settings import ClipSettings
from bapo.learn.diagnostics import Output, response_ess
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings, learning_rate
from bapo.learn.packing import pack
from bapo.rollout.engine import Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.types import Group, Problem, Status, Trajectory
from tests.rounding import carried, rounding
from tests.tiny.models import tiny

CPU = torch.device("cpu")
PACKED = {"estimator": "dr_grpo", "micro_tokens": 1000, "device": CPU}


def model(seed=0):
    return tiny(seed=seed, vocab_size=20, tie_word_embeddings=True, initializer_range=0.02)


def sampled_groups(policy, count=4, temperature=0.8, version=0):
    """Real rollouts with made-up rewards."""
    scheduler = Scheduler(Sampling(temperature, frozenset({1})), max_response_tokens=12)
    scheduler.admit(new_group(i, Problem(str(i), "", None), [3, 4 + i], responses=3, seed=7) for i in range(count))
    engine = LocalEngine(policy, slots=8)
    engine.load(policy.named_parameters(), version=version)
    groups = scheduler.run(engine).groups
    for group in groups:
        for index, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(index == group.id % 3)
    return groups


def by_hand(prompt, tokens, reward):
    return Trajectory(
        prompt=prompt,
        seed=0,
        tokens=tokens,
        behavior_logprobs=[-1.0 - t / 10 for t in tokens],
        entropies=[0.5] * len(tokens),
        versions=[2] * len(tokens),
        status=Status.STOPPED,
        reward=reward,
    )


def test_packing_by_hand():
    group = Group(0, Problem("p", "", None), [by_hand([5, 6], [7, 1], 1.0), by_hand([5, 6], [8, 9, 10, 1], 0.0)])
    (batch,) = pack([group], estimator="dr_grpo", micro_tokens=100, device=CPU)
    assert batch.input_ids.tolist() == [5, 6, 8, 9, 10, 1, 5, 6, 7, 1]  # longest first
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert (batch.offsets.tolist(), batch.offsets.dtype, batch.longest) == ([0, 6, 10], torch.int32, 6)
    assert batch.predicts.tolist() == [1, 2, 3, 4, 7, 8]  # the place before each response token
    assert batch.targets.tolist() == [8, 9, 10, 1, 7, 1]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.advantages.tolist() == [-0.5] * 4 + [0.5] * 2
    assert batch.loss_weights.tolist() == [0.25] * 4 + [0.5] * 2
    assert batch.behavior_logprobs.tolist() == pytest.approx([-1.8, -1.9, -2.0, -1.1, -1.7, -1.1])
    assert batch.versions.tolist() == [2] * 6
    assert batch.uses.tolist() == [0] * 6


def test_packing_normalises_each_reward_with_gdpo_and_weighs_them():
    trajectories = [by_hand([5], [7, 1], reward) for reward in (1.0, 0.0)]
    trajectories[0].rewards, trajectories[1].rewards = {"a": 1.0, "b": 2.0}, {"a": 0.0, "b": 9.0}
    groups = [Group(0, Problem("p", "", None), trajectories)]
    (batch,) = pack(groups, estimator="gdpo", weights=(1.0, 3.0), micro_tokens=100, device=CPU)
    # a gives +-1/sqrt(2) and b -+3/sqrt(2), which add up to -+sqrt(2), with deviation 2.
    assert batch.advantages.tolist() == pytest.approx([-(2**-0.5)] * 2 + [2**-0.5] * 2, rel=1e-5)  # eps is 1e-6
    cut = by_hand([5], [7], 5.0)
    cut.status, cut.rewards = Status.TRUNCATED, {"a": 0.0, "b": 5.0}
    dropped = [Group(0, Problem("p", "", None), [*trajectories, cut])]
    options = {"weights": (1.0, 3.0), "micro_tokens": 100, "device": CPU}
    (left,) = pack(dropped, estimator="gdpo", truncated="drop", **options)
    assert left.advantages.equal(batch.advantages)
    for trajectory in trajectories:
        trajectory.rewards = {}
    (batch,) = pack(groups, estimator="gdpo", micro_tokens=100, device=CPU)
    assert batch.advantages.tolist() == pytest.approx([2**-0.5] * 2 + [-(2**-0.5)] * 2, rel=1e-5)


def test_packed_tokens_know_how_often_their_group_was_used():
    problem = Problem("p", "", None)
    short = Group(0, problem, [by_hand([5], [7], 1.0), by_hand([5], [8, 1], 0.0)], uses=3)
    long = Group(1, problem, [by_hand([5], [7] * 4, 1.0), by_hand([5], [8] * 3, 0.0)])
    (batch,) = pack([short, long], estimator="grpo", micro_tokens=100, device=CPU)
    assert batch.uses.tolist() == [0] * 7 + [3] * 3  # longest first
    assert (batch.uses.dtype, batch.uses.shape) == (torch.int64, batch.targets.shape)


def test_responses_without_a_token_take_no_number():
    """Core accepts at most as many sequences as tokens, so only those that have a token are counted."""
    responses = [by_hand([5], tokens, float(bool(tokens))) for tokens in ([], [7, 1], [], [])]
    long_prompt = by_hand([5, 6, 7, 8, 9], [], 0.0)
    (batch,) = pack([Group(0, Problem("p", "", None), [*responses, long_prompt])], **PACKED)
    assert batch.offsets.diff().tolist() == [5, 3, 1, 1, 1]
    assert (batch.sequence_ids.tolist(), batch.targets.tolist()) == ([0, 0], [7, 1])
    assert batch.predicts.tolist() == [5, 6]


@pytest.mark.parametrize("micro_tokens", [8, 1000])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "balanced"])
def test_responses_without_a_token_do_not_stop_an_update(reduction, micro_tokens):
    """It is the update of the same responses without them, if the advantages are the same."""
    start, problem = model(), Problem("p", "", None)
    some = [by_hand([5, 6], [7, 1], 1.0), by_hand([5, 6], [8, 9, 1], 0.0)]
    none = [by_hand([5] * length, [], 0.5) for length in (1, 6, 7, 8)]  # their reward is the mean of the others
    settings = LearnerSettings(reduction=reduction, advantages="dr_grpo", micro_tokens=micro_tokens)
    found = []
    for responses in (some, none[:2] + some + none[2:]):
        learner = Learner(copy.deepcopy(start), settings)
        learner.version = 2
        update = learner.step([Group(0, problem, responses)])
        assert (update.skipped, update.tokens) == (None, 5)
        found.append({key: update.metrics[key] for key in ("loss", "grad_norm", "clip_low", "clip_high")})
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_one_pair_of_bounds_needs_no_pass_before_the_update(monkeypatch):
    """And the update is that of grpo with the same pair and the same bound for used tokens."""
    start = model()
    groups = [replace(group, uses=group.id % 2) for group in sampled_groups(start)]
    with torch.no_grad():
        for parameter in start.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    forward, parameters = Learner.logprobs, []
    for options in (
        {"objective": "bapo", "clip": ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2), used_low=1.0)},
        {"objective": "grpo", "options": {"used_low": 1.0}},
        {"objective": "push_once"},
    ):
        calls = []
        monkeypatch.setattr(
            Learner, "logprobs", lambda self, batch, calls=calls: calls.append(0) or forward(self, batch)
        )
        learner = Learner(copy.deepcopy(start), LearnerSettings(temperature=0.8, micro_tokens=60, **options))
        update = learner.step(groups)
        assert len(calls) > 1
        assert len(calls) == len(pack(groups, estimator="grpo", micro_tokens=60, device=CPU))
        assert not {"stop", "share_at_start"} & update.metrics.keys()
        assert (update.metrics["clip_low"], update.metrics["clip_high"]) == pytest.approx((0.8, 1.2))
        assert update.metrics["use_below"][1] == 0 < update.metrics["use_below"][0]
        parameters.append([p.detach() for p in learner.model.parameters()])
    for first, *others in zip(*parameters, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_micro_batches_hold_at_most_their_places_and_every_response_once():
    group = Group(0, Problem("p", "", None), [by_hand([5], [7] * n, float(n % 2)) for n in (3, 9, 1, 5, 5, 2)])
    padded = pack([group], estimator="grpo", micro_tokens=14, device=CPU)
    assert [batch.offsets.diff().tolist() for batch in padded] == [[10], [6, 6], [4, 3, 2]]  # 10, 2 x 6, 3 x 4 places
    packed = pack([group], estimator="grpo", micro_tokens=14, device=CPU, padded=False)
    assert [batch.offsets.diff().tolist() for batch in packed] == [[10], [6, 6], [4, 3, 2]]
    packed = pack([group], estimator="grpo", micro_tokens=16, device=CPU, padded=False)
    assert [batch.offsets.diff().tolist() for batch in packed] == [[10, 6], [6, 4, 3, 2]]  # 16 and 15 places
    for batches in (padded, packed):
        assert sum(len(batch.targets) for batch in batches) == 25
        assert all(x.data_ptr() % 64 == 0 for batch in batches for x in vars(batch).values() if torch.is_tensor(x))
    with pytest.raises(ValueError, match="without a reward"):
        pack(
            [Group(0, Problem("p", "", None), [by_hand([5], [7], None)])], estimator="grpo", micro_tokens=9, device=CPU
        )


@pytest.mark.numeric
def test_learner_sees_the_log_probs_and_entropies_the_sampler_recorded():
    policy = model()
    groups = sampled_groups(policy)
    (batch,) = pack(groups, estimator="grpo", micro_tokens=10**6, device=CPU)
    learner = Learner(policy, LearnerSettings(temperature=0.8))
    logprobs, entropy = learner.logprobs(batch)
    limits = carried(lambda: learner.logprobs(batch))
    assert max(limits) < 1e-4
    assert_close(logprobs, batch.behavior_logprobs, rtol=0, atol=limits[0])
    rows = sorted((t for g in groups for t in g.trajectories), key=lambda t: -len(t.prompt + t.tokens))
    assert_close(entropy, torch.tensor([x for t in rows for x in t.entropies]), rtol=0, atol=limits[1])


def gradients_kept(learner):
    """AdamW's first moments: gradients, where weights would show a whole step of what is nearly zero."""
    return [learner.optimizer.moments(master)["exp_avg"].clone() for master in learner.optimizer.masters]


def same_update(ours, theirs, limits):
    """Metrics and gradients within their limits, which are not so wide that anything would pass."""
    for (name, value), limit in zip(theirs[0].items(), limits[0].values(), strict=True):
        assert ours[0][name] == pytest.approx(value, rel=rounding(4), abs=limit), name
    for found, expected, limit in zip(ours[1], theirs[1], limits[1], strict=True):
        assert_close(found, expected, rtol=0, atol=limit)
    assert max(limits[1]) < 1e-3 * max(float(gradient.abs().max()) for gradient in theirs[1])


@pytest.mark.numeric
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length", "balanced"])
@pytest.mark.parametrize(
    ("objective", "clip"),
    [
        ("bapo", ClipSettings(target_share=0.55)),
        ("bapo", ClipSettings(target_share=0.55, used_low=1.0)),
        ("bapo", ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2), used_low=1.0)),
        ("push_once", ClipSettings()),
        ("brake", ClipSettings()),
        ("grpo", ClipSettings()),
        ("gspo", ClipSettings()),
    ],
)
def test_an_update_does_not_depend_on_how_it_is_cut(objective, clip, reduction):
    start = model()
    groups = [replace(group, uses=group.id % 2) for group in sampled_groups(start)]
    with torch.no_grad():  # a learner that has moved on: ratios differ from 1
        for parameter in start.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    settings = LearnerSettings(
        objective=objective,
        clip=clip,
        reduction=reduction,
        length=12,
        temperature=0.8,
        lr=1e-3,
    )

    def learner_of_it():
        return Learner(copy.deepcopy(start), settings)

    def updated(learner, micro_tokens=10**6):
        update = learner.step_on(pack(groups, estimator="grpo", micro_tokens=micro_tokens, device=CPU))
        assert (update.version, learner.version) == (1, 1)
        assert any(not torch.equal(a, b) for a, b in zip(learner.model.parameters(), start.parameters(), strict=True))
        return update.metrics, gradients_kept(learner)

    whole, limits = updated(learner_of_it()), carried(updated, given=learner_of_it, draws=2)
    for micro_tokens in (60, 1):
        same_update(updated(learner_of_it(), micro_tokens), whole, limits)


def literal_logprobs(start, trajectory, temperature, dtype=torch.float64):
    """Log-probs of a response from the logits of the model itself, one token at a time, in float64."""
    logits = start(torch.tensor([trajectory.prompt + trajectory.tokens])).logits[0].to(dtype) / temperature
    places = range(len(trajectory.prompt) - 1, len(logits) - 1)
    return torch.stack(
        [logits[p][token] - logits[p].logsumexp(0) for p, token in zip(places, trajectory.tokens, strict=True)]
    )


def literal_balanced_loss(start, groups):
    """GRPO's clip at 0.8 and 1.2, averaged as balanced, with A = R - mean: one set of responses after the other."""
    total, responses = 0.0, 0
    for group in groups:
        mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
        responses += len(group.trajectories)
        for members in ([t for t in group.trajectories if (t.reward > mean) is sign] for sign in (True, False)):
            losses = []
            for t in members:
                for now, sampled in zip(literal_logprobs(start, t, 0.8), t.behavior_logprobs, strict=True):
                    ratio, advantage = (now - sampled).exp(), t.reward - mean
                    losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
            if losses:
                total = total + len(members) * torch.stack(losses).mean()
    return total / responses


@pytest.mark.numeric
@pytest.mark.parametrize(("micro_tokens", "cuts"), [(10_000, 1), (90, 2), (60, 3)])
def test_a_balanced_loss_and_its_gradient_are_those_of_a_literal_loop(micro_tokens, cuts):
    start = model()
    groups = sampled_groups(start)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    options = {"objective": "grpo", "advantages": "dr_grpo", "reduction": "balanced", "temperature": 0.8}
    settings = LearnerSettings(micro_tokens=micro_tokens, **options)
    exact = copy.deepcopy(start).double()
    loss = literal_balanced_loss(exact, groups)
    loss.backward()
    gradient = sum(float(p.grad.square().sum()) for p in exact.parameters()) ** 0.5

    def learner_of_it():
        return Learner(copy.deepcopy(start), settings)

    def told(learner):
        metrics = learner.step(groups).metrics
        return {name: metrics[name] for name in ("loss", "grad_norm")}

    packed = learner_of_it().packed
    assert len(pack(groups, estimator="dr_grpo", micro_tokens=micro_tokens, device=CPU, padded=not packed)) == cuts
    found, limits = told(learner_of_it()), carried(told, given=learner_of_it)
    for name, value in (("loss", loss.item()), ("grad_norm", gradient)):
        limit = limits[name] + rounding(4, value)
        assert found[name] == pytest.approx(value, rel=0, abs=limit)
        assert limit < 1e-2 * value


@pytest.mark.parametrize(("truncated", "rewards"), [("keep", (1, 0.5, 0)), ("mask", (1, 0.5, 0)), ("drop", (1, 0))])
def test_truncated_responses_by_hand(truncated, rewards):
    """The second of three is cut off: it is passed, or only its reward counts, or not even that."""
    responses = [by_hand([5, 6], [7] * length, reward) for length, reward in ((1, 1.0), (4, 0.5), (2, 0.0))]
    responses[1].status = Status.TRUNCATED
    responses[1].reward = 0.8
    (batch,) = pack([Group(0, Problem("p", "", None), responses, uses=3)], **PACKED, truncated=truncated)
    mean = {"drop": 0.5}.get(truncated, 0.6)
    lengths = {"keep": [4, 2, 1]}.get(truncated, [2, 1])
    advantages = {2: 0 - mean, 1: 1 - mean, 4: 0.8 - mean}
    assert batch.offsets.diff().tolist() == [2 + length for length in lengths]
    expected = [advantages[length] for length in lengths for _ in range(length)]
    assert batch.advantages.tolist() == pytest.approx(expected, rel=rounding(4))
    positive = 2 / 5 if truncated == "keep" else 1.0
    weights = [{4: positive, 2: 0.5, 1: positive}[length] for length in lengths for _ in range(length)]
    assert batch.loss_weights.tolist() == pytest.approx(weights)
    assert batch.uses.tolist() == [3] * sum(lengths)


def literal_truncated_loss(start, groups, truncated, reduction):
    """GRPO's clip at 0.8 and 1.2 with A = R - mean, over the responses that are not cut off, one after the other."""
    total, tokens, responses = 0.0, 0, 0
    for group in groups:
        whole = [t for t in group.trajectories if t.status is Status.STOPPED]
        compared = whole if truncated == "drop" else group.trajectories
        mean = sum(t.reward for t in compared) / max(1, len(compared))
        for t in whole:
            advantage = t.reward - mean
            ratios = (literal_logprobs(start, t, 0.8) - torch.tensor(t.behavior_logprobs, dtype=torch.float64)).exp()
            losses = -torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.2) * advantage)
            total = total + (losses.mean() if reduction == "sequence_mean" else losses.sum())
            tokens, responses = tokens + len(losses), responses + 1
    return total / {"token_mean": tokens, "sequence_mean": responses, "fixed_length": 12 * responses}[reduction]


@pytest.mark.numeric
@pytest.mark.parametrize("micro_tokens", [60, 10_000])
@pytest.mark.parametrize(
    ("truncated", "reduction"), [("mask", "token_mean"), ("mask", "sequence_mean"), ("drop", "fixed_length")]
)
def test_loss_and_gradient_without_truncated_responses_are_those_of_a_literal_loop(truncated, reduction, micro_tokens):
    start = model()
    groups = sampled_groups(start)
    cut = [t.status is Status.TRUNCATED for group in groups for t in group.trajectories]
    assert 0 < sum(cut) < len(cut)
    moved = moved_on(start)
    options = {"objective": "grpo", "advantages": "dr_grpo", "temperature": 0.8, "length": 12}
    settings = LearnerSettings(reduction=reduction, truncated=truncated, micro_tokens=micro_tokens, **options)
    exact = copy.deepcopy(moved).double()
    loss = literal_truncated_loss(exact, groups, truncated, reduction)
    loss.backward()
    gradient = sum(float(p.grad.square().sum()) for p in exact.parameters()) ** 0.5

    def learner_there():
        return Learner(copy.deepcopy(moved), settings)

    def told(learner):
        metrics = learner.step(groups).metrics
        return {name: metrics[name] for name in ("loss", "grad_norm", "tokens")}

    found, limits = told(learner_there()), carried(told, given=learner_there)
    assert found["tokens"] == sum(len(t.tokens) for g in groups for t in g.trajectories if t.status is Status.STOPPED)
    for name, value in (("loss", loss.item()), ("grad_norm", gradient)):
        limit = limits[name] + rounding(4, abs(value))
        assert found[name] == pytest.approx(value, rel=0, abs=limit)
        assert limit < 1e-2 * abs(value)


def test_an_update_knows_of_a_masked_response_only_its_reward():
    """It is the update of the same groups whose truncated responses have no token, bit for bit."""
    start = model()
    groups = sampled_groups(start)
    nothing = {name: [] for name in ("tokens", "behavior_logprobs", "entropies", "versions")}
    emptied = [
        replace(g, trajectories=[replace(t, **nothing) if t.status is Status.TRUNCATED else t for t in g.trajectories])
        for g in groups
    ]
    kept = []
    for given, truncated in ((groups, "mask"), (emptied, "keep"), (groups, "keep")):
        learner = Learner(moved_on(start), LearnerSettings(truncated=truncated, temperature=0.8))
        metrics = learner.step(given).metrics
        kept.append(([metrics[name] for name in ("tokens", "clip_high", "positive_tokens")], gradients_kept(learner)))
    (ours, first), (theirs, second), (all_of_them, _) = kept
    assert ours == theirs != all_of_them
    scale = max(float(gradient.abs().max()) for gradient in first)
    for one, other in zip(first, second, strict=True):  # a pass with other rows, and so other sums
        assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)


def moved_on(start, size=0.05):
    """The same model after some updates, so that responses have risen and fallen."""
    moved = copy.deepcopy(start)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return moved


OPSM = LearnerSettings(opsm=0.02, temperature=0.8, advantages="dr_grpo", micro_tokens=10_000)


@pytest.mark.parametrize("opsm_on", ["all", "used"])
def test_opsm_beside_grpo_is_the_objective_opsm(opsm_on):
    start = model()
    groups = [replace(group, uses=group.id % 2) for group in sampled_groups(start)]
    used_only = {"used_only": 1} if opsm_on == "used" else {}
    found, kept = [], []
    for settings in (
        replace(OPSM, objective="grpo", opsm_on=opsm_on),
        replace(OPSM, objective="opsm", opsm=None, options={"delta": 0.02, **used_only}),
        replace(OPSM, objective="grpo", opsm=None),
    ):
        learner = Learner(moved_on(start), settings)
        metrics = learner.step(groups).metrics
        found.append([metrics[name] for name in ("loss", "grad_norm")])
        kept.append(gradients_kept(learner))
    assert found[0] == found[1] != found[2]
    assert all(torch.equal(a, b) for a, b in zip(kept[0], kept[1], strict=True))


@pytest.mark.numeric
@pytest.mark.parametrize(
    "options",
    [
        {"clip": ClipSettings(target_share=0.55)},
        {"clip": ClipSettings(target_share=0.55, brake=0.05), "sensor": "update"},
        {"objective": "push_once", "opsm_on": "used"},
        {"objective": "brake", "sensor": "update"},
        {"objective": "gspo", "reduction": "balanced"},
    ],
)
def test_opsm_is_advantage_0_for_negative_responses_that_have_fallen(options):
    """Whatever the objective and however the update is cut: bounds, drift, loss and gradient know no dropped token."""
    start = model()
    groups = [replace(group, uses=group.id % 2) for group in sampled_groups(start)]
    settings, moved = replace(OPSM, **options), moved_on(start)
    batch = pack(groups, estimator="dr_grpo", micro_tokens=10_000, device=CPU)[0]
    with torch.no_grad():
        logprobs = Learner(moved, settings).logprobs(batch)[0]
    advantages, dropped = batch.advantages.clone(), 0
    for id in range(int(batch.sequence_ids.max()) + 1):
        here = batch.sequence_ids == id
        fallen = (batch.behavior_logprobs - logprobs)[here].double().mean()
        used = settings.opsm_on == "all" or bool(batch.uses[here].any())
        if advantages[here][0] < 0 and fallen > 0.02 and used:
            advantages[here] = 0.0
            dropped += 1
    assert 0 < dropped < len(groups) * 2
    plain = replace(settings, opsm=None, opsm_on="all")

    def learner_of_it():
        return Learner(copy.deepcopy(moved), plain)

    def updated(learner, batches=None):
        update = learner.step_on(batches or [replace(batch, advantages=advantages)])
        return update.metrics, gradients_kept(learner)

    expected, limits = updated(learner_of_it()), carried(updated, given=learner_of_it, draws=2)
    for micro_tokens in (10_000, 60):
        batches = pack(groups, estimator="dr_grpo", micro_tokens=micro_tokens, device=CPU)
        same_update(updated(Learner(copy.deepcopy(moved), settings), batches), expected, limits)


def test_m2po_refuses_a_cut_update():
    policy = model()
    batches = pack(sampled_groups(policy), estimator="grpo", micro_tokens=1, device=CPU)
    with pytest.raises(ValueError, match=r"m2po.*Raise learn\.micro_tokens"):
        Learner(policy, LearnerSettings(objective="m2po", temperature=0.8)).step_on(batches)


def test_a_model_that_changes_its_logits_after_the_head_is_refused():
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    scaled = GraniteForCausalLM(GraniteConfig(vocab_size=20, logits_scaling=8.0, initializer_range=0.5, **sizes))
    with pytest.raises(ValueError, match="changes its logits after the output head"):
        Learner(scaled, LearnerSettings())


def test_staleness_is_counted_per_token():
    policy = model()
    groups = sampled_groups(policy, version=3)
    learner = Learner(policy, LearnerSettings(temperature=0.8))
    learner.version = 5
    metrics = learner.step_on(pack(groups, estimator="grpo", micro_tokens=10**6, device=CPU)).metrics
    assert metrics["staleness_mean"] == metrics["staleness_max"] == 2
    assert metrics["staleness_histogram"][2] == metrics["tokens"]


def test_a_gradient_that_is_not_finite_changes_nothing():
    policy = model()
    groups = sampled_groups(policy)
    learner = Learner(policy, LearnerSettings(temperature=0.8))
    before = [p.detach().clone() for p in policy.parameters()]
    for p in policy.parameters():
        p.register_hook(lambda gradient: gradient * float("nan"))
    update = learner.step_on(pack(groups, estimator="grpo", micro_tokens=10**6, device=CPU))
    assert update.skipped.cause.startswith("the gradient norm is nan although all log-probs are finite")
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert learner.version == update.version == 1
    assert not learner.optimizer.moments(learner.optimizer.masters[0])


@pytest.mark.parametrize("micro_tokens", [10**6, 40])
@pytest.mark.parametrize(
    "clip", [ClipSettings.preset("paper"), ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2))], ids=["search", "fixed"]
)
def test_an_update_is_skipped_where_the_model_is_not_finite_and_the_next_one_is_as_if_it_had_not_been(
    micro_tokens, clip
):
    policy, twin = model(), model()
    settings = LearnerSettings(temperature=0.8, lr=1e-2, clip=clip, micro_tokens=micro_tokens)
    learner, other = Learner(policy, settings), Learner(twin, settings)
    groups = sampled_groups(policy)
    learner.step(groups)
    other.step(groups)
    weight = next(policy.parameters())
    sound = weight.detach().clone()
    with torch.no_grad():
        weight[4, 0] = float("inf")
    skipped = learner.step(groups)
    assert "weights of the model are not finite (the first is model.embed_tokens.weight)" in skipped.skipped.cause
    assert skipped.metrics == {"tokens": skipped.tokens, "groups": 4.0}
    tokens = skipped.skipped.tokens
    assert sorted(tokens["behavior_logprobs"].tolist()) == pytest.approx(
        sorted(x for group in groups for t in group.trajectories for x in t.behavior_logprobs)
    )
    assert not tokens["logprobs"].isfinite().all()
    assert len(tokens["sequence_ids"].unique()) == 12
    with torch.no_grad():
        weight.copy_(sound)
    other.version += 1
    assert learner.step(groups) == other.step(groups)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), twin.parameters(), strict=True))


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    policy = model()
    learner = Learner(policy, LearnerSettings(temperature=0.8))
    learner.step(sampled_groups(policy))
    next(iter(learner.optimizer._adamw.state.values()))["exp_avg"][0, 0] = float("nan")
    with pytest.raises(
        FloatingPointError,
        match=r"exp_avg\.model\.embed_tokens\.weight holds a NaN or an infinity, so this state is not saved",
    ):
        learner.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_learning_rate_schedules_by_hand():
    def at(update, schedule):
        return learning_rate(update, LearnerSettings(lr=1.0, warmup_updates=4, schedule=schedule, total_updates=12))

    assert [at(u, "constant") for u in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [at(u, "linear") for u in (4, 8, 12, 99)] == [1.0, 0.5, 0.0, 0.0]
    assert [at(u, "cosine") for u in (4, 8, 12)] == pytest.approx([1.0, 0.5, 0.0])


def test_fresh_responses_leave_the_learning_rate_alone():
    policy = model()
    learner = Learner(policy, LearnerSettings(temperature=0.8, lr=0.003, ess_reference=1.0))
    batches = pack(sampled_groups(policy), estimator="grpo", micro_tokens=60, device=CPU)
    with torch.no_grad():  # to the bit, where the sampler's own log-probs agree to rounding only
        batches = [replace(batch, behavior_logprobs=learner.logprobs(batch)[0]) for batch in batches]
    metrics = learner.step_on(batches).metrics
    assert (metrics["response_ess"], metrics["lr"]) == (1.0, 0.003)


@pytest.mark.numeric
@pytest.mark.parametrize(("micro_tokens", "reference"), [(10**6, 1.0), (60, 1.0), (1, 0.9), (60, 0.05)])
def test_stale_responses_scale_the_learning_rate_by_their_effective_sample_size(micro_tokens, reference):
    policy = model()
    groups = sampled_groups(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    settings = LearnerSettings(
        objective="grpo", temperature=0.8, lr=1e-3, warmup_updates=2, ess_reference=reference, micro_tokens=micro_tokens
    )
    policy_before = copy.deepcopy(policy)
    learner = Learner(policy, settings)
    weights = []
    for group in groups:
        for trajectory in group.trajectories:
            ids = torch.tensor([trajectory.prompt + trajectory.tokens])
            with torch.no_grad():
                logprobs = (policy(ids).logits[0].double() / 0.8).log_softmax(-1)
            first = len(trajectory.prompt) - 1
            taken = [logprobs[first + i, token].item() for i, token in enumerate(trajectory.tokens)]
            weights.append(math.exp(math.fsum(taken) - math.fsum(trajectory.behavior_logprobs)))
    ess = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / len(weights)
    assert 0.05 < ess < 0.9
    before = [p.detach().clone() for p in policy.parameters()]
    metrics = learner.step(groups).metrics
    limit = carried(
        lambda learner: learner.step(groups).metrics["response_ess"],
        given=lambda: Learner(copy.deepcopy(policy_before), settings),
    )
    assert metrics["response_ess"] == pytest.approx(ess, rel=0, abs=limit)
    assert limit < 1e-3 * ess
    assert metrics["lr"] == pytest.approx(0.5e-3 * math.sqrt(min(1, ess / reference)), rel=limit / ess + rounding(4))
    moved = max((a - b).abs().max().item() for a, b in zip(before, policy.parameters(), strict=True))
    # rel: g / (|g| + 1e-8) for the largest gradients, a decay of 0.01 at most, and rounding of weights below 1
    assert moved == pytest.approx(metrics["lr"], rel=1e-2)  # Adam's first step is the learning rate that was used


def test_the_effective_sample_size_neither_overflows_nor_vanishes():
    # Products of 40 and of 80 ratios of e^10 would overflow: the two longest share all the weight. Products of as many
    # ratios of e^-10 would vanish: among the three long ones it is the shortest that has all of it.
    for log_ratio, lengths, expected in (
        (10.0, (80, 80, 40, 1), 2 / 4),
        (-10.0, (80, 80, 40, 60), 1 / 4),
        (-10.0, (40, 80, 40, 60), 2 / 4),
    ):
        responses = [by_hand([5], [7] * n, 1.0) for n in lengths]
        (batch,) = pack([Group(0, Problem("p", "", None), responses)], estimator="grpo", micro_tokens=999, device=CPU)
        count = sum(lengths)
        batch = replace(batch, behavior_logprobs=torch.full((count,), -20.0))
        output = Output(batch, torch.full((count,), -20.0 + log_ratio), torch.zeros(count), None)
        assert response_ess([output], None).item() == pytest.approx(expected)


def test_a_step_that_failed_half_way_leaves_no_gradient_behind(monkeypatch):
    policy = model()
    groups = sampled_groups(policy)
    batches = pack(groups, estimator="grpo", micro_tokens=40, device=CPU, padded=True)
    assert len(batches) > 1
    whole, broken = (Learner(copy.deepcopy(policy), LearnerSettings(objective="grpo")) for _ in range(2))
    forward = broken.logprobs

    def fails_on_the_last(batch):
        if batch is batches[-1]:
            raise RuntimeError("out of memory")
        return forward(batch)

    monkeypatch.setattr(broken, "logprobs", fails_on_the_last)
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.step_on(batches)
    monkeypatch.setattr(broken, "logprobs", forward)
    assert broken.step_on(batches).metrics["grad_norm"] == whole.step_on(batches).metrics["grad_norm"]


def test_a_head_that_adds_something_is_refused():
    policy = model()
    policy.lm_head = type("Adapted", (torch.nn.Linear,), {})(32, 20, bias=False)
    with pytest.raises(ValueError, match="Keep adapters off the head"):
        Learner(policy, LearnerSettings())


def test_one_optimizer_for_16_bit_weights():
    policy = model().bfloat16()
    Learner(policy, LearnerSettings())
    with pytest.raises(AssertionError, match="another optimizer already takes the gradients"):
        Learner(policy, LearnerSettings())


def test_scope_microbatch_solves_bounds_for_each_part_and_reports_their_mean():
    policy = model()
    groups = sampled_groups(policy)
    with torch.no_grad():  # a learner that has moved on, so that ratios spread
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    batches = pack(groups, estimator="grpo", micro_tokens=40, device=CPU)
    assert len(batches) > 2
    clip = ClipSettings(low=(0.6, 0.9), high=(1.05, 3.0))
    expected = []
    for batch in batches:
        logprobs, _ = Learner(copy.deepcopy(policy), LearnerSettings(temperature=0.8)).logprobs(batch)
        ratio = (logprobs - batch.behavior_logprobs).exp().detach()
        expected.append(solve_bounds(ratio, batch.advantages, torch.ones_like(ratio, dtype=torch.bool), clip))
    assert len({(float(bounds.low), float(bounds.high)) for bounds in expected}) > 1
    settings = LearnerSettings(temperature=0.8, clip=clip, scope="microbatch")
    metrics = Learner(copy.deepcopy(policy), settings).step_on(batches).metrics
    for name, values in (("clip_low", [b.low for b in expected]), ("clip_high", [b.high for b in expected])):
        assert metrics[name] == pytest.approx(float(torch.stack(values).mean()), rel=1e-6)
    together = Learner(copy.deepcopy(policy), LearnerSettings(temperature=0.8, clip=clip)).step_on(batches).metrics
    assert (together["clip_low"], together["clip_high"]) != (metrics["clip_low"], metrics["clip_high"])
