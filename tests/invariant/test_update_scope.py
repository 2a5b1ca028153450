"""One update is one update: however its tokens are split, ordered, padded or spread over ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.testing import assert_close as exactly_close

from bapo import ClipSettings, bounds_from_table, policy_loss, signal_table, solve_bounds
from bapo.core.reduction import denominator_of
from tests.processes import in_ranks
from tests.rounding import rounding

pytestmark = pytest.mark.numeric
LIMIT = rounding(16 * 24, size=32.0, dtype=torch.float64)
"""The worst case of a sum of 384 terms r A that are below 32: n u sum |x_i|, of a mean."""

SETTINGS = [
    ClipSettings(target_share=0.47),
    ClipSettings(target_share=0.47, weight="rollout_prob", order="low_first"),
    ClipSettings.preset("weak-model"),
]


def update(sequences=16, tokens=24, seed=0):
    """Stale tokens with more negative than positive signal, in float64 so that only logic can differ."""
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(sequences, tokens, generator=generator, dtype=torch.float64) * 3
    logprobs = (behavior + 0.5 * torch.randn(sequences, tokens, generator=generator, dtype=torch.float64)).clamp(max=0)
    advantages = torch.randn(sequences, 1, generator=generator, dtype=torch.float64).expand(-1, tokens) - 0.2
    mask = torch.arange(tokens) < torch.randint(2, tokens, (sequences, 1), generator=generator)
    return logprobs, behavior, advantages.clone(), mask


def whole(arguments, settings, reduction="token_mean"):
    """Bounds, loss and gradient of the update in one call."""
    logprobs, behavior, advantages, mask = arguments
    logprobs = logprobs.clone().requires_grad_()
    out = policy_loss(logprobs, behavior, advantages, mask, settings=settings, reduction=reduction)
    out.loss.backward()
    return out.bounds, out.loss.detach(), logprobs.grad


def assert_close(ours, theirs, *, limit=LIMIT):
    exactly_close(ours, theirs, rtol=0, atol=limit)


def same_bounds(a, b):
    assert_close(torch.stack([a.low, a.high]), torch.stack([b.low, b.high]), limit=0)
    assert_close(a.share, b.share)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("sizes", [[16], [1] * 16, [5, 1, 10], [8, 8]])
def test_any_split_into_micro_batches_gives_the_same_bounds_loss_and_gradient(settings, reduction, sizes):
    arguments = update()
    bounds, loss, gradient = whole(arguments, settings, reduction)
    parts = list(zip(*(x.split(sizes) for x in arguments), strict=True))
    table = sum(
        signal_table((logprobs - behavior).exp(), advantages, mask, settings, behavior_logprobs=behavior)
        for logprobs, behavior, advantages, mask in parts
    )
    solved = bounds_from_table(table, settings, dtype=torch.float64)
    denominator = sum(denominator_of(mask, reduction) for *_, mask in parts)
    losses, gradients = [], []
    for logprobs, behavior, advantages, mask in parts:
        leaf = logprobs.clone().requires_grad_()
        out = policy_loss(leaf, behavior, advantages, mask, bounds=solved, reduction=reduction, denominator=denominator)
        out.loss.backward()
        losses.append(out.loss.detach())
        gradients.append(leaf.grad)
    same_bounds(solved, bounds)
    assert_close(sum(losses), loss)
    assert_close(torch.cat(gradients), gradient)


@pytest.mark.parametrize("settings", SETTINGS)
@hypothesis_settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_order_of_tokens_does_not_matter(settings, seed):
    logprobs, behavior, advantages, mask = (x.flatten() for x in update())
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    bounds, loss, gradient = whole((logprobs, behavior, advantages, mask), settings)
    shuffled = whole(tuple(x[order] for x in (logprobs, behavior, advantages, mask)), settings)
    same_bounds(shuffled[0], bounds)
    assert_close(shuffled[1], loss)
    assert_close(shuffled[2], gradient[order])


@pytest.mark.parametrize("settings", SETTINGS)
def test_padding_and_packing_do_not_matter(settings):
    arguments = update()
    mask = arguments[3]
    bounds, loss, gradient = whole(arguments, settings)
    wider = [torch.nn.functional.pad(x.double(), (3, 9), value=float("nan")) for x in arguments[:3]]
    padded = whole((*wider, torch.nn.functional.pad(mask, (3, 9))), settings)
    packed = whole((*(x[mask] for x in arguments[:3]), mask[mask]), settings)
    for other in (padded, packed):
        same_bounds(other[0], bounds)
        assert_close(other[1], loss)
    assert_close(padded[2][:, 3:-9], gradient)
    assert_close(packed[2], gradient[mask])


def run_ranks(worker, world_size, tmp_path, *arguments):
    in_ranks(worker, world_size, world_size, str(tmp_path), *arguments)
    return [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def join_group(rank, world_size, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=world_size)
    return dist.group.WORLD


def solve_and_step(rank, world_size, directory):
    """Each rank but the last, which is empty, holds some sequences; bounds come from all of them."""
    from torch.distributed.tensor.debug import CommDebugMode

    group = join_group(rank, world_size, directory)
    results = []
    for settings in SETTINGS:
        arguments = update()
        denominator = denominator_of(arguments[3], "token_mean")
        sizes = [16 // (world_size - 1)] * (world_size - 2)
        sizes = [*sizes, 16 - sum(sizes), 0]
        logprobs, behavior, advantages, mask = (x.split(sizes)[rank] for x in arguments)
        leaf = logprobs.clone().requires_grad_()
        with CommDebugMode() as communication:
            out = policy_loss(
                leaf, behavior, advantages, mask, settings=settings, process_group=group, denominator=denominator
            )
            out.loss.backward()
        results.append((out.bounds, out.loss.detach(), leaf.grad, communication.get_total_counts()))
    torch.save(results, f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree_with_one_process_through_exactly_one_collective(world_size, tmp_path):
    ranks = run_ranks(solve_and_step, world_size, tmp_path)
    for index, settings in enumerate(SETTINGS):
        bounds, loss, gradient = whole(update(), settings)
        for rank in ranks:
            same_bounds(rank[index][0], bounds)
            assert rank[index][3] == 1
        assert_close(sum(rank[index][1] for rank in ranks), loss)
        assert_close(torch.cat([rank[index][2] for rank in ranks]), gradient)


def fail_on_rank_one(rank, world_size, directory):
    """Rank 1 has bad input of several kinds; through solve_bounds and through policy_loss."""
    group = join_group(rank, world_size, directory)
    logprobs, behavior, advantages, mask = update()
    if rank == 1:
        logprobs[3, 0] = float("nan")
    messages = []
    for call in (
        lambda: solve_bounds((logprobs - behavior).exp(), advantages, mask, SETTINGS[0], process_group=group),
        lambda: policy_loss(logprobs, behavior, advantages, mask, settings=SETTINGS[0], process_group=group),
        lambda: policy_loss(behavior, behavior, advantages, mask & (rank == 0), process_group=group),
        lambda: policy_loss(behavior, behavior[: 16 - rank], advantages, mask, process_group=group),
        lambda: policy_loss(behavior, behavior, advantages, mask * (1 - rank / 2), process_group=group),
    ):
        try:
            call()
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    torch.save(messages, f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


def test_a_bad_rank_stops_its_peers_instead_of_leaving_them_waiting(tmp_path):
    ranks = run_ranks(fail_on_rank_one, 2, tmp_path)
    assert all("another rank got bad input" in message for message in ranks[0])
    assert "ratio is nan in sequence 3, token 0" in ranks[1][0]
    assert "logprobs is nan in sequence 3, token 0" in ranks[1][1]
    assert "mask selects none" in ranks[1][2]
    assert "behavior_logprobs has shape (15, 24)" in ranks[1][3]
    assert "other than 0 and 1" in ranks[1][4]
