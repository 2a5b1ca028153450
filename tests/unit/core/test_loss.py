"""policy_loss as a user calls it: defaults, reductions, metrics, and every input it refuses."""

import math

import pytest
import torch
from torch.testing import assert_close

from bapo import (
    OBJECTIVES,
    ClipBounds,
    ClipSettings,
    StopReason,
    bounds_from_table,
    policy_loss,
    solve_bounds,
    update_table,
)
from bapo.core.checks import check_tokens
from bapo.core.settings import rule_of_used


def batch(sequences=6, tokens=20, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(sequences, tokens, generator=generator) * 3
    logprobs = (behavior + 0.5 * torch.randn(sequences, tokens, generator=generator)).clamp(max=0)
    advantages = torch.randn(sequences, 1, generator=generator).expand(sequences, tokens).clone()
    mask = torch.arange(tokens) < torch.randint(3, tokens, (sequences, 1), generator=generator)
    return logprobs.to(dtype).requires_grad_(), behavior.to(dtype), advantages.to(dtype), mask


def test_four_tensors_in_loss_out():
    logprobs, behavior, advantages, mask = batch()
    out = policy_loss(logprobs, behavior, advantages, mask)
    out.loss.backward()
    ratio = (logprobs - behavior).exp().detach()
    solved = solve_bounds(ratio, advantages, mask, ClipSettings())
    assert_close(torch.stack([out.bounds.low, out.bounds.high]), torch.stack([solved.low, solved.high]))
    # d/dlogp of -mean(min(rA, clip(r)A)) = -rA / n where retained
    retained = torch.where(advantages > 0, ratio < solved.high, ratio > solved.low) & mask
    assert_close(logprobs.grad, -ratio * advantages * retained / mask.sum())


def test_given_bounds_are_used_and_not_solved_again():
    logprobs, behavior, advantages, mask = batch()
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2), torch.tensor(0.5))
    given = policy_loss(logprobs, behavior, advantages, mask, bounds=bounds)
    fixed = policy_loss(logprobs, behavior, advantages, mask, objective="grpo")
    assert given.bounds is bounds
    assert_close(given.loss, fixed.loss, rtol=0, atol=0)


def test_settings_that_fix_the_bounds_make_bapo_grpo():
    logprobs, behavior, advantages, mask = batch()
    settings = ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2))
    bapo = policy_loss(logprobs, behavior, advantages, mask, settings=settings)
    grpo = policy_loss(logprobs, behavior, advantages, mask, objective="grpo")
    gradients = [torch.autograd.grad(out.loss, logprobs)[0] for out in (bapo, grpo)]
    assert_close(bapo.loss, grpo.loss, rtol=0, atol=0)
    assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert_close(bapo.bounds.share, grpo.bounds.share)


def test_bfloat16_inputs_are_worked_on_in_float32():
    logprobs, behavior, advantages, mask = batch(dtype=torch.bfloat16)
    out = policy_loss(logprobs, behavior, advantages, mask)
    upcast = policy_loss(logprobs.float(), behavior.float(), advantages.float(), mask)
    assert out.loss.dtype == torch.float32
    assert_close(out.loss, upcast.loss, rtol=0, atol=0)
    out.loss.backward()
    assert logprobs.grad.dtype == torch.bfloat16


def uses_for(objective, mask):
    return {"uses": mask.long()} if rule_of_used(objective, {}) else {}


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_huge_log_ratios_and_garbage_under_the_mask_stay_finite(objective):
    logprobs, behavior, advantages, mask = batch()
    with torch.no_grad():
        logprobs[0, 0], behavior[0, 0] = -0.0, -1e4
        logprobs[1, 0], behavior[1, 0] = -1e4, -0.0
        logprobs[~mask] = math.nan
        behavior[~mask] = math.inf
        advantages[~mask] = math.nan
    more = {"entropy": torch.ones_like(behavior), **uses_for(objective, mask)}
    out = policy_loss(logprobs, behavior, advantages, mask, objective=objective, **more)
    out.loss.backward()
    assert out.loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[~mask].eq(0).all()
    assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_nothing_waits_for_the_device(objective):
    # Meta tensors have no values: any read of one on the host raises.
    with torch.device("meta"):
        logprobs = torch.empty(4, 8, requires_grad=True)
        behavior, advantages, mask, entropy = (
            *(torch.empty(4, 8) for _ in range(2)),
            torch.empty(4, 8).bool(),
            torch.empty(4, 8),
        )
    more = {"entropy": entropy, **uses_for(objective, mask)}
    out = policy_loss(logprobs, behavior, advantages, mask, objective=objective, **more)
    out.loss.backward()
    assert out.loss.device.type == logprobs.grad.device.type == "meta"
    assert all(value.device.type == "meta" for value in out.metrics.values())
    if objective == "bapo":
        for settings in (ClipSettings(measure="surrogate"), ClipSettings(weight="rollout_prob", order="low_first")):
            assert policy_loss(logprobs, behavior, advantages, mask, settings=settings).bounds.low.device.type == "meta"


