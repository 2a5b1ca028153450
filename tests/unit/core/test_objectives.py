"""Every objective against numbers worked out by hand: the loss of each token and its gradient in log pi."""

import inspect
import math
from math import exp, log, sqrt

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipBounds, policy_loss
from bapo.core.objectives import OBJECTIVES
from bapo.core.settings import OBJECTIVE_OPTIONS, rule_of_used
from bapo.core.tokens import Tokens, clipped_surrogate

# Four tokens at behaviour probability 1/10, with ratios 1.5, 0.5, 1.5, 0.5 and advantages +1, +1, -1, -1.
RATIOS = [1.5, 0.5, 1.5, 0.5]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0]
BEHAVIOR = log(0.1)


def evaluate(
    objective, *, ratios=RATIOS, advantages=ADVANTAGES, behavior=BEHAVIOR, sequences=None, uses=None, **options
):
    """Loss per token, d loss / d log pi per token, and which tokens are retained."""
    count = len(ratios)
    behavior_logprobs = torch.full((count,), behavior, dtype=torch.float64)
    logprobs = (behavior_logprobs + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    tokens = Tokens(
        logprobs,
        behavior_logprobs,
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones(count, dtype=torch.bool),
        None if sequences is None else torch.tensor(sequences),
        None if uses is None else torch.tensor(uses),
    )
    result = OBJECTIVES[objective].compute(tokens, **options)
    result.loss.sum().backward()
    return result.loss.tolist(), logprobs.grad.tolist(), result.retained.tolist()


def check(objective, losses, gradients, retained, **arguments):
    loss, gradient, kept = evaluate(objective, **arguments)
    assert loss == pytest.approx(losses)
    assert gradient == pytest.approx(gradients)
    assert kept == retained


def test_grpo_stops_the_gradient_only_past_the_bound_that_binds():
    # -min(rA, clip(r) A): 1.5 is clipped to 1.2 for A > 0, 0.5 to 0.8 for A < 0. Gradient -rA where retained.
    check("grpo", [-1.2, -0.5, 1.5, 0.8], [0, -0.5, 1.5, 0], [False, True, True, False])


def test_clip_higher_moves_only_the_upper_bound():
    check("clip_higher", [-1.28, -0.5, 1.5, 0.8], [0, -0.5, 1.5, 0], [False, True, True, False])


def test_push_once_pushes_a_used_negative_token_only_while_it_is_more_likely_than_when_it_was_sampled():
    # Fresh tokens have GRPO's clip. Used negative ones (A = -1) lose their gradient below 1, where their loss is -A.
    check(
        "push_once",
        [-1.2, 0.9, 1.0, 1.1, -0.5],
        [0, 0.9, 0, 1.1, -0.5],
        [False, True, False, True, True],
        ratios=[1.5, 0.9, 0.9, 1.1, 0.5],
        advantages=[1.0, -1.0, -1.0, -1.0, 1.0],
        uses=[0, 0, 3, 1, 1],
    )


def test_dual_clip_caps_negatives_from_above():
    # A = -1: ratio 4 is capped at 3 and loses its gradient; ratio 2 is below the cap.
    check(
        "dual_clip",
        [3.0, 2.0, -1.2],
        [0, 2.0, 0],
        [False, True, False],
        ratios=[4.0, 2.0, 4.0],
        advantages=[-1.0, -1.0, 1.0],
    )


def test_bapo_clips_at_the_bounds_it_is_given():
    bounds = ClipBounds(low=torch.tensor(0.4), high=torch.tensor(1.4), share=torch.tensor(0.5))
    check("bapo", [-1.4, -0.5, 1.5, 0.5], [0, -0.5, 1.5, 0.5], [False, True, True, True], bounds=bounds)
    # The released script's cap on negatives, at 1.25 here.
    check("bapo", [-1.4, -0.5, 1.25, 0.5], [0, -0.5, 0, 0.5], [False, True, False, True], bounds=bounds, dual_clip=1.25)


def test_a_token_exactly_at_a_bound_is_clipped():
    ratio = torch.tensor([1.25, 0.75], requires_grad=True)
    loss = clipped_surrogate(ratio, torch.tensor([1.0, -1.0]), 0.75, 1.25).loss
    loss.sum().backward()
    assert_close(loss, torch.tensor([-1.25, 0.75]))
    assert_close(ratio.grad, torch.zeros(2))


def test_dcpo_widens_the_bounds_of_rare_tokens():
    # q = 0.1: low = 0.5 + 0.5 sqrt(max(1 - 6.4, 0)) = 0.5, high = 0.5 + 0.5 sqrt(1 + 8) = 2
    check(
        "dcpo",
        [-1.5, -2.0, 0.6, 0.5],
        [-1.5, 0, 0.6, 0],
        [True, False, True, False],
        ratios=[1.5, 2.5, 0.6, 0.4],
        advantages=[1.0, 1.0, -1.0, -1.0],
    )
    # q = 0.8: low = 0.5 + 0.5 sqrt(0.2), high = 0.5 + 0.5 sqrt(2)
    low, high = 0.5 + 0.5 * sqrt(0.2), 0.5 + 0.5 * sqrt(2)
    check("dcpo", [-high, low], [0, 0], [False, False], ratios=[1.21, 0.7], advantages=[1.0, -1.0], behavior=log(0.8))
    # q = 1e-6: high would be 447 without max_ratio = 10
    check("dcpo", [-10.0], [0], [False], ratios=[11.0], advantages=[1.0], behavior=log(1e-6))


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # -sg(min(r, 5)) A log pi: gradient -min(r, 5) A
    loss, gradient, retained = evaluate("cispo", ratios=[8.0, 0.5], advantages=[1.0, -1.0])
    assert loss == pytest.approx([-5 * log(0.8), 0.5 * log(0.05)])
    assert gradient == pytest.approx([-5.0, 0.5])
    assert retained == [True, True]


def test_gspo_clips_whole_sequences_by_their_geometric_mean_ratio():
    # Sequence 0: ratios 4 and 1, s = sqrt(4) = 2, A = 1, clipped at 1.5: no gradient on either token.
    # Sequence 1: ratios 1 and 1/4, s = 1/2, A = 1: per token -s A, and each token moves s by s/2, twice (two losses).
    check(
        "gspo",
        [-1.5, -1.5, -0.5, -0.5],
        [0, 0, -0.5, -0.5],
        [False, False, True, True],
        ratios=[4.0, 1.0, 1.0, 0.25],
        advantages=[1.0] * 4,
        sequences=[0, 0, 1, 1],
        low=0.8,
        high=1.5,
    )


def test_gspo_defaults_are_the_papers_narrow_band():
    assert evaluate("gspo", ratios=[1.0003], advantages=[1.0], sequences=[0])[2] == [True]
    assert evaluate("gspo", ratios=[1.0005], advantages=[1.0], sequences=[0])[2] == [False]
    assert evaluate("gspo", ratios=[0.9996], advantages=[-1.0], sequences=[0])[2] == [False]


def test_gspo_does_not_retain_a_token_past_the_ratio_limit():
    # Log-ratios 25, limited to 20, and 0: s = exp(20 / 2) is above the lower bound, so A = -1 is not clipped. The limit
    # stops the gradient of the first token; the second moves s by s/2, in the loss of both tokens.
    s = exp(10)
    loss, gradient, retained = evaluate("gspo", ratios=[exp(25), 1.0], advantages=[-1.0, -1.0], sequences=[0, 0])
    assert loss == pytest.approx([s, s])
    assert gradient == pytest.approx([0, s])
    assert retained == [False, True]


def test_sapo_gates_softly_by_sign():
    def gate(ratio, tau):
        return 4 / tau / (1 + exp(-tau * (ratio - 1)))

    def slope(ratio, tau):  # d gate / d log pi = r * 4 s (1 - s)
        s = 1 / (1 + exp(-tau * (ratio - 1)))
        return ratio * 4 * s * (1 - s)

    loss, gradient, retained = evaluate("sapo", ratios=[1.5, 0.5], advantages=[1.0, -2.0])
    assert loss == pytest.approx([-gate(1.5, 1.0), 2 * gate(0.5, 1.05)])
    assert gradient == pytest.approx([-slope(1.5, 1.0), 2 * slope(0.5, 1.05)])
    assert retained == [True, True]
    assert evaluate("sapo", ratios=[1.0], advantages=[1.0])[1] == pytest.approx([-1.0])  # that of r A on-policy


def test_topr_weighs_negatives_by_the_truncated_ratio_of_the_whole_response():
    # Response 0 (A < 0): product 1/4. Response 1 (A < 0): product 6, truncated to 1. Response 2 (A > 0): weight 1.
    loss, gradient, _ = evaluate(
        "topr",
        ratios=[0.5, 0.5, 2.0, 3.0, 0.5],
        advantages=[-1.0, -1.0, -1.0, -1.0, 2.0],
        sequences=[0, 0, 1, 1, 2],
    )
    logs = [log(0.1 * r) for r in (0.5, 0.5, 2.0, 3.0, 0.5)]
    assert loss == pytest.approx([0.25 * logs[0], 0.25 * logs[1], logs[2], logs[3], -2 * logs[4]])
    assert gradient == pytest.approx([0.25, 0.25, 1.0, 1.0, -2.0])


def test_asymre_lowers_the_baseline():
    # -(A + 0.1) log pi
    loss, gradient, _ = evaluate("asymre", ratios=[1.0, 3.0], advantages=[1.0, -1.0])
    assert loss == pytest.approx([-1.1 * log(0.1), 0.9 * log(0.3)])
    assert gradient == pytest.approx([-1.1, 0.9])


def test_m2po_clips_where_the_capped_second_moment_meets_the_threshold():
    # Outward: log r = 1 and .1 (A > 0), -.3 (A < 0). With tau = 1/2: (.25 + .01 + .09) / 3 = 7/60, the threshold. Those
    # that move inward (log r = -2 at A > 0, 3 at A < 0), stand still or have no advantage have no say.
    check(
        "m2po",
        [-exp(0.5), -exp(0.1), exp(-0.3), -exp(-2.0), exp(3.0), -1.0, 0],
        [0, -exp(0.1), exp(-0.3), -exp(-2.0), exp(3.0), -1.0, 0],
        [False, True, True, True, True, True, True],
        ratios=[exp(1.0), exp(0.1), exp(-0.3), exp(-2.0), exp(3.0), 1.0, exp(2.0)],
        advantages=[1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 0.0],
        threshold=7 / 60,
    )
    # The same downwards: log r = -1 is clipped at -1/2, -.49 is not. (.25 + .01 + .2401) / 3 is the threshold.
    check(
        "m2po",
        [exp(-0.5), exp(-0.1), exp(-0.49)],
        [0, exp(-0.1), exp(-0.49)],
        [False, True, True],
        ratios=[exp(-1.0), exp(-0.1), exp(-0.49)],
        advantages=[-1.0, -1.0, -1.0],
        threshold=0.5001 / 3,
    )


def test_m2po_is_never_tighter_than_its_floor_and_clips_nothing_within_the_threshold():
    far = {"ratios": [exp(1.0), exp(-1.0), 1.45, 0.72], "advantages": [1.0, -1.0, 1.0, -1.0]}
    assert evaluate("m2po", **far, threshold=1e-6)[2] == [False, False, True, True]  # clipped at (0.7, 1.5)
    assert evaluate("m2po", **far, threshold=1e-6, low=1.0, high=1.0)[2] == [False, False, False, False]
    assert evaluate("m2po", **far, threshold=1.0)[2] == [True, True, True, True]
    for log_ratio, kept in ((0.19, True), (0.21, False)):  # the paper's threshold is 0.2 squared
        assert evaluate("m2po", ratios=[exp(log_ratio)], advantages=[1.0], low=1.0, high=1.0)[2] == [kept]


def test_m2po_ignores_masked_tokens_and_those_past_the_ratio_limit():
    # (.01 + .09) / 2 is within .055: nothing is clipped. With the masked token (5) or the one past the limit (25),
    # .01 + 2 tau^2 = 3 * .055, tau = .278, and .3 would be.
    behavior = torch.full((4,), -30.0, dtype=torch.float64)
    logprobs = (behavior + torch.tensor([0.1, 0.3, 5.0, 25.0])).requires_grad_()
    mask = torch.tensor([True, True, False, True])
    options = {"objective": "m2po", "threshold": 0.055, "low": 1.0, "high": 1.0}
    policy_loss(logprobs, behavior, torch.ones(4), mask, **options).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-exp(0.1) / 3, -exp(0.3) / 3, 0, 0])


