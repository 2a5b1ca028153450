"""The Entropy-Clip Rule on tabular softmax policies, where the true change of entropy can be had."""

import math

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipBounds, ClipSettings
from bapo.core.entropy_rule import (
    QUADRANTS,
    predicted_entropy_change,
    quadrant_masses,
    ratio_profile,
    ratio_statistics,
    share_statistics,
    staleness_histogram,
    update_statistics,
)
from bapo.core.tokens import Tokens, clipped_surrogate, retained_by
from bapo.types import LOG_RATIO_EDGES
from tests.reference import exact_entropy_change

CLIPS = [(0.8, 1.2), (0.8, 1.28), (0.6, 3.0), (0.9, 1.05), (0.0, 1e9)]


def tabular(seed=0, states=5, actions=7):
    """Logits now, logits that sampled, an advantage per action."""
    generator = torch.Generator().manual_seed(seed)
    behavior = torch.randn(states, actions, generator=generator, dtype=torch.float64)
    logits = behavior + 0.5 * torch.randn(states, actions, generator=generator, dtype=torch.float64)
    return logits, behavior.log_softmax(-1), torch.randn(states, actions, generator=generator, dtype=torch.float64)


def entropy_of(logits):
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def gradient_step(logits, behavior_logprobs, advantages, low, high, eta):
    """One plain gradient step on E_{y~behavior}[clipped surrogate], the expectation taken exactly."""
    logits = logits.clone().requires_grad_()
    ratio = (logits.log_softmax(-1) - behavior_logprobs).exp()
    loss = (behavior_logprobs.exp() * clipped_surrogate(ratio, advantages, low, high).loss).sum()
    return (logits - eta * torch.autograd.grad(loss, logits)[0]).detach()


@pytest.mark.parametrize(("low", "high"), CLIPS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_predicted_change_of_entropy_is_exact_to_first_order(low, high, seed):
    logits, behavior, advantages = tabular(seed)
    probs = logits.softmax(-1)
    ratio = (logits.log_softmax(-1) - behavior).exp()
    predicted = exact_entropy_change(probs, advantages, retained_by(ratio, advantages, low, high))
    errors = []
    for eta in (1e-2, 1e-3, 1e-4):
        moved = gradient_step(logits, behavior, advantages, low, high, eta)
        true_change = entropy_of(moved) - entropy_of(logits)
        errors.append(((true_change - eta * predicted).abs().max() / eta).item())
    # The relative error falls linearly with the step: ten times smaller steps, about ten times smaller error.
    assert errors[0] < 0.1
    assert errors[1] < errors[0] / 5
    assert errors[2] < errors[1] / 5


def one_state(low, high, seed=0):
    """Every action once from a uniform behaviour policy: then a mean over tokens is an expectation."""
    logits, _, advantages = tabular(seed, states=1)
    logprobs = logits.log_softmax(-1).squeeze(0)
    behavior = torch.full_like(logprobs, -math.log(7))
    tokens = Tokens(logprobs, behavior, advantages.squeeze(0), torch.ones(7, dtype=torch.bool))
    return tokens, entropy_of(logits).expand(7), retained_by(tokens.ratio, tokens.advantages, low, high)


@pytest.mark.parametrize(("low", "high"), CLIPS)
def test_estimate_from_tokens_equals_the_exact_rule_when_every_action_is_sampled_once(low, high):
    tokens, entropy, retained = one_state(low, high)
    exact = exact_entropy_change(tokens.logprobs.exp(), tokens.advantages, retained)
    assert_close(predicted_entropy_change(tokens, entropy, retained), exact)


def test_the_four_quadrants_push_entropy_as_the_table_says():
    # Two actions of probability 0.8 and 0.2: reward the likely one and entropy falls, the rare one and it rises.
    probs, keep = torch.tensor([0.8, 0.2], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    for advantages, sign in (([1.0, 0.0], -1), ([-1.0, 0.0], 1), ([0.0, 1.0], 1), ([0.0, -1.0], -1)):
        change = exact_entropy_change(probs, torch.tensor(advantages, dtype=torch.float64), keep)
        assert change * sign > 0


def test_blocking_rare_positives_lowers_the_predicted_entropy():
    probs = torch.tensor([0.8, 0.2], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.5], dtype=torch.float64)
    free = exact_entropy_change(probs, advantages, torch.tensor([True, True]))
    clipped = exact_entropy_change(probs, advantages, torch.tensor([True, False]))
    assert clipped < free


def test_quadrant_masses_by_hand():
    # Entropy 0.5 everywhere: high probability is log p > -0.5. Ratios 1 or 2, advantages +-.
    logprobs = torch.tensor([-0.1, -0.1, -2.0, -2.0, -2.0], dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -2.0, 0.0], dtype=torch.float64)
    tokens = Tokens(logprobs, logprobs - ratio.log(), advantages, torch.ones(5, dtype=torch.bool))
    retained = retained_by(tokens.ratio, advantages, 0.8, 1.2)  # blocks the third
    # Retained signed advantages 1, -1, -2 have mean -2/3: only the positive ones are high.
    # Masses r|A| are 1, 1, 2, 2; their sum is 6.
    masses = quadrant_masses(tokens, torch.full((5,), 0.5), retained)
    expected = dict.fromkeys((f"{q}_{fate}" for q in QUADRANTS for fate in ("retained", "blocked")), 0.0)
    expected |= {
        "high_prob_high_adv_retained": 1 / 6,
        "high_prob_low_adv_retained": 1 / 6,
        "low_prob_high_adv_blocked": 2 / 6,
        "low_prob_low_adv_retained": 2 / 6,
    }
    assert {name: value.item() for name, value in masses.items()} == pytest.approx(expected)