def test_an_unlooked_at_nan_poisons_the_loss(monkeypatch):
    # What an accelerator does: values are not checked, so they must not turn into something plausible.
    import bapo.core.loss as loss_module

    monkeypatch.setattr(loss_module, "check_tokens", lambda *args, **kwargs: None)
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2), torch.tensor(0.5))
    for bad in (math.nan, -math.inf):
        for objective in sorted(OBJECTIVES):
            logprobs, behavior, advantages, mask = batch()
            with torch.no_grad():
                logprobs[0, 0] = bad
            options = {"bounds": bounds} if OBJECTIVES[objective].solves_bounds else uses_for(objective, mask)
            out = policy_loss(logprobs, behavior, advantages, mask, objective=objective, **options)
            out.loss.backward()
            assert not out.loss.isfinite(), (objective, bad)
            assert logprobs.grad[mask].isnan().any(), (objective, bad)  # so is its norm
            if objective == "grpo":
                assert out.bounds.share.isnan()


def test_metrics_by_hand():
    behavior = torch.full((1, 4), math.log(0.5))
    logprobs = (behavior + torch.tensor([[1.5, 1.0, 0.5, 1.0]]).log()).requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -2.0, 0.0]])
    out = policy_loss(logprobs, behavior, advantages, torch.ones(1, 4).bool(), objective="grpo")
    metrics = {name: value.item() for name, value in out.metrics.items()}
    assert metrics["positive_tokens"] == 0.5
    assert metrics["negative_tokens"] == 0.25
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)  # of the three signed tokens
    assert metrics["clip_fraction_positive"] == 0.5
    assert metrics["clip_fraction_negative"] == 1.0
    assert metrics["share"] == 1.0
    assert (metrics["clip_low"], metrics["clip_high"]) == pytest.approx((0.8, 1.2))


def replace(name, value):
    def change(arguments):
        arguments[name] = value(arguments[name])

    return change


def poke(name, value):
    def change(arguments):
        arguments[name] = arguments[name].detach().clone()
        arguments[name][2, 1] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace("advantages", lambda a: a[:, 0]), r"advantages has shape \(6,\) but mask has \(6, 20\)"),
        (replace("behavior_logprobs", lambda b: b.T), r"behavior_logprobs has shape \(20, 6\)"),
        (replace("advantages", lambda a: a.long()), "advantages has dtype torch.int64"),
        (replace("mask", lambda m: m[None]), "expected .tokens. .packed."),
        (replace("mask", lambda m: m & False), "mask selects none of its 120 tokens"),
        (replace("mask", lambda m: m * 0.5), "mask holds values other than 0 and 1"),
        (poke("logprobs", math.nan), "logprobs is nan in sequence 2, token 1"),
        (poke("logprobs", -math.inf), "logprobs is -inf in sequence 2, token 1"),
        (poke("behavior_logprobs", -math.inf), "behavior_logprobs is -inf in sequence 2, token 1"),
        (poke("behavior_logprobs", 0.5), "behavior_logprobs is 0.5 in sequence 2, token 1, but a log-prob.* at most 0"),
        (poke("logprobs", 1.0), "logprobs is 1.0 in sequence 2"),
        (poke("advantages", math.inf), "advantages is inf in sequence 2, token 1"),
        (replace("objective", lambda _: "grop"), "objective='grop' is not known. Did you mean 'grpo'"),
        (replace("reduction", lambda _: "mean"), "reduction='mean' is not known"),
        (replace("reduction", lambda _: "fixed_length"), "length=None, but reduction='fixed_length'"),
        (replace("reduction", lambda _: "balanced"), "loss_weights=None, but reduction='balanced' weighs a token by"),
        (replace("loss_weights", lambda _: torch.ones(6, 20)), "loss_weights= are those of reduction='balanced'"),
    ],
)
def test_bad_input_says_what_why_and_what_to_do(change, message):
    logprobs, behavior, advantages, mask = batch()
    mask[2] = True
    arguments = {
        "logprobs": logprobs,
        "behavior_logprobs": behavior,
        "advantages": advantages,
        "mask": mask,
        "objective": "bapo",
        "reduction": "token_mean",
        "loss_weights": None,
    }
    change(arguments)
    with pytest.raises(ValueError, match=message):
        policy_loss(**arguments)


