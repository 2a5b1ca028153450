"""The loss out of Trinity-RFT's own registry, by its dotted path."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("trinity")

from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN

from bapo import ClipSettings
from bapo.core.bounds import StopReason
from tests.adapters.logged import core, logged

PATH = "bapo.adapters.trinity.BapoPolicyLossFn"


def called(loss_fn, logprobs, old, advantages, mask):
    """As `TrinityPolicyLoss` calls it: with the names of its verl backend."""
    return loss_fn(logprob=logprobs, old_log_probs=old, advantages=advantages, response_mask=mask, uid=None)


@pytest.mark.parametrize(
    ("mode", "reduction"), [("token-mean", "token_mean"), ("seq-mean-token-mean", "sequence_mean")]
)
def test_bounds_loss_and_gradient_are_the_cores(mode, reduction):
    given = logged()
    loss_fn = POLICY_LOSS_FN.get(PATH)(backend="verl", target_share=0.5, loss_agg_mode=mode)
    assert set(loss_fn.select_keys) == {"old_log_probs", "response_mask", "advantages"}
    loss, metrics = called(loss_fn, *given)
    loss.backward()
    out, gradient = core(given, settings=ClipSettings(target_share=0.5), reduction=reduction)
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)  # a real search
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(given[0].grad, gradient, rtol=0, atol=1e-6)
    for name in ("clip_low", "clip_high", "share", "clip_fraction"):
        assert metrics[f"bapo/{name}"] == pytest.approx(out.metrics[name].item(), abs=1e-6)


def test_the_remainder_is_weighed_as_in_the_core():
    given, settings = logged(), {"target_share": 0.9, "remainder": "weigh"}
    loss, metrics = called(POLICY_LOSS_FN.get(PATH)(**settings), *given)
    loss.backward()
    out, gradient = core(given, settings=ClipSettings(**settings))
    assert metrics["bapo/negative_weight"] == pytest.approx(out.bounds.negative_weight.item(), abs=1e-6) != 1
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(given[0].grad, gradient, rtol=0, atol=1e-6)


def test_a_window_solves_from_the_last_calls():
    loss_fn = POLICY_LOSS_FN.get(PATH)(target_share=0.5, window=2)
    for seed in (2, 5, 4):
        _, metrics = called(loss_fn, *logged(seed))
    together = [torch.cat(pair) for pair in zip(logged(5), logged(4), strict=True)]
    out, _ = core(together, settings=ClipSettings(target_share=0.5))
    assert metrics["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert metrics["bapo/clip_high"] == out.bounds.high.item()


def test_default_args_make_one():
    cls = POLICY_LOSS_FN.get(PATH)
    assert cls(**cls.default_args()).controller.settings == ClipSettings()


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"policy_loss_fn_args: clip_range=0\.2 is not a clip setting"):
        POLICY_LOSS_FN.get(PATH)(clip_range=0.2)
    with pytest.raises(ValueError, match=r"policy_loss_fn_args: used_low=1\.0 .* neither the epoch nor the use_count"):
        POLICY_LOSS_FN.get(PATH)(used_low=1.0)
