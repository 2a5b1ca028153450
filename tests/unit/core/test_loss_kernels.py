"""policy_loss as a whole through the kernels, against the torch path on CPU.

Kernels run on the GPU where there is one. Elsewhere Triton's interpreter runs them, once `usable` says that it may.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipSettings, bounds_from_table, policy_loss, update_table
from tests.precisions import PRECISIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.arange(5).repeat_interleave(40)


@pytest.fixture
def kernels(monkeypatch):
    """Lets kernels run on this machine's tensors for the duration of one call."""

    def by_kernels(function, *arguments, **options):
        with monkeypatch.context() as patch:
            if DEVICE == "cpu":
                patch.setattr("bapo.core.kernels.usable", lambda tensor: True)
            return function(*arguments, **options)

    return by_kernels


def batch(dtype=torch.float32, garbage=True):
    generator = torch.Generator().manual_seed(0)
    behavior = -3 * torch.rand(200, generator=generator)
    logprobs = (behavior + 0.5 * torch.randn(200, generator=generator)).clamp(max=0)
    advantages = torch.randn(200, generator=generator) - 0.2
    mask = torch.rand(200, generator=generator) < 0.8
    tensors = [x.to(dtype) for x in (logprobs, behavior, advantages)]
    if garbage:
        for values, bad in zip(tensors, (math.nan, math.inf, math.nan), strict=True):
            values[~mask] = bad
    return [*tensors, mask]


def compare(kernels, tensors, **options):
    """Loss, gradient, fate and metrics of both paths."""

    def run(device, call):
        leaf, *rest = (x.detach().clone().to(device) for x in tensors)
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        out = call(policy_loss, leaf.requires_grad_(), *rest, **moved)
        out.loss.backward()
        return out, leaf.grad.cpu()

    (ours, gradient), (theirs, expected) = (
        run(DEVICE, kernels),
        run("cpu", lambda f, *args, **kwargs: f(*args, **kwargs)),
    )
    assert ours.loss.grad_fn.name() != theirs.loss.grad_fn.name()  # two ways, not one
    assert (ours.loss.dtype, ours.loss.shape) == (theirs.loss.dtype, theirs.loss.shape)
    assert_close(ours.loss.detach().cpu(), theirs.loss.detach(), rtol=1e-5, atol=1e-7)
    assert gradient.dtype == expected.dtype
    assert_close(gradient, expected, rtol=max(1e-5, 2 * torch.finfo(gradient.dtype).eps), atol=1e-7)
    assert torch.equal(ours.retained.cpu(), theirs.retained)
    assert ours.metrics.keys() == theirs.metrics.keys()
    for name, value in theirs.metrics.items():
        assert ours.metrics[name].dtype == value.dtype, name
        assert_close(ours.metrics[name].cpu(), value, rtol=1e-5, atol=1e-6, msg=name)
    return ours


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"settings": ClipSettings.preset("paper"), "dual_clip": 3.0},
        {"settings": ClipSettings(weight="rollout_prob", order="low_first", target_share=0.6)},
        {"objective": "grpo"},
        {"objective": "dual_clip", "cap": 1.5},
    ],
    ids=["bapo", "paper dual_clip", "weighted", "grpo", "dual_clip"],
)
def test_objectives_with_one_pair_of_bounds(kernels, dtype, options):
    compare(kernels, batch(dtype), **options)


@pytest.mark.parametrize("denominator", [None, 77, torch.tensor(77.0, dtype=torch.float64)], ids=["none", "int", "0-d"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length", "balanced"])
def test_reductions_and_denominators(kernels, reduction, denominator):
    options = {"objective": "clip_higher", "reduction": reduction, "length": 50, "denominator": denominator}
    weights = torch.where(batch()[3], torch.linspace(0.1, 2.0, 200), torch.nan) if reduction == "balanced" else None
    compare(kernels, batch(), sequence_ids=IDS, loss_weights=weights, **options)
    rows = None if weights is None else weights.view(5, 40)
    compare(kernels, [x.view(5, 40) for x in batch()], loss_weights=rows, **options)


def test_metrics_that_need_clean_tokens(kernels):
    entropy = torch.rand(200, generator=torch.Generator().manual_seed(1))
    entropy[~batch()[3]] = math.nan
    out = compare(kernels, batch(), entropy=entropy)
    assert "predicted_entropy_change" in out.metrics
    assert all(value.isfinite() for value in out.metrics.values())


def test_behavior_of_another_dtype_is_worked_on_in_float32(kernels):
    logprobs, behavior, advantages, mask = batch()
    settings = ClipSettings(weight="rollout_prob")
    compare(kernels, [logprobs, behavior.double(), advantages.bfloat16(), mask], settings=settings)


def test_tables_of_parts_give_the_bounds_of_the_whole(kernels):
    tensors, settings = batch(), ClipSettings(target_share=0.55)
    parts = [[x[i : i + 50].to(DEVICE) for x in tensors] for i in range(0, 200, 50)]
    table = sum(kernels(update_table, *part, settings) for part in parts)
    bounds = kernels(bounds_from_table, table, settings)
    whole = policy_loss(*tensors, settings=settings).bounds
    assert_close(table.cpu(), update_table(*tensors, settings), rtol=1e-6, atol=1e-9)
    assert (bounds.low.cpu(), bounds.high.cpu(), bounds.stop.cpu()) == (whole.low, whole.high, whole.stop)