def test_dppo_masks_tokens_whose_probability_moved_too_far_with_their_advantage():
    # Sampled with probability 1/2, now .7, .6, .3, .4: the first moved up by more than .15, the third down.
    ratios = [1.4, 1.2, 0.6, 0.8]
    check(
        "dppo",
        [0, -1.2, -0.6, -0.8, 0],
        [0, -1.2, -0.6, -0.8, 0],
        [False, True, True, True, True],
        ratios=[*ratios, 1.4],
        advantages=[1.0, 1.0, 1.0, 1.0, 0.0],
        behavior=log(0.5),
    )
    check(
        "dppo",
        [2.8, 2.4, 0, 1.6, 0],
        [2.8, 2.4, 0, 1.6, 0],
        [True, True, False, True, True],
        ratios=[*ratios, 0.6],
        advantages=[-2.0, -2.0, -2.0, -2.0, 0.0],
        behavior=log(0.5),
    )
    # A rare token may become almost 16 times as likely (.01 to .16) or vanish: its probability hardly moves.
    rare = {"ratios": [15.9, 16.1, 1e-6], "advantages": [1.0, 1.0, -1.0], "behavior": log(0.01)}
    assert evaluate("dppo", **rare)[2] == [True, False, True]


def test_dppo_keeps_a_token_exactly_at_delta():
    behavior = torch.full((2,), log(0.5), dtype=torch.float64)
    logprobs = behavior + torch.tensor([1.5, 0.5], dtype=torch.float64).log()
    reach = (logprobs.exp() - behavior.exp()).abs().min().item()
    tokens = Tokens(logprobs, behavior, torch.tensor([1.0, -1.0]), torch.ones(2).bool())
    assert OBJECTIVES["dppo"].compute(tokens, delta=reach + 1e-15).retained.all()
    assert not OBJECTIVES["dppo"].compute(tokens, delta=reach - 1e-15).retained.any()


