"""The brake on a GPU: its kernels, compiled, and the whole loss against the literal loop."""

import pytest
import torch

from bapo import ClipSettings, policy_loss
from tests.unit.core.test_brake import (
    by_loop,
    near,
    test_the_kernel_of_the_loss_takes_a_bound_from_the_device,
    test_the_kernels_have_the_bounds_of_the_torch_path,
)
from tests.unit.core.test_loss_uses import stale

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

__all__ = [
    "test_the_kernel_of_the_loss_takes_a_bound_from_the_device",
    "test_the_kernels_have_the_bounds_of_the_torch_path",
]


@pytest.mark.parametrize("count", [1, 300, 70_000])
def test_the_loss_on_the_device_has_the_bound_of_the_loop_without_a_host_sync(count):
    logprobs, behavior, advantages, mask, uses = stale(count, 5)
    logprobs = (logprobs - 0.01).clamp(max=0)
    mask[0] = True
    given = [x.cuda() for x in (logprobs, behavior, advantages, mask)]
    own = {"brake": {"objective": "brake", "delta": 0.5}, "all": {"objective": "brake_all", "delta": 0.5}}
    own["bapo"] = {"settings": ClipSettings(low=(0.8, 0.8), brake=0.5)}
    for name, options in own.items():
        options = options if name == "all" else {**options, "uses": uses.cuda()}
        policy_loss(*given, denominator=1.0, **options)  # compiles, and copies its grids
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            bounds = policy_loss(*given, denominator=1.0, **options).bounds
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tokens = logprobs, behavior, advantages, mask, uses
        drift, bound = by_loop(tokens, 0.8, 0.5, "all" if name == "all" else "used")
        assert near(bounds.low if name == "all" else bounds.used_low, bound)
        assert float(bounds.drift) == pytest.approx(drift, rel=1e-6, abs=1e-8)