def test_packed_input_names_the_sequence_by_its_id():
    logprobs, behavior, advantages, mask = (x[0].detach().clone() for x in batch())
    mask[:] = True
    logprobs[7] = math.nan
    ids = torch.arange(20) // 5
    with pytest.raises(ValueError, match="logprobs is nan in sequence 1, packed token 7"):
        policy_loss(logprobs, behavior, advantages, mask, sequence_ids=ids)
    with pytest.raises(ValueError, match="logprobs is nan in packed token 7"):
        policy_loss(logprobs, behavior, advantages, mask)
    with pytest.raises(ValueError, match="number the responses of the batch from 0"):
        policy_loss(logprobs, behavior, advantages, mask, sequence_ids=ids + 40)
    with pytest.raises(ValueError, match="sequence_ids has shape"):
        policy_loss(logprobs, behavior, advantages, mask, sequence_ids=ids[:3])


@pytest.mark.parametrize("objective", ["gspo", "topr"])
def test_sequence_objectives_ask_for_sequence_ids(objective):
    logprobs, behavior, advantages, mask = (x[0].detach() for x in batch())
    with pytest.raises(ValueError, match="Pass sequence_ids"):
        policy_loss(logprobs, behavior, advantages, mask, objective=objective)


def test_options_belong_to_their_objective():
    arguments = batch()
    with pytest.raises(ValueError, match=r"high=1\.3 is not an argument.*takes: dual_clip.*ClipSettings\(high="):
        policy_loss(*arguments, high=1.3)
    with pytest.raises(ValueError, match="settings= is used by objective='bapo' only"):
        policy_loss(*arguments, objective="grpo", settings=ClipSettings())
    wider = policy_loss(*arguments, objective="grpo", high=9.0)
    assert wider.bounds.high == 9.0


def test_an_empty_part_of_a_larger_update_is_no_error():
    logprobs, behavior, advantages, mask = batch()
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2), torch.tensor(0.5))
    out = policy_loss(logprobs, behavior, advantages, mask & False, bounds=bounds, denominator=100)
    out.loss.backward()
    assert out.loss == 0
    assert logprobs.grad.eq(0).all()


def test_check_tokens_can_be_called_by_hand():
    logprobs, behavior, advantages, mask = batch()
    check_tokens(logprobs, behavior, advantages, mask, entropy=torch.ones_like(behavior))
    with pytest.raises(ValueError, match="entropy is nan"):
        check_tokens(logprobs, behavior, advantages, mask, entropy=torch.full_like(behavior, math.nan))


def test_no_gradient_flows_into_the_past():
    logprobs, behavior, advantages, mask = batch()
    on_policy = policy_loss(logprobs, logprobs, advantages, mask)
    on_policy.loss.backward()
    assert_close(logprobs.grad, -advantages * mask / mask.sum())
    behavior.requires_grad_()
    advantages.requires_grad_()
    policy_loss(logprobs, behavior, advantages, mask).loss.backward()
    assert behavior.grad is None
    assert advantages.grad is None
    with pytest.raises(ValueError, match="the two are swapped"):
        policy_loss(behavior.detach(), logprobs, advantages, mask)