def test_dppo_agrees_with_a_loop_over_its_formula():
    generator = torch.Generator().manual_seed(5)
    behavior = -3 * torch.rand(400, generator=generator, dtype=torch.float64)
    logprobs = (behavior + 0.5 * torch.randn(400, generator=generator, dtype=torch.float64)).clamp(max=0)
    advantages = torch.randn(400, generator=generator, dtype=torch.float64).round(decimals=1)
    mask = torch.rand(400, generator=generator) < 0.9
    total, slopes, kept = 0.0, [], []
    rows = zip(logprobs.tolist(), behavior.tolist(), advantages.tolist(), mask.tolist(), strict=True)
    for logprob, behavior_logprob, advantage, counts in rows:
        pi, mu = exp(logprob), exp(behavior_logprob)
        inside = not ((advantage > 0 and pi - mu > 0.1) or (advantage < 0 and pi - mu < -0.1))
        loss = -pi / mu * advantage if inside and counts else 0.0
        total += loss
        slopes.append(loss / mask.sum().item())  # d(-r A) / d log pi = -r A
        kept.append(inside)
    logprobs.requires_grad_()
    out = policy_loss(logprobs, behavior, advantages, mask, objective="dppo", delta=0.1)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(total / mask.sum().item())
    assert logprobs.grad.tolist() == pytest.approx(slopes)
    assert out.retained[mask].tolist() == [k for k, counts in zip(kept, mask.tolist(), strict=True) if counts]
    assert 20 < sum(not k for k in kept) < 200  # the mask is at work