def test_ratio_statistics_by_hand():
    ratio = torch.tensor([0.5, 1.0, 2.0, 7.0], dtype=torch.float64)
    behavior = torch.full((4,), -3.0, dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    statistics = ratio_statistics(Tokens(behavior + ratio.log(), behavior, torch.zeros(4).double(), mask))
    assert statistics["ratio_p01"] == pytest.approx(0.5)
    assert statistics["ratio_p50"] == pytest.approx(1.0)
    assert statistics["ratio_p99"] == statistics["ratio_max"] == pytest.approx(2.0)
    # mean of r - 1 - log r: (-0.5 + log 2 + 0 + 1 - log 2) / 3
    assert statistics["kl"] == pytest.approx(0.5 / 3)
    assert statistics["ess"] == pytest.approx(3.5**2 / (3 * 5.25))


def test_on_policy_tokens_have_no_kl_and_full_sample_size():
    logprobs = -torch.rand(50)
    statistics = ratio_statistics(Tokens(logprobs, logprobs, torch.ones(50), torch.ones(50).bool()))
    assert statistics["kl"] == 0
    assert statistics["ess"] == 1


@pytest.mark.parametrize("weight", ["none", "rollout_prob"])
def test_share_before_clipping_at_the_fixed_clip_and_at_the_bounds(weight):
    ratio = torch.tensor([1.5, 1.0, 0.5, 1.0])
    behavior = torch.tensor([-1.0, -2.0, -1.0, -2.0])
    tokens = Tokens(behavior + ratio.log(), behavior, torch.tensor([1.0, 1.0, -2.0, -1.0]), torch.ones(4).bool())
    shares = share_statistics(
        tokens,
        ClipSettings(weight=weight),
        ClipBounds(torch.tensor(0.8), torch.tensor(2.0), torch.tensor(0.0)),
    )
    a, b = (math.exp(-1), math.exp(-2)) if weight == "rollout_prob" else (1.0, 1.0)
    assert shares["share_unclipped"] == pytest.approx((1.5 * a + b) / (1.5 * a + b + a + b), rel=1e-6)
    assert shares["share_fixed"] == pytest.approx(0.5)
    assert shares["share"] == pytest.approx((1.5 * a + b) / (1.5 * a + 2 * b), rel=1e-6)


def test_staleness_histogram_counts_tokens_by_age():
    versions = torch.tensor([[5, 5, 4], [2, 0, 9]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert staleness_histogram(versions, mask, version=5, bins=4).tolist() == [2, 1, 0, 1, 1]
    with pytest.raises(ValueError, match="newer than the learner's version=4"):
        staleness_histogram(versions, mask, version=4, bins=4)


def test_update_statistics_gathers_everything():
    tokens, entropy, retained = one_state(0.8, 1.2)
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2), torch.tensor(0.5))
    metrics = update_statistics(tokens, retained, settings=ClipSettings(), bounds=bounds, entropy=entropy)
    wanted = {
        "share_unclipped",
        "share_fixed",
        "share",
        "entropy",
        "predicted_entropy_change",
        "kl",
        "ess",
        "ratio_p99",
    }
    wanted |= {"clip_fraction_positive", "clip_fraction_negative", "positive_tokens", "negative_tokens"}
    wanted |= {f"{quadrant}_{fate}" for quadrant in QUADRANTS for fate in ("retained", "blocked")}
    assert wanted <= metrics.keys()
    assert sum(metrics[f"{q}_{f}"] for q in QUADRANTS for f in ("retained", "blocked")).item() == pytest.approx(1)
    assert metrics["entropy"].item() == pytest.approx(entropy[0].item())
    assert "entropy" not in update_statistics(tokens, retained, settings=ClipSettings(), bounds=None)


def test_masked_tokens_count_nowhere():
    ratio = torch.tensor([0.78, 1.25, 3.0], dtype=torch.float64)
    behavior = torch.full((3,), -2.0, dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0, 5.0], dtype=torch.float64)
    tokens = Tokens(behavior + ratio.log(), behavior, advantages, torch.tensor([True, True, False]))
    retained = retained_by(tokens.ratio, advantages, 0.8, 1.2)
    masses = quadrant_masses(tokens, torch.full((3,), 0.5), retained)
    assert sum(masses.values()).item() == pytest.approx(1)
    assert masses["low_prob_high_adv_blocked"].item() == pytest.approx(1.25 / 2.03)
    shares = share_statistics(tokens, ClipSettings(), None)
    assert shares["share_unclipped"].item() == pytest.approx(1.25 / 2.03)
    assert shares["share_fixed"] == 0.0  # both tokens lie just outside (0.8, 1.2)


