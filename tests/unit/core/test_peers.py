"""Objectives of others that look at whole responses or at both sides of an interval, worked out by hand."""

import math
from math import exp, log, sqrt

import pytest
import torch

from bapo import policy_loss
from bapo.core.objectives import OBJECTIVES
from bapo.core.tokens import Tokens
from tests.unit.core.test_objectives import check, evaluate

# Responses 0 and 1 (A = -1) have mean log-ratios of log .9 and log sqrt(.81 * 1.1); 2 (A = 1) has fallen furthest.
RESPONSES = {
    "ratios": [0.9, 0.9, 0.81, 1.1, 0.5, 0.5],
    "advantages": [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0],
    "sequences": [0, 0, 1, 1, 2, 2],
}


def test_opsm_drops_negative_responses_that_have_fallen_by_more_than_delta():
    # -log .9 = .1054 and -log sqrt(.891) = .0577: the first response is past .1, the second is not; positive ones stay.
    check(
        "opsm",
        [0, 0, 0.81, 1.1, -0.5, -0.5],
        [0, 0, 0.81, 1.1, -0.5, -0.5],
        [False, False, True, True, True, True],
        **RESPONSES,
    )
    for delta, kept in ((0.106, 2), (0.105, 1), (0.058, 1), (0.057, 0)):
        retained = evaluate("opsm", **RESPONSES, delta=delta)[2]
        assert retained[0] + retained[2] == kept == retained[1] + retained[3]
    # What is left has GRPO's clip: .75 is below .8 and 1.3 above 1.2, and neither response has fallen by .2 (.144, 0).
    check(
        "opsm",
        [0.8, 1.0, -1.2, -1.0],
        [0, 1.0, 0, -1.0],
        [False, True, False, True],
        ratios=[0.75, 1.0, 1.3, 1.0],
        advantages=[-1.0, -1.0, 1.0, 1.0],
        sequences=[0, 0, 1, 1],
        delta=0.2,
    )


def test_opsm_can_spare_tokens_that_were_not_trained_on_before():
    uses = [0, 0, 2, 2, 1, 1]
    check(
        "opsm",
        [0.9, 0.9, 0, 0, -0.5, -0.5],
        [0.9, 0.9, 0, 0, -0.5, -0.5],
        [True, True, False, False, True, True],
        **RESPONSES,
        uses=uses,
        used_only=1,
        delta=0.05,
    )


def test_opsm_asks_for_uses_only_where_they_decide():
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    given = logprobs, torch.full((2, 3), -0.5), torch.tensor([[-1.0], [1.0]]).expand(2, 3), torch.ones(2, 3).bool()
    uses = torch.tensor([[0], [1]]).expand(2, 3)
    with pytest.raises(ValueError, match=r"used_only=1.*needs uses="):
        policy_loss(*given, objective="opsm", used_only=1)
    with pytest.raises(ValueError, match="must be 0 or 1"):
        policy_loss(*given, objective="opsm", used_only=0.5, uses=uses)
    with pytest.raises(ValueError, match="nothing asks for it"):
        policy_loss(*given, objective="opsm", uses=uses)
    assert not policy_loss(*given, objective="opsm").retained[0].any()
    assert policy_loss(*given, objective="opsm", used_only=1, uses=uses, low=0.5).retained.all()


def test_opsm_agrees_with_a_loop_over_its_formula():
    generator = torch.Generator().manual_seed(3)
    behavior = -2 - torch.rand(30, 12, generator=generator, dtype=torch.float64)
    drift = 0.2 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    logprobs = behavior + drift + 0.2 * torch.randn(30, 12, generator=generator, dtype=torch.float64)
    advantages = torch.randn(30, 1, generator=generator, dtype=torch.float64).expand(30, 12)
    mask = torch.rand(30, 12, generator=generator) < 0.8
    total, dropped = 0.0, 0
    for row, sampled, (advantage, *_), counts in zip(logprobs, behavior, advantages.tolist(), mask, strict=True):
        fallen = (sampled - row)[counts].mean().item()
        if advantage < 0 and fallen > 0.1:
            dropped += 1
            continue
        for ratio in (row - sampled)[counts].exp().tolist():
            total -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    loss = policy_loss(logprobs, behavior, advantages, mask, objective="opsm").loss
    assert loss.item() == pytest.approx(total / mask.sum().item())
    assert 3 < dropped < 20


