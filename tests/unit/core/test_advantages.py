import math
from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from bapo.core.advantages import ADVANTAGES, dr_grpo, gae, gdpo, grpo, rloo, to_tokens
from bapo.core.settings import AdvantageName

REWARDS = torch.tensor([1.0, 0.0, 5.0, 0.0, 1.0, 5.0, 2.0])
GROUPS = torch.tensor([0, 0, 1, 0, 0, 1, 2])  # sizes 4, 2, 1; group 1 is all equal


def test_grpo_by_hand():
    # Group 0: mean 1/2, unbiased std sqrt(4 * 1/4 / 3) = 1/sqrt(3)
    result = grpo(REWARDS, GROUPS, eps=0.0)
    unit = 0.5 * math.sqrt(3)
    assert_close(result.advantages, torch.tensor([unit, -unit, 0, -unit, unit, 0, 0]))
    assert result.zero_variance.tolist() == [False, True, True]


def test_dr_grpo_does_not_divide():
    assert_close(dr_grpo(REWARDS, GROUPS).advantages, torch.tensor([0.5, -0.5, 0, -0.5, 0.5, 0, 0]))


def test_rloo_compares_with_the_others():
    # R = 1 against the mean 1/3 of the other three; R = 0 against 2/3.
    assert_close(rloo(REWARDS, GROUPS).advantages, torch.tensor([2 / 3, -2 / 3, 0, -2 / 3, 2 / 3, 0, 0]))


def test_gdpo_by_hand():
    # Group 0 earns 1 or 0 twice; group 1 differs in the second reward only; group 2 in none.
    first = torch.tensor([1.0, 0.0, 5.0, 1.0, 0.0, 5.0, 2.0])
    second = torch.tensor([1.0, 1.0, 2.0, 0.0, 0.0, 4.0, 2.0])
    groups = torch.tensor([0, 0, 1, 0, 0, 1, 2])
    result = gdpo(torch.stack([first, second], 1), groups, weights=[1.0, 0.5], eps=0.0)
    # In group 0, both rewards become u = +-sqrt(3)/2; in group 1, the second one becomes +-1/sqrt(2).
    u, v = math.sqrt(3) / 2, 1 / math.sqrt(2)
    total = torch.tensor([1.5 * u, -0.5 * u, -0.5 * v, 0.5 * u, -1.5 * u, 0.5 * v, 0.0])
    # Their mean is 0, the sum of their squares 5 u^2 + v^2 / 2 = 4, over 7 responses.
    assert_close(result.advantages, total / math.sqrt(4 / 6))
    assert result.zero_variance.tolist() == [False, False, True]


def test_gdpo_leaves_out_rewards_that_do_not_apply():
    rewards = torch.tensor([[1.0, 3.0], [math.nan, 3.0], [0.0, 3.0], [math.nan, 3.0]])
    # Two responses have the first reward: +-1/sqrt(2), whose unbiased deviation with two zeros is 1/sqrt(3).
    v = math.sqrt(3) / math.sqrt(2)
    for columns in (rewards, rewards[:, :1]):
        result = gdpo(columns, torch.zeros(4, dtype=torch.int64), eps=0.0)
        assert_close(result.advantages, torch.tensor([v, 0.0, -v, 0.0]))
    nobody = torch.full((4, 1), math.nan)
    assert gdpo(torch.cat([nobody, rewards], 1), torch.zeros(4, dtype=torch.int64), eps=0.0)[0].equal(result[0])
    assert gdpo(rewards, torch.zeros(4, dtype=torch.int64), weights=[0.0, 1.0]).zero_variance.tolist() == [True]


def test_gdpo_agrees_with_a_literal_loop():
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(0, 9, (60,), generator=generator)
    rewards = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    rewards[torch.rand(60, 3, generator=generator) < 0.2] = math.nan
    weights = [1.0, -0.3, 7.0]
    rows, owners = rewards.tolist(), groups.tolist()
    totals = []
    for row, owner in zip(rows, owners, strict=True):
        total = 0.0
        for k, weight in enumerate(weights):
            members = [r[k] for r, g in zip(rows, owners, strict=True) if g == owner and not math.isnan(r[k])]
            if not math.isnan(row[k]) and len(members) > 1:
                mean = sum(members) / len(members)
                std = math.sqrt(sum((m - mean) ** 2 for m in members) / (len(members) - 1))
                total += weight * (row[k] - mean) / (std + 1e-6)
        totals.append(total)
    mean = sum(totals) / len(totals)
    std = math.sqrt(sum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
    expected = torch.tensor([(total - mean) / (std + 1e-6) for total in totals], dtype=torch.float64)
    assert_close(gdpo(rewards, groups, weights=weights).advantages, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {"gdpo"}))
