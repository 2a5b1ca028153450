"""The loss called as prime-rl's `compute_loss` calls one: sequence by sequence. prime-rl itself is not on PyPI."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bapo import ClipSettings
from bapo.adapters.prime_rl import bapo_loss
from bapo.core.bounds import StopReason
from tests.adapters.logged import core, logged


@dataclass
class LossInputs:
    """The fields of prime-rl's class of this name."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    teacher_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


def update(batch, weights=None, **kwargs):
    """A step as prime-rl takes it: the sum over sequences by the number of tokens, and metrics as lists."""
    losses, metrics = [], {}
    for i in range(len(batch[0])):
        row = [column[i] for column in batch]
        inputs = LossInputs(row[0], row[1], None, row[2], row[3], None if weights is None else weights[i])
        result = bapo_loss(inputs, **kwargs)
        losses.append(result.loss)
        for name, value in result.metrics.items():
            metrics.setdefault(name, []).append(value)
    return sum(losses) / batch[3].sum(), {name: torch.stack(values) for name, values in metrics.items()}


def test_with_a_step_in_the_window_bounds_loss_and_gradient_are_the_cores():
    batch, kwargs = logged(), {"window": 6, "target_share": 0.5, "low": [0.6, 0.9]}
    _, first = update(batch, **kwargs)
    loss, metrics = update(batch, **kwargs)  # now every window holds each of the six sequences once
    loss.backward()
    out, gradient = core(batch, settings=ClipSettings(target_share=0.5))
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)  # a real search
    assert_close(metrics["bapo/clip_high"], out.bounds.high.expand(6))
    assert_close(metrics["bapo/share"], out.bounds.share.expand(6))
    assert_close(first["bapo/share"][-1], out.bounds.share)
    assert first["bapo/share"][0] in (0, 1)  # one sequence alone has one sign
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(batch[0].grad, gradient, rtol=0, atol=1e-6)


def test_loss_weights_multiply_loss_and_signal():
    batch, weights = logged(), torch.rand(6, 9, generator=torch.Generator().manual_seed(3)) * 2
    kwargs = {"window": 6, "target_share": 0.47}
    update(batch, weights, **kwargs)
    loss, metrics = update(batch, weights, **kwargs)
    out, _ = core([*batch[:2], batch[2] * weights, batch[3]], settings=ClipSettings(target_share=0.47))
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)
    assert_close(metrics["bapo/share"], out.bounds.share.expand(6))


def test_the_brake_on_all_tokens():
    batch, kwargs = logged(4), {"window": 6, "objective": "brake_all", "brake": 0.2}
    update(batch, **kwargs)
    loss, metrics = update(batch, **kwargs)
    loss.backward()
    out, gradient = core(batch, objective="brake_all", delta=0.2)
    assert 0.82 < out.bounds.low < 1
    assert_close(metrics["bapo/clip_low"], out.bounds.low.expand(6))
    assert_close(metrics["bapo/drift"], out.bounds.drift.expand(6))
    assert_close(batch[0].grad, gradient, rtol=0, atol=1e-6)


def test_the_authors_settings():
    batch, kwargs = logged(), {"window": 6, "preset": "released-script", "dual_clip": 3.0}
    update(batch, **kwargs)
    loss, _ = update(batch, **kwargs)
    out, _ = core(batch, settings=ClipSettings.preset("released-script"), dual_clip=3.0)
    assert loss.item() == pytest.approx(out.loss.item(), abs=1e-6)


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"ratio_high=2\.0 is not a clip setting"):
        update(logged(), ratio_high=2.0)
    with pytest.raises(ValueError, match=r"used_low=1\.0 .* prime-rl trains on every rollout once"):
        update(logged(), used_low=1.0)
    with pytest.raises(ValueError, match=r"brake=0\.03 .* prime-rl trains on every rollout once.*brake_all"):
        update(logged(), objective="brake")