def test_dis_drops_a_token_outside_its_interval_whatever_its_sign():
    # -sg(r) A log pi within (.7, 6), and nothing on either side of it.
    ratios, advantages = [0.69, 0.71, 5.9, 6.1] * 2, [2.0] * 4 + [-1.0] * 4
    check(
        "dis",
        [0, -1.42 * log(0.071), -11.8 * log(0.59), 0, 0, 0.71 * log(0.071), 5.9 * log(0.59), 0],
        [0, -1.42, -11.8, 0, 0, 0.71, 5.9, 0],
        [False, True, True, False] * 2,
        ratios=ratios,
        advantages=advantages,
    )
    # SAO's interval for code. At a bound itself a token is dropped: the paper's inequalities are strict.
    assert evaluate("dis", ratios=[0.21, 3.9, 4.1, 0.19], low=0.2, high=4.0)[2] == [True, True, False, False]
    at_the_bound = Tokens(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.ones(1).bool())
    for bounds in ({"low": 1.0}, {"high": 1.0}):
        assert not OBJECTIVES["dis"].compute(at_the_bound, **bounds).retained


def test_vespo_weighs_a_response_by_its_whole_ratio_and_its_sign():
    # Response 0, A = 2: w = 2 * 1.5 = 3, phi = 3^2 e^(3 (1 - 3)). Response 1, A = -1: w = 1/4, phi = w^3 e^(2 (1 - w)).
    up, down = 9 * exp(-6), 0.25**3 * exp(1.5)
    check(
        "vespo",
        [-2 * up * log(0.2), -2 * up * log(0.15), down * log(0.05), down * log(0.05)],
        [-2 * up, -2 * up, down, down],
        [True] * 4,
        ratios=[2.0, 1.5, 0.5, 0.5],
        advantages=[2.0, 2.0, -1.0, -1.0],
        sequences=[0, 0, 1, 1],
    )
    # On-policy the weight is 1, as in REINFORCE; with k = lambda it is largest there.
    assert evaluate("vespo", ratios=[1.0, 1.0], advantages=[1.0, -3.0], sequences=[0, 1])[1] == pytest.approx([-1, 3])
    peak = {"advantages": [1.0], "sequences": [0], "k_positive": 3.0}
    assert all(evaluate("vespo", ratios=[r], **peak)[1][0] > -1.0 for r in (0.9, 1.1))


def test_vespo_forgets_responses_that_have_run_away():
    # w = e^40, limited to e^20: the weight underflows, and the token counts as dropped. w = e^-40 is limited to 1e-8.
    ratios = [exp(20), exp(20), exp(-19), exp(-19)]
    _, gradient, retained = evaluate("vespo", ratios=ratios, advantages=[1.0, 1.0, -1.0, -1.0], sequences=[0, 0, 1, 1])
    assert gradient[:2] == [0, 0]
    assert gradient[2:] == pytest.approx([1e-24 * exp(2 - 2e-8)] * 2)
    assert retained == [False, False, True, True]


@pytest.mark.parametrize("objective", ["opsm", "dis", "vespo"])
def test_a_mask_hides_no_infinity(objective):
    logprobs = torch.tensor([-math.inf, -5.0], requires_grad=True)
    tokens = Tokens(
        logprobs, torch.tensor([-0.1, -0.1]), -torch.ones(2), torch.ones(2).bool(), sequence_ids=torch.tensor([0, 1])
    )
    assert OBJECTIVES[objective].compute(tokens).loss.isnan().tolist() == [True, False]


def test_bad_options_are_refused():
    for objective, options in (("opsm", {"delta": 0.0}), ("vespo", {"k_negative": -1.0})):
        with pytest.raises(ValueError, match="must be positive"):
            evaluate(objective, **options)
    for objective in ("opsm", "dis"):
        with pytest.raises(ValueError, match="do not enclose 1"):
            evaluate(objective, low=1.1)


def test_the_surrogate_of_opsm_is_that_of_grpo_where_nothing_has_fallen():
    ratios = [sqrt(2), 1.05, 0.97, 1.3]
    grpo, opsm = (evaluate(name, ratios=ratios, sequences=[0, 1, 2, 3]) for name in ("grpo", "opsm"))
    assert grpo == opsm
