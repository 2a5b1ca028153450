"""Chunked log-probs and entropies against the naive computation, values and gradients."""

import math

import pytest
import torch
from torch.testing import assert_close

from bapo.core.logprobs import token_logprobs
from tests.rounding import carried, of_sum


def naive(hidden, weight, targets, bias=None, temperature=1.0):
    """log-softmax over full logits, as everybody writes it."""
    logits = (
        torch.nn.functional.linear(hidden, weight, bias).float()
        if hidden.dtype != torch.float64
        else (torch.nn.functional.linear(hidden, weight, bias))
    )
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


def problem(tokens=37, width=16, vocabulary=53, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype) / 2
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return [x.requires_grad_() for x in (hidden, weight, bias)], targets


def agree(ours, theirs, limits, *, below):
    """Each within its limit, and no limit so wide that anything would pass."""
    for a, b, limit in zip(ours, theirs, limits, strict=True):
        assert_close(a.double(), b.double(), rtol=0, atol=limit)
    assert max(limits) < below


@pytest.mark.numeric
@pytest.mark.parametrize("chunk_logits", [1, 53 * 10, 53 * 37, 10**9])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equal_to_the_naive_computation(chunk_logits, temperature, with_bias):
    (hidden, weight, bias), targets = problem(dtype=torch.float64)
    inputs = (hidden, weight, *((bias,) if with_bias else ()))
    coefficients = torch.randn(2, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def told(function, **options):
        outputs = function(
            hidden, weight, targets, bias=bias if with_bias else None, temperature=temperature, **options
        )
        total = sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=True))
        return *outputs, *torch.autograd.grad(total, inputs)

    agree(told(token_logprobs, chunk_logits=chunk_logits), told(naive), carried(lambda: told(naive)), below=1e-10)


@pytest.mark.numeric
@pytest.mark.parametrize("used", [0, 1])
def test_gradients_when_only_one_output_is_used(used):
    (hidden, weight, _), targets = problem(dtype=torch.float64)

    def gradients(function):
        return torch.autograd.grad(function(hidden, weight, targets)[used].sum(), (hidden, weight))

    agree(gradients(token_logprobs), gradients(naive), carried(lambda: gradients(naive)), below=1e-10)


def test_finite_differences():
    (hidden, weight, bias), targets = problem(tokens=5, width=3, vocabulary=7, dtype=torch.float64)

    def function(hidden, weight, bias):
        return token_logprobs(hidden, weight, targets, bias=bias, temperature=0.7, chunk_logits=14)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.numeric
def test_float32_agrees_to_float_tolerance():
    (hidden, weight, _), targets = problem(tokens=200, width=64, vocabulary=5000)
    limits = carried(lambda: naive(hidden, weight, targets))
    agree(token_logprobs(hidden, weight, targets), naive(hidden, weight, targets), limits, below=1e-4)


@pytest.mark.numeric
def test_bfloat16_model_gives_float32_logprobs():
    (hidden, weight, _), targets = problem(tokens=64, width=32, vocabulary=500)
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_logits=500 * 20)
    assert logprobs.dtype == entropy.dtype == torch.float32

    def told():
        logprobs = naive(hidden, weight, targets)[0]
        return logprobs, *torch.autograd.grad(logprobs.sum(), (hidden, weight))

    ours = [logprobs, *torch.autograd.grad(logprobs.sum(), (hidden, weight))]
    agree(ours, told(), carried(told), below=0.2)


def test_forbidden_tokens_have_probability_zero_and_leave_no_nan():
    (hidden, weight, _), targets = problem(tokens=6, width=4, vocabulary=8, dtype=torch.float64)
    bias = torch.zeros(8, dtype=torch.float64)
    bias[3] = -math.inf
    targets = targets.clamp(max=2)
    logprobs, entropy = token_logprobs(hidden, weight, targets, bias=bias)
    kept = [0, 1, 2, 4, 5, 6, 7]
    expected = naive(hidden, weight[kept], targets)
    assert_close(logprobs, expected[0])
    assert_close(entropy, expected[1])
    gradient = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)[0]
    assert_close(gradient, torch.autograd.grad(sum(x.sum() for x in expected), hidden)[0])


def test_no_tokens_no_error():
    (hidden, weight, _), _ = problem()
    logprobs, entropy = token_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)


def test_largest_temporary_is_one_chunk():
    # Count what is allocated: no tensor of [tokens x vocabulary] may appear, forward or backward.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.numel())
            return result

    (hidden, weight, _), targets = problem(tokens=400, width=8, vocabulary=1000)
    with Largest() as seen:
        logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_logits=10 * 1000)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.elements == 10 * 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 16)}, "Flatten a padded batch"),
        ({"weight": torch.zeros(53, 8)}, "expected .tokens, width."),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets has shape"),
        ({"targets": torch.full((37,), -100)}, "outside the vocabulary of 53"),
        ({"bias": torch.zeros(3)}, "bias has shape"),
        ({"temperature": 0.0}, "temperature=0.0 must be positive"),
        ({"weight": torch.zeros(53, 16).bfloat16()}, "hidden is torch.float32 but weight is torch.bfloat16"),
    ],
)
def test_bad_input_is_refused(change, message):
    (hidden, weight, _), targets = problem()
    with pytest.raises(ValueError, match=message):
        token_logprobs(**({"hidden": hidden, "weight": weight, "targets": targets} | change))


@pytest.mark.numeric
def test_autocast_does_not_split_forward_from_backward():
    (hidden, weight, bias), targets = problem(tokens=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(hidden, weight, targets, bias=bias)
        gradient = torch.autograd.grad(logprobs.sum(), bias)[0]
    assert gradient.sum().abs() < of_sum(torch.ones(8 * 53))  # 8 rows of 53 terms, each row sums to 0
