"""Solver and clipped loss on CUDA at the size of an update: the CPU's numbers, few launches, no host sync."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipSettings, bounds_from_table, policy_loss, signal_table, solve_bounds
from bapo.core.bounds import grids_of
from bapo.core.loss import update_table
from bapo.core.sums import Chunk, compared_sums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TOKENS = 2**17 + 77
COMBINATIONS = list(itertools.product(["gradient", "surrogate"], ["none", "rollout_prob"], ["high_first", "low_first"]))


def update(tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(tokens, generator=generator) * 3
    logprobs = (behavior + 0.5 * torch.randn(tokens, generator=generator)).clamp(max=0)
    advantages = torch.randn(tokens, generator=generator) - 0.2
    return logprobs, behavior, advantages, torch.rand(tokens, generator=generator) < 0.9


def values(bounds):
    found = (bounds.low, bounds.high, bounds.share, bounds.share_at_start, bounds.share_at_end, bounds.stop)
    return [x.item() for x in found]


@pytest.mark.parametrize(("measure", "weight", "order"), COMBINATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_table_and_bounds_equal_those_of_the_cpu(measure, weight, order, dtype):
    logprobs, behavior, advantages, mask = update()
    ratio, advantages, behavior = (logprobs - behavior).exp().to(dtype), advantages.to(dtype), behavior.to(dtype)
    on_cuda = [x.cuda() for x in (ratio, advantages, mask)]
    for target in (0.3, 0.45, 0.5, 0.6, 0.9):
        settings = ClipSettings(target_share=target, measure=measure, weight=weight, order=order)
        expected = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior)
        table = signal_table(*on_cuda, settings, behavior_logprobs=behavior.cuda())
        assert_close(table.cpu(), expected, rtol=1e-11, atol=1e-8)
        cpu = solve_bounds(ratio, advantages, mask, settings, behavior_logprobs=behavior)
        for cuda in (
            solve_bounds(*on_cuda, settings, behavior_logprobs=behavior.cuda()),
            bounds_from_table(table, settings, dtype=dtype),
        ):
            assert values(cuda) == pytest.approx(values(cpu), rel=1e-6)
            assert cuda.low.dtype == dtype


def test_every_kind_of_input_gets_a_compilation_of_its_own():
    """A launch that is remembered for aligned tensors of one type must not serve others."""
    logprobs, behavior, advantages, mask = update()
    ratio = (logprobs - behavior).exp()
    uses = torch.randint(0, 2, mask.shape, generator=torch.Generator().manual_seed(1))
    found = {}
    for _ in range(2):  # what came first and what was remembered
        for first, dtype, integers, used_low in itertools.product(
            (0, 1, 3, 4), (torch.float32, torch.bfloat16, torch.float64), (torch.int64, torch.int8), (None, 1.0)
        ):
            settings = ClipSettings(used_low=used_low)
            given = [x[first:].to(dtype) for x in (ratio, advantages)]
            on_cuda = [x.cuda().to(dtype)[first:] for x in (ratio, advantages)]
            cpu = solve_bounds(*given, mask[first:], settings, uses=None if used_low is None else uses[first:])
            cuda = solve_bounds(
                *on_cuda,
                mask.cuda()[first:],
                settings,
                uses=None if used_low is None else uses.cuda().to(integers)[first:],
            )
            assert values(cuda) == pytest.approx(values(cpu), rel=1e-6)
            assert found.setdefault((first, dtype, integers, used_low), values(cuda)) == values(cuda)


def test_a_remembered_launch_runs_on_the_stream_of_its_call():
    logprobs, behavior, advantages, mask = (x.cuda() for x in update())
    expected = values(solve_bounds((logprobs - behavior).exp(), advantages, mask, ClipSettings()))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        ratio = (logprobs - behavior).exp()  # not there yet when another stream would look
        bounds = solve_bounds(ratio, advantages, mask, ClipSettings())
    stream.synchronize()
    assert values(bounds) == expected


@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
def test_the_kernel_equals_the_torch_path_on_the_same_device(measure):
    logprobs, behavior, advantages, mask = (x.cuda() for x in update())
    ratio, settings = (logprobs - behavior).exp(), ClipSettings(measure=measure)
    grids = grids_of(settings, torch.float32, ratio.device)
    signal = torch.where(mask, advantages, 0.0)
    chosen = torch.where(mask, ratio, 0.0)
    compared = compared_sums(
        [Chunk(chosen, chosen, signal)], grids.low, grids.high, grids.thresholds, surrogate=measure == "surrogate"
    )
    assert_close(signal_table(ratio, advantages, mask, settings), compared, rtol=1e-11, atol=1e-8)


def test_tables_of_micro_batches_add_up_to_the_update_s_without_a_host_sync():
    tensors = [x.cuda() for x in update()]
    settings = ClipSettings()
    update_table(*tensors, settings)  # compiles, and builds the cached grids
    policy_loss(*tensors, settings=settings)
    bounds_from_table(update_table(*tensors, settings), settings)
    pieces = list(zip(*(x.split(40_000) for x in tensors), strict=True))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole = policy_loss(*tensors, settings=settings).bounds
        summed = bounds_from_table(sum(update_table(*piece, settings) for piece in pieces), settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert values(summed) == pytest.approx(values(whole), rel=1e-6)


def test_solve_bounds_can_be_captured_in_a_graph():
    logprobs, behavior, advantages, mask = (x.cuda() for x in update())
    ratio, settings = (logprobs - behavior).exp(), ClipSettings(target_share=0.5)
    solve_bounds(ratio, advantages, mask, settings)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = solve_bounds(ratio, advantages, mask, settings)
    for seed in (1, 2):
        new_logprobs, new_behavior, new_advantages, new_mask = update(seed=seed)
        new_advantages += 0.1 * seed
        new_ratio = (new_logprobs - new_behavior).exp()
        for static, new in ((ratio, new_ratio), (advantages, new_advantages), (mask, new_mask)):
            static.copy_(new)
        graph.replay()
        expected = solve_bounds(new_ratio, new_advantages, new_mask, settings)
        assert values(captured) == pytest.approx(values(expected), rel=1e-6)


def launches(function):
    """Names of what the second call runs on the device."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def test_solve_bounds_is_two_launches():
    logprobs, behavior, advantages, mask = (x.cuda() for x in update())
    ratio = (logprobs - behavior).exp()
    launched = launches(lambda: solve_bounds(ratio, advantages, mask, ClipSettings()))
    assert launched == ["_signal_kernel", "_choose_kernel"]