def test_dppo_hides_no_infinity_behind_its_mask_and_retains_nothing_past_the_ratio_limit():
    # The probability fell from .9 to 0 at A < 0, which is past delta: masked, but a defect all the same.
    logprobs = torch.tensor([-math.inf, -5.0], requires_grad=True)
    tokens = Tokens(logprobs, torch.tensor([log(0.9), -30.0]), torch.tensor([-1.0, -1.0]), torch.ones(2).bool())
    result = OBJECTIVES["dppo"].compute(tokens)
    result.loss.sum().backward()
    assert result.loss.isnan().tolist() == [True, False]
    assert logprobs.grad[1] == 0  # log r = 25
    assert not result.retained[1]


def test_a_nan_bound_reaches_every_gradient():
    ratio = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    loss = clipped_surrogate(ratio, torch.tensor([-1.0, 1.0, 1.0]), torch.tensor(math.nan), torch.tensor(math.nan)).loss
    loss.sum().backward()
    assert loss.isnan().all()
    assert ratio.grad.isnan().all()


# Objectives with a stopped weight have no value whose slope is their gradient.
@pytest.mark.parametrize("objective", sorted(set(OBJECTIVES) - {"cispo", "topr", "dis", "vespo"}))
def test_gradients_agree_with_finite_differences(objective):
    generator = torch.Generator().manual_seed(3)
    behavior = -torch.rand(24, generator=generator, dtype=torch.float64) * 3 - 0.1
    start = behavior + 0.4 * torch.randn(24, generator=generator, dtype=torch.float64).clamp(-2, 2)
    advantages = torch.randn(8, generator=generator, dtype=torch.float64).repeat_interleave(3)
    mask, ids = torch.ones(24, dtype=torch.bool), torch.arange(8).repeat_interleave(3)
    uses = torch.arange(24) % 2 if rule_of_used(objective, {}) else None
    options = {"low": 0.7, "high": 1.4} if objective in ("grpo", "clip_higher", "push_once", "gspo") else {}
    if OBJECTIVES[objective].solves_bounds:
        options = {"bounds": ClipBounds(*(torch.tensor(x, dtype=torch.float64) for x in (0.7, 1.4, 0.5)))}

    def total(logprobs):
        return (
            OBJECTIVES[objective].compute(Tokens(logprobs, behavior, advantages, mask, ids, uses), **options).loss.sum()
        )

    assert torch.autograd.gradcheck(total, start.clone().requires_grad_(), eps=1e-7, atol=1e-5)