def test_a_token_past_the_ratio_limit_has_no_gradient_and_no_say():
    logprobs, behavior, advantages, mask = batch()
    with torch.no_grad():
        logprobs[0, 0], behavior[0, 0] = -0.1, -22.5
        advantages[0], advantages[1:] = -1.0, 1.0  # balanced but for the one token
    without = mask.clone()
    without[0, 0] = False
    out = policy_loss(logprobs, behavior, advantages, mask)
    out.loss.backward()
    assert logprobs.grad[0, 0] == 0
    assert not out.retained[0, 0]
    expected = policy_loss(logprobs, behavior, advantages, without).bounds
    assert_close(torch.stack([out.bounds.low, out.bounds.high]), torch.stack([expected.low, expected.high]))
    assert out.bounds.stop == StopReason.START


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"denominator": 0}, "denominator=0.0 must be finite and positive"),
        ({"denominator": -5.0}, "denominator=-5.0"),
        ({"denominator": torch.tensor(math.nan)}, "denominator=nan"),
        ({"denominator": torch.ones(2)}, r"denominator has shape \(2,\)"),
        ({"objective": "grpo", "low": 0.2, "high": 0.2}, "not epsilons"),
        ({"objective": "gspo", "low": 1.2, "high": 0.8}, "do not enclose 1"),
        ({"objective": "sapo", "tau_positive": 0.0}, "tau_positive=0.0 must be positive"),
        ({"objective": "dcpo", "eps_high": -1.0}, "eps_high=-1.0 must be positive"),
        ({"objective": "m2po", "threshold": -1.0}, "threshold=-1.0 must be positive"),
        ({"objective": "dppo", "delta": 0.0}, "delta=0.0 must be positive"),
        ({"settings": "paper"}, "settings='paper' is not a ClipSettings"),
        ({"bounds": (0.8, 1.2)}, "is not a ClipBounds.*solve_bounds"),
        (
            {"objective": "grpo", "process_group": "world"},
            "process_group= is used by objective='brake' and objective='brake_all' and objective='bapo' only",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(*batch(), **options)


def test_bounds_and_settings_together_are_refused():
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2), torch.tensor(0.5))
    with pytest.raises(ValueError, match="bounds= are already solved, so settings= would be ignored"):
        policy_loss(*batch(), bounds=bounds, settings=ClipSettings())


def test_update_table_has_the_ratios_of_policy_loss():
    logprobs, behavior, advantages, mask = batch(dtype=torch.bfloat16)
    with torch.no_grad():
        logprobs[0, 0], behavior[0, 0] = -0.0, -120.0  # beyond the ratio limit
    settings = ClipSettings(target_share=0.6)
    parts = [[x[i : i + 2] for x in (logprobs, behavior, advantages, mask)] for i in (0, 2, 4)]
    apart = bounds_from_table(sum(update_table(*part, settings) for part in parts), settings)
    together = policy_loss(logprobs, behavior, advantages, mask, settings=settings).bounds
    assert_close(torch.stack([apart.low, apart.high]), torch.stack([together.low, together.high]))


def test_packed_sequence_mean_through_policy_loss():
    logprobs, behavior, advantages, mask = batch()
    options = {"objective": "gspo", "reduction": "sequence_mean"}
    padded = policy_loss(logprobs, behavior, advantages, mask, **options)
    ids = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    flat = [x[mask] for x in (logprobs, behavior, advantages, mask)]
    assert_close(policy_loss(*flat, sequence_ids=ids.int(), **options).loss, padded.loss)


def test_tokens_all_past_the_ratio_limit_give_no_signal_and_no_error():
    logprobs = torch.tensor([-1.0, -25.0], requires_grad=True)
    out = policy_loss(logprobs, torch.tensor([-1.0, -0.1]), torch.ones(2), torch.tensor([False, True]))
    assert int(out.bounds.stop) == StopReason.NO_SIGNAL
    out.loss.backward()
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_weighing_the_remainder_gives_positive_tokens_their_share_of_the_gradient():
    logprobs, behavior, advantages, mask = batch()
    advantages = advantages - 0.6  # negatives dominate
    settings = ClipSettings(target_share=0.45, low=(0.8, 0.9), high=(1.2, 2.0), remainder="weigh")
    out = policy_loss(logprobs, behavior, advantages, mask, settings=settings)
    assert out.bounds.share < 0.45
    assert out.metrics["negative_weight"] < 1
    out.loss.backward()
    positive = -logprobs.grad[advantages > 0].sum()
    negative = logprobs.grad[advantages < 0].sum()
    assert_close(positive / (positive + negative), torch.tensor(0.45))
    again = policy_loss(logprobs, behavior, advantages, mask, bounds=out.bounds)
    assert_close(again.loss, out.loss, rtol=0, atol=0)