def test_group_estimators_agree_with_a_literal_loop(name):
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(0, 9, (60,), generator=generator)
    rewards = torch.randn(60, generator=generator, dtype=torch.float64)
    result = ADVANTAGES[name](rewards, groups)
    for i, (reward, group) in enumerate(zip(rewards.tolist(), groups.tolist(), strict=True)):
        members = [r for r, g in zip(rewards.tolist(), groups.tolist(), strict=True) if g == group]
        mean = sum(members) / len(members)
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / max(1, len(members) - 1))
        expected = {
            "grpo": (reward - mean) / (std + 1e-6),
            "dr_grpo": reward - mean,
            "rloo": reward - (sum(members) - reward) / max(1, len(members) - 1),
        }[name]
        assert result.advantages[i].item() == pytest.approx(expected if len(members) > 1 else 0.0, abs=1e-9)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_give_exactly_zero(name):
    # 0.1 is not exact in binary: rounding must not leave a signal behind.
    result = ADVANTAGES[name](torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64))
    assert result.advantages.eq(0).all()
    assert result.zero_variance.tolist() == [True]


def test_to_tokens_spreads_padded_and_packed():
    advantages = torch.tensor([2.0, -1.0])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert_close(to_tokens(advantages, mask), torch.tensor([[2.0, 2.0, 0.0], [-1.0, 0.0, 0.0]]))
    packed = to_tokens(advantages, torch.tensor([False, True, True, True]), torch.tensor([0, 0, 0, 1]))
    assert_close(packed, torch.tensor([0.0, 2.0, 2.0, -1.0]))


def test_gae_by_hand():
    # One sequence, reward 1 at the end, gamma 1, lambda 1/2, values 0.5, 0.25, 0.75:
    # delta = (0 + 0.25 - 0.5, 0 + 0.75 - 0.25, 1 - 0.75) = (-0.25, 0.5, 0.25)
    # A3 = 0.25, A2 = 0.5 + 0.125, A1 = -0.25 + 0.3125
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.75]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3).bool(), lam=0.5)
    assert_close(advantages, torch.tensor([[0.0625, 0.625, 0.25]]))
    assert_close(returns, torch.tensor([[0.5625, 0.875, 1.0]]))


def test_gae_skips_tokens_the_policy_did_not_choose():
    rewards, values = torch.tensor([[0.0, 9.0, 0.0, 1.0, 9.0]]), torch.tensor([[0.5, 9.0, 0.25, 0.75, 9.0]])
    mask = torch.tensor([[True, False, True, True, False]])
    advantages, returns = gae(rewards, values, mask, lam=0.5)
    assert_close(advantages, torch.tensor([[0.0625, 0.0, 0.625, 0.25, 0.0]]))
    assert_close(returns, torch.tensor([[0.5625, 0.0, 0.875, 1.0, 0.0]]))


def test_gae_with_lambda_one_is_return_minus_value():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator)
    advantages, _ = gae(rewards, values, torch.ones(3, 6).bool(), gamma=0.9, lam=1.0)
    for t in range(6):
        discounted = sum(0.9 ** (k - t) * rewards[:, k] for k in range(t, 6))
        assert_close(advantages[:, t], discounted - values[:, t])


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int64), "both must be .responses."),
        (torch.zeros(2), torch.zeros(2), "groups has dtype torch.float32"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.int64), "rewards is empty"),
        (torch.zeros(2), torch.tensor([0, -1]), "groups holds -1"),
        (torch.tensor([0.0, math.nan]), torch.tensor([0, 0]), "rewards is nan for response 1"),
    ],
)
def test_bad_groups_are_refused(rewards, groups, message):
    with pytest.raises(ValueError, match=message):
        grpo(rewards, groups)


def test_bad_gae_is_refused():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="must share one shape"):
        gae(ones, ones[:, :2], ones.bool())
    with pytest.raises(ValueError, match=r"lam=1\.5 must lie in"):
        gae(ones, ones, ones.bool(), lam=1.5)


def test_the_names_that_need_no_torch_are_those_of_the_estimators():
    assert get_args(AdvantageName) == tuple(ADVANTAGES)