def test_policy_loss_is_two_launches_more_and_its_backward_pass_three():
    tensors = [x.cuda() for x in update()]
    tensors[0].requires_grad_()
    clipped = ["_clipped_kernel", "_summary_kernel"]
    assert launches(lambda: policy_loss(*tensors, objective="grpo")) == clipped
    assert launches(lambda: policy_loss(*tensors)) == ["_signal_kernel", "_choose_kernel", *clipped]
    # The gradient of the loss, 1; that over the denominator; its product with the derivative.
    loss = policy_loss(*tensors).loss
    assert len(launches(lambda: torch.autograd.grad(loss, tensors[0], retain_graph=True))) == 3


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("denominator", [None, 70_000.0, torch.tensor(70_000.0)], ids=["none", "float", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reductions_denominators_dtypes_and_garbage_where_the_mask_is_off(reduction, denominator, dtype):
    shape = (257, 511)
    logprobs, behavior, advantages, mask = (x.reshape(shape) for x in update(torch.Size(shape).numel()))
    tensors = [x.to(dtype) for x in (logprobs, behavior, advantages)]
    for values, bad in zip(tensors, (torch.nan, torch.inf, torch.nan), strict=True):
        values[~mask] = bad
    options = {"objective": "clip_higher", "reduction": reduction, "length": 600}

    def run(device):
        leaf, *rest = (x.to(device) for x in (*tensors, mask))
        leaf.requires_grad_()
        divisor = denominator.to(device) if isinstance(denominator, torch.Tensor) else denominator
        out = policy_loss(leaf, *rest, denominator=divisor, **options)
        out.loss.backward()
        return out, leaf.grad

    (cuda, cuda_gradient), (cpu, cpu_gradient) = run("cuda"), run("cpu")
    assert_close(cuda.loss.cpu(), cpu.loss, rtol=1e-5, atol=1e-7)
    assert (cuda.loss.dtype, cuda_gradient.dtype) == (torch.float32, dtype)
    same = cuda.retained.cpu() == cpu.retained  # a ratio within rounding of a bound may fall on either side of it
    assert (~same).sum() <= 2
    tolerance = {torch.float32: (1e-5, 1e-10), torch.bfloat16: (1e-2, 1e-9), torch.float16: (2e-3, 1e-7)}[dtype]
    assert_close(cuda_gradient.cpu()[same], cpu_gradient[same], rtol=tolerance[0], atol=tolerance[1])
    assert not cuda_gradient.cpu()[~mask].any()
    for name, value in cpu.metrics.items():
        assert_close(cuda.metrics[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "bapo"},
        {"objective": "bapo", "settings": ClipSettings.preset("paper"), "dual_clip": 3.0},
        {"objective": "grpo"},
        {"objective": "clip_higher"},
        {"objective": "dual_clip"},
    ],
    ids=["bapo", "bapo paper dual_clip", "grpo", "clip_higher", "dual_clip"],
)
@pytest.mark.parametrize("shape", [(TOKENS,), (257, 511)])
def test_loss_gradient_fate_and_metrics_equal_those_of_the_cpu(options, shape):
    tensors = update(torch.Size(shape).numel())

    def run(device):
        leaf, *rest = (x.reshape(shape).to(device) for x in tensors)
        leaf.requires_grad_()
        out = policy_loss(leaf, *rest, **options)
        out.loss.backward()
        return out, leaf.grad

    (cuda, cuda_gradient), (cpu, cpu_gradient) = run("cuda"), run("cpu")
    assert_close(cuda.loss.cpu(), cpu.loss, rtol=1e-5, atol=1e-7)
    # A ratio within rounding of a bound may fall on either side of it.
    apart = cuda.retained.cpu() != cpu.retained
    assert apart.sum() <= 2
    same = ~apart
    assert_close(cuda_gradient.cpu()[same], cpu_gradient[same], rtol=1e-5, atol=1e-10)
    assert cuda.metrics.keys() == cpu.metrics.keys()
    for name, value in cpu.metrics.items():
        assert_close(cuda.metrics[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("objective", ["bapo", "grpo"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_bad_value_poisons_loss_bounds_and_every_gradient(objective, bad):
    logprobs, behavior, advantages, mask = (x.cuda() for x in update(1000))
    mask[17] = True
    logprobs[17] = bad
    out = policy_loss(logprobs.requires_grad_(), behavior, advantages, mask, objective=objective)
    out.loss.backward()
    assert out.loss.isnan()
    assert out.bounds.share.isnan()
    if objective == "bapo":
        assert torch.stack([out.bounds.low, out.bounds.high]).isnan().all()
    assert logprobs.grad[mask].isnan().all()


def test_bounds_on_the_cpu_are_taken_along():
    tensors = [x.cuda() for x in update(2000)]
    bounds = policy_loss(*update(2000)).bounds
    assert_close(policy_loss(*tensors, bounds=bounds).loss.cpu(), policy_loss(*update(2000)).loss, rtol=1e-5, atol=1e-7)
