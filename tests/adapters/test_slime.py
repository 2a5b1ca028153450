"""The loss called as slime's `loss_function` calls one. slime needs Megatron and is not on PyPI: its two functions that
we call are stood in for by the plain ones here, with slime's signatures (commit 00c2d6d)."""

import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipSettings
from bapo.adapters.slime import bapo_loss
from bapo.core.bounds import StopReason
from tests.adapters.logged import core

PROMPTS, RESPONSES, VOCABULARY = (2, 1, 3, 2), (5, 9, 6, 7), 11


def get_log_probs_and_entropy(
    logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False, non_loss_data=True
):
    log_probs, end = [], 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        rows = logits[0, end - response - 1 : end - 1].log_softmax(-1)
        log_probs.append(rows.gather(-1, tokens[-response:, None]).squeeze(-1))
    return torch.empty(0), {"log_probs": log_probs}


def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    log_probs = torch.cat(get_log_probs_and_entropy(logits, args=args, **lengths)[1]["log_probs"])
    old = torch.cat(batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"])
    advantages, ratio = torch.cat(batch["advantages"]), (log_probs - old).exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    loss = sum_of_sample_mean(torch.maximum(-ratio * advantages, -clipped * advantages))
    return loss, {"pg_loss": loss.detach()}


@pytest.fixture(autouse=True)
def slime(monkeypatch):
    module = ModuleType("slime.backends.megatron_utils.loss")
    module.get_log_probs_and_entropy = get_log_probs_and_entropy
    module.policy_loss_function = policy_loss_function
    module.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}
    parent = ModuleType("slime.backends.megatron_utils")
    parent.loss = module
    for name, value in {"slime": ModuleType("slime"), "slime.backends": ModuleType("slime.backends")}.items():
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setitem(sys.modules, parent.__name__, parent)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def micro_batch(seed=0):
    """logits, and a batch as slime's data iterator makes it; the log-probs slime recomputes are not the sampler's."""
    generator = torch.Generator().manual_seed(seed)
    totals = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    logits = torch.randn(1, sum(totals), VOCABULARY, generator=generator).requires_grad_()
    batch = {
        "unconcat_tokens": [torch.randint(0, VOCABULARY, (total,), generator=generator) for total in totals],
        "total_lengths": totals,
        "response_lengths": list(RESPONSES),
        "loss_masks": [(torch.rand(n, generator=generator) < 0.9).int() for n in RESPONSES],
        "advantages": [torch.full((n,), value) for n, value in zip(RESPONSES, (1.0, -0.8, -0.9, 0.7), strict=True)],
    }
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    now = get_log_probs_and_entropy(logits.detach(), args=None, **lengths)[1]["log_probs"]
    batch["rollout_log_probs"] = [
        (row + 0.5 * torch.randn(row.shape, generator=generator)).clamp(max=-0.01) for row in now
    ]
    batch["log_probs"] = now
    return logits, batch


def arguments(**options):
    return Namespace(
        **{
            "eps_clip": 0.2,
            "eps_clip_high": 0.2,
            "advantage_estimator": "grpo",
            "use_rollout_logprobs": True,
            "recompute_loss_function": False,
            "calculate_per_token_loss": True,
            **options,
        }
    )


def token_sum(batch):
    """slime's reducer with --calculate-per-token-loss: a masked sum, divided later."""
    return lambda values: (values * torch.cat(batch["loss_masks"])).sum()


def flat(logits, batch):
    """The same tokens for the core."""
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    now = torch.cat(get_log_probs_and_entropy(logits, args=None, **lengths)[1]["log_probs"])
    return [now, *(torch.cat(batch[name]) for name in ("rollout_log_probs", "advantages", "loss_masks"))]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"bapo_target_share": 0.5}, ClipSettings(target_share=0.5)),
        ({"bapo_preset": "paper", "bapo_high": [1.2, 2.0]}, ClipSettings(measure="surrogate", high=(1.2, 2.0))),
        ({"bapo_preset": "released-script"}, ClipSettings.preset("released-script")),
    ],
)
def test_bounds_loss_and_gradient_are_the_cores(options, settings):
    logits, batch = micro_batch()
    args = arguments(**options)
    loss, reported = bapo_loss(args, batch, logits, token_sum(batch))
    tokens = flat(logits, batch)
    tokens[3] = tokens[3].bool()
    count = tokens[3].sum()
    [gradient] = torch.autograd.grad(loss / count, logits)
    out, token_gradient = core(tokens, settings=settings)
    [expected] = torch.autograd.grad(tokens[0], logits, token_gradient)
    assert (loss / count).item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(gradient, expected, rtol=0, atol=1e-6)
    assert (reported["bapo/clip_high"] / count).item() == pytest.approx(out.bounds.high.item(), abs=1e-6)
    assert (reported["bapo/share"] / count).item() == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert (args.eps_clip, args.eps_clip_high) == (0.2, 0.2)  # slime's own arguments are left as they were