def test_zero_probability_adds_nothing():
    probs = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    change = exact_entropy_change(probs, torch.tensor([1.0, 0.0, 9.0], dtype=torch.float64), torch.ones(3).bool())
    assert change.item() == pytest.approx(0.0, abs=1e-12)


def test_ratio_profile_is_what_a_loop_over_tokens_counts():
    generator = torch.Generator().manual_seed(3)
    behavior = -3 * torch.rand(40, 25, generator=generator, dtype=torch.float64)
    logprobs = (behavior + 0.4 * torch.randn(40, 25, generator=generator, dtype=torch.float64)).clamp(max=0)
    logprobs[0, :3] = behavior[0, :3]  # ratio 1
    entropy = torch.rand(40, 25, generator=generator, dtype=torch.float64)
    mask = torch.rand(40, 25, generator=generator) < 0.7
    entropy[~mask] = math.nan  # what the mask leaves out has no say
    profile = ratio_profile(Tokens(logprobs, behavior, torch.ones_like(behavior), mask), entropy)

    bins = len(LOG_RATIO_EDGES) + 1
    count, prob, nats = [0] * bins, [0.0] * bins, [0.0] * bins
    for row, column in mask.nonzero().tolist():
        log_ratio = float(logprobs[row, column] - behavior[row, column])
        here = sum(log_ratio >= edge for edge in LOG_RATIO_EDGES)
        count[here] += 1
        prob[here] += math.exp(logprobs[row, column])
        nats[here] += float(entropy[row, column])
    assert min(count) > 0
    assert profile["ratio_histogram"].tolist() == count
    assert_close(profile["ratio_prob"], torch.tensor(prob).double() / torch.tensor(count))
    assert_close(profile["ratio_entropy"], torch.tensor(nats).double() / torch.tensor(count))


def test_ratio_profile_of_empty_bins_is_zero():
    one = torch.full((4,), -1.0)
    profile = ratio_profile(Tokens(one, one, one, torch.ones(4, dtype=torch.bool)), entropy=torch.full((4,), 0.5))
    middle = len(LOG_RATIO_EDGES) // 2
    assert profile["ratio_histogram"].tolist() == [0.0] * middle + [4.0] + [0.0] * middle
    assert profile["ratio_entropy"].tolist() == [0.0] * middle + [0.5] + [0.0] * middle