def test_ratio_is_limited_so_that_nothing_overflows():
    tokens = Tokens(
        torch.tensor([-0.1, -200.0]), torch.tensor([-200.0, -0.1]), torch.tensor([-1.0, 1.0]), torch.ones(2).bool()
    )
    assert tokens.ratio.tolist() == pytest.approx([exp(20), exp(-20)])
    infinite = Tokens(torch.tensor([-math.inf]), torch.tensor([-1.0]), torch.ones(1), torch.ones(1).bool())
    assert infinite.ratio.isnan()  # not e^-20: an infinity is never hidden


def test_dual_clip_below_one_is_refused():
    with pytest.raises(ValueError, match="Use a value > 1"):
        evaluate("dual_clip", cap=0.5)


def test_an_objective_says_what_it_takes():
    assert OBJECTIVE_OPTIONS["dual_clip"] == {"low": 0.8, "high": 1.2, "cap": 3.0, "used_low": None}
    assert OBJECTIVE_OPTIONS["bapo"] == {"dual_clip": None}  # its bounds are solved, not chosen
    for name, objective in OBJECTIVES.items():
        parameters = inspect.signature(objective.settings or objective.compute).parameters
        own = {key: each.default for key, each in parameters.items() if key not in ("tokens", "bounds")}
        assert OBJECTIVE_OPTIONS[name] == own
    kinds = ("solves_bounds", "whole_update", "needs_sequences")
    found = {kind: [name for name in OBJECTIVES if getattr(OBJECTIVES[name], kind)] for kind in kinds}
    assert found == {
        "solves_bounds": ["brake", "brake_all", "bapo"],
        "whole_update": ["m2po"],
        "needs_sequences": ["gspo", "topr", "opsm", "vespo"],
    }
    assert [name for name in OBJECTIVES if rule_of_used(name, {})] == ["push_once", "brake"]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_only_those_that_need_sequences_fail_without_them(objective):
    bounds = ClipBounds(low=torch.tensor(0.8), high=torch.tensor(1.2), share=torch.tensor(0.5))
    options = {"bounds": bounds} if OBJECTIVES[objective].solves_bounds else {}
    options |= {"uses": [0, 1, 0, 1]} if rule_of_used(objective, {}) else {}
    if OBJECTIVES[objective].needs_sequences:
        with pytest.raises(ValueError, match="Pass sequence_ids"):
            evaluate(objective, **options)
    else:
        evaluate(objective, **options)