@pytest.mark.parametrize("delta", [0.03, 0.5])
def test_the_brake_on_all_tokens_is_the_cores(delta):
    """With a third of the tokens exactly at a ratio of 1, where `clamp` alone lets a negative token pass."""
    logits, batch = micro_batch()
    for sampled, now in zip(batch["rollout_log_probs"], batch["log_probs"], strict=True):
        sampled.add_(0.2).clamp_(max=-0.01)
        sampled[::3] = now[::3]
    loss, reported = bapo_loss(arguments(bapo_objective="brake_all", bapo_brake=delta), batch, logits, token_sum(batch))
    tokens = flat(logits, batch)
    tokens[3] = tokens[3].bool()
    count = tokens[3].sum()
    [gradient] = torch.autograd.grad(loss / count, logits)
    out, token_gradient = core(tokens, objective="brake_all", delta=delta)
    [expected] = torch.autograd.grad(tokens[0], logits, token_gradient)
    assert (out.bounds.low == 1) == (delta == 0.03)
    assert out.bounds.low > 0.82
    assert (reported["bapo/clip_low"] / count).item() == pytest.approx(out.bounds.low.item(), abs=1e-6)
    assert (reported["bapo/drift"] / count).item() == pytest.approx(out.bounds.drift.item(), abs=1e-6)
    assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_the_search_of_the_parity_test_is_a_real_one():
    tokens = flat(*micro_batch())
    out, _ = core([*tokens[:3], tokens[3].bool()], settings=ClipSettings(target_share=0.5))
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)


def test_a_window_solves_from_the_last_calls():
    args = arguments(bapo_target_share=0.5, bapo_window=2, calculate_per_token_loss=False)
    for seed in (1, 2, 3):
        logits, batch = micro_batch(seed)
        _, reported = bapo_loss(args, batch, logits, token_sum(batch))
    together = [torch.cat(pair) for pair in zip(flat(*micro_batch(2)), flat(*micro_batch(3)), strict=True)]
    out, _ = core([*together[:3], together[3].bool()], settings=ClipSettings(target_share=0.5))
    assert (reported["bapo/share"] / 4).item() == pytest.approx(out.bounds.share.item(), abs=1e-6)


def test_refusals_say_what_to_set():
    logits, batch = micro_batch()
    for options, words in [
        ({"recompute_loss_function": True}, "--recompute-loss-function"),
        ({"eps_clip_high": 0.28}, r"--eps-clip-high 0\.28 would be ignored"),
        ({"advantage_estimator": "gspo"}, "Use grpo"),
        ({"pg_loss_type": "reinforce"}, "--pg-loss-type reinforce .* has no clip"),
        ({"use_score_centering": True}, "use_score_centering=True has no clip"),
        ({"use_opsm": True}, "--use-opsm masks tokens"),
        ({"bapo_remainder": "weigh"}, "remainder='weigh' would be ignored: slime's own loss"),
        ({"bapo_used_low": 1.0}, r"used_low=1\.0 sets a bound for tokens .* slime trains on every response once"),
        (
            {"bapo_objective": "brake"},
            r"brake=0\.03 sets a bound for tokens .*brake_all is a brake that needs no counts",
        ),
        ({"bapo_clip": 1}, "clip=1 is not a clip setting"),
    ]:
        with pytest.raises(ValueError, match=words):
            bapo_loss(arguments(**options), batch, logits, token_sum(batch))
    batch["loss_masks"][1] = batch["loss_masks"][1][:4]
    with pytest.raises(ValueError, match="--context-parallel-size 1"):
        bapo_loss(arguments(), batch, logits, token_sum(batch))
