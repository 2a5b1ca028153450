"""Fused log-probs on CUDA at sizes where tiles, memory and synchronization matter."""

import pytest
import torch
from torch.testing import assert_close

from bapo.core.logprobs import chunked_logprobs, token_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TOKENS, WIDTH = 3000, 256


def problem(dtype, vocabulary=32_000, tokens=TOKENS):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(tokens, WIDTH, **draw).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, WIDTH, **draw).div(8).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, **draw).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), **draw)
    return (hidden, weight, bias), targets, torch.randn(2, tokens, **draw)


def naive(leaves, targets, temperature):
    """In float64, from logits of the model's dtype."""
    logprobs = (torch.nn.functional.linear(*leaves).double() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def gradients(outputs, coefficients, leaves):
    return torch.autograd.grad(sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=True)), leaves)


def distance(a, b):
    """Relative, in the Frobenius norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [32_000, 32_003])  # rows of the second are not aligned by themselves
@pytest.mark.parametrize("chunk_logits", [None, 2**24, 2**20])  # 1 tile, 6 spans, 2 parts with 63 spans
def test_equal_to_the_naive_computation(dtype, vocabulary, chunk_logits):
    leaves, targets, coefficients = problem(dtype, vocabulary)
    hidden, weight, bias = leaves
    ours = token_logprobs(hidden, weight, targets, bias=bias, temperature=0.7, chunk_logits=chunk_logits)
    expected = naive(leaves, targets, 0.7)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == torch.float32
        difference = (a.double() - b).abs()
        # A multiplication of another shape may add in another order, and so round a logit to its neighbour.
        assert difference.max() < (1e-4 if dtype == torch.float32 else 0.1)
        assert difference.mean() < (1e-5 if dtype == torch.float32 else 2e-3)
    ours_gradients = gradients(ours, coefficients, leaves)
    for a, b in zip(ours_gradients, gradients(expected, coefficients, leaves), strict=True):
        assert a.dtype == dtype
        assert distance(a, b) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_both_paths_agree_and_float64_takes_the_torch_one():
    (hidden, weight, _), targets, _ = problem(torch.bfloat16)
    for a, b in zip(
        token_logprobs(hidden, weight, targets), chunked_logprobs(hidden, weight, None, targets), strict=True
    ):
        assert (a - b).abs().mean() < 2e-3
    doubled = hidden.double(), weight.double()
    assert token_logprobs(*doubled, targets)[0].dtype == torch.float64


def test_no_tokens_no_error():
    (hidden, weight, _), targets, _ = problem(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden[:0], weight, targets[:0])
    (logprobs.sum() + entropy.sum()).backward()
    assert_close(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("with_gradient", [True, False])
def test_memory_is_a_fraction_of_the_logits(with_gradient):
    (hidden, weight, _), targets, _ = problem(torch.bfloat16, tokens=8192)

    def step():
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(with_gradient):
            logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_logits=2**24)
        if with_gradient:
            (logprobs.sum() + entropy.sum()).backward()

    step()  # workspaces of the multiplications stay
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    added = torch.cuda.max_memory_allocated() - before
    tile, gradient = 2**24 * 2, (hidden.numel() + weight.numel()) * 2
    assert added < 1.3 * tile + (gradient + 3 * hidden.numel() * 4 if with_gradient else 0)
    assert added < targets.numel() * len(weight) * 2 / 4  # the logits alone, in bfloat16


def test_no_host_sync_and_no_compilation_per_shape():
    (hidden, weight, bias), targets, coefficients = problem(torch.bfloat16)

    def step(tokens):
        part = hidden[:tokens], weight, targets[:tokens]
        outputs = token_logprobs(*part, bias=bias, temperature=0.9, chunk_logits=2**20)
        return gradients(outputs, coefficients[:, :tokens], (hidden, weight, bias))

    from bapo.core.kernels.logprobs import _differentiate, _reduce

    def compilations():
        return [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in (_reduce, _differentiate)]

    step(TOKENS)
    compiled = compilations()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in (TOKENS, 2999, 1000, 17, 1):
            step(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compilations() == compiled
