"""The fused log-probs against log-softmax over full logits in float64. Without CUDA: under Triton's interpreter."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from bapo.core.logprobs import chunked_logprobs

pytest.importorskip("triton")
from bapo.core.kernels import logprobs as kernels
from bapo.core.kernels.logprobs import _Sum, fused_logprobs, tiling
from tests.precisions import COARSE, PRECISIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORBIDDEN = 250
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
}


def naive(hidden, weight, bias, targets, temperature):
    """Exact on the logits that a model of this dtype makes: rounded to it, and then float64."""
    logits = torch.nn.functional.linear(hidden, weight, bias).double()
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


def problem(tokens=7, width=16, vocabulary=300, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) / 2
    bias = torch.randn(vocabulary, generator=generator)
    bias[FORBIDDEN:] = -torch.inf
    targets = torch.randint(0, min(vocabulary, FORBIDDEN), (tokens,), generator=generator).to(DEVICE)
    return [x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight, bias)], targets


def results(function, leaves, targets, temperature, coefficients, *options):
    """Both outputs, and the gradients of every leaf for a loss that weighs both."""
    outputs = function(*leaves, targets, temperature, *options)
    loss = sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=True))
    return *outputs, *torch.autograd.grad(loss, [x for x in leaves if x is not None and x.requires_grad])


def compare(fused, expected, dtype):
    for ours, theirs in zip(fused[:2], expected[:2], strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours.double(), theirs.double(), rtol=2e-6, atol=4e-6)  # same logits, whatever their dtype
    for ours, theirs in zip(fused[2:], expected[2:], strict=True):
        assert ours.dtype == dtype
        assert_close(ours.double(), theirs.double(), **TOLERANCE[dtype])


def coefficients(tokens=7):
    return torch.randn(2, tokens, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_to_the_naive_computation_forbidden_tokens_included(dtype, temperature):
    leaves, targets = problem(dtype=dtype)
    fused = results(fused_logprobs, leaves, targets, temperature, coefficients())
    compare(fused, results(naive, leaves, targets, temperature, coefficients()), dtype)


def exact(hidden, weight, bias, targets, temperature):
    """The same where nothing is rounded after the inputs."""
    return naive(hidden.double(), weight.double(), bias.double(), targets, temperature)


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("function", [fused_logprobs, chunked_logprobs])
def test_float32_logits_are_not_rounded_to_the_dtype_of_the_model(function, dtype):
    (hidden, weight, bias), targets = problem(dtype=dtype)
    leaves = [(8 * hidden).detach().requires_grad_(), weight, bias]  # logits of up to 50
    expected = results(exact, leaves, targets, 0.7, coefficients())
    for most in (2**20, 7 * 100, 9):
        compare(results(function, leaves, targets, 0.7, coefficients(), most, True), expected, dtype)
    rounded = function(*leaves, targets, 0.7)
    assert float((rounded[0] - expected[0]).detach().abs().max()) > (0.01 if dtype == torch.float16 else 0.1)


def test_float32_models_have_float32_logits_already():
    leaves, targets = problem()
    for function in (fused_logprobs, chunked_logprobs):
        plain, wide = (results(function, leaves, targets, 0.7, coefficients(), 700, on) for on in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(plain, wide, strict=True))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(
    ("tile_logits", "tiles"),
    [(7 * 300, (1, 1)), (7 * 150, (1, 2)), (7 * 100, (1, 3)), (9, (2, 3)), (4, (2, 3)), (1, (4, 3))],
)
def test_any_tiling_gives_the_same(dtype, tile_logits, tiles):
    leaves, targets = problem(dtype=dtype)
    assert tuple(map(len, tiling(7, 300, tile_logits))) == tiles
    fused = results(fused_logprobs, leaves, targets, 0.7, coefficients(), tile_logits)
    compare(fused, results(naive, leaves, targets, 0.7, coefficients()), dtype)


def test_what_fresh_memory_holds_does_not_matter(monkeypatch):
    leaves, targets = problem(vocabulary=300, dtype=torch.float16)  # a row has room for 304
    clean = results(fused_logprobs, leaves, targets, 0.7, coefficients())
    fresh = kernels._buffer

    def full_of_signalling_nans(*layout):
        return fresh(*layout).view(torch.int16).fill_(0x7D00).view(torch.float16)

    monkeypatch.setattr(kernels, "_buffer", full_of_signalling_nans)
    for ours, theirs in zip(results(fused_logprobs, leaves, targets, 0.7, coefficients()), clean, strict=True):
        assert torch.equal(ours, theirs)


def test_tiles_cover_everything_once_and_keep_to_the_budget():
    for tokens, vocabulary, budget in [(8192, 151_936, 2**28), (10**6, 151_936, 2**28), (3, 50_257, 2**12), (1, 1, 1)]:
        parts, spans = tiling(tokens, vocabulary, budget)
        for pieces, total in ((parts, tokens), (spans, vocabulary)):
            assert pieces[0].start == 0
            assert pieces[-1].stop == total
            assert all(a.stop == b.start for a, b in pairwise(pieces))
        sizes = [max(piece.stop - piece.start for piece in pieces) for pieces in (parts, spans)]
        assert sizes[0] * (sizes[1] - 128) < budget
        assert len(parts) == 1 or tokens > 2**15  # one part: the weight's gradient is written once


def test_rows_longer_than_a_block_with_the_maximum_at_either_end():
    (hidden, weight, _), targets = problem(tokens=4, vocabulary=9000)
    with torch.no_grad():
        weight[torch.tensor([0, -1])] = hidden[:2] * 3  # the first token's maximum comes first, the second's last
    for tile_logits in (4 * 9000, 4 * 4600):
        fused = results(fused_logprobs, (hidden, weight, None), targets, 0.7, coefficients(4), tile_logits)
        compare(fused, results(naive, (hidden, weight, None), targets, 0.7, coefficients(4)), torch.float32)


def test_rows_that_begin_with_a_whole_tile_of_forbidden_tokens():
    (hidden, weight, bias), targets = problem()
    bias = torch.zeros_like(bias)
    bias[:140] = -torch.inf
    targets = 150 + targets % 140
    leaves = (hidden, weight, bias)
    fused = results(fused_logprobs, leaves, targets, 1.0, coefficients(), 7 * 100)
    compare(fused, results(naive, leaves, targets, 1.0, coefficients()), torch.float32)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_one_output_and_one_gradient_at_a_time(used, needs):
    leaves, targets = problem()
    leaves = [x.detach().requires_grad_(need) for x, need in zip(leaves, needs, strict=True)]
    leaf = leaves[needs.index(True)]
    ours, theirs = (
        torch.autograd.grad(function(*leaves, targets, 0.7)[used].sum(), leaf)[0]
        for function in (fused_logprobs, naive)
    )
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_no_gradient_no_graph():
    leaves, targets = problem()
    with torch.no_grad():
        silent = fused_logprobs(*leaves, targets, 0.7)
    for a, b in zip(silent, fused_logprobs(*leaves, targets, 0.7), strict=True):
        assert not a.requires_grad
        assert_close(a, b.detach(), rtol=0, atol=0)


def test_gradients_of_rows_sum_to_zero_under_autocast():
    (hidden, weight, _), targets = problem(tokens=6)
    bias = torch.zeros(300, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logprobs, _ = fused_logprobs(hidden, weight, bias, targets)
        gradient = torch.autograd.grad(logprobs.sum(), bias)[0]
    assert gradient.sum().abs() < 1e-5
    assert_close(logprobs, chunked_logprobs(hidden, weight, bias, targets)[0])


def test_inputs_that_are_views_of_something_else():
    (hidden, weight, bias), targets = problem()
    views = hidden.detach().T.contiguous().T.requires_grad_(), weight.detach().T.contiguous().T.requires_grad_(), bias
    apart = torch.stack([targets, targets], dim=1)[:, 0]
    assert not views[0].is_contiguous()
    assert not apart.is_contiguous()
    fused = results(fused_logprobs, views, apart, 0.7, coefficients(), 7 * 100)
    compare(fused, results(naive, (hidden, weight, bias), targets, 0.7, coefficients()), torch.float32)


def test_what_is_not_a_number_shows():
    (hidden, weight, _), targets = problem()
    with torch.no_grad():
        hidden[2, 3] = torch.nan
    targets[4], targets[5] = -100, 300  # padding that nobody removed
    logprobs, _ = fused_logprobs(hidden, weight, None, targets)
    assert logprobs.isnan().tolist() == [False, False, True, False, True, True, False]


def test_many_small_terms_are_summed_in_float32():
    # 1 + 512 * 2^-9 = 2; in bfloat16 each of the small terms would be lost beside 1.
    one, small = (torch.tensor([[x]], device=DEVICE, dtype=torch.bfloat16) for x in (1.0, 2.0**-9))
    total = _Sum(one, terms=513)
    for term in (one, *[small] * 512):
        total.add_product(slice(0, 1), term, one)
    assert total.total.item() == 2.0
