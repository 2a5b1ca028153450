"""Sampling in eight bits on CUDA: log-probs against plain models that hold the same weights, graphs, new weights."""

from __future__ import annotations

import copy

import pytest
import torch

from bapo.rollout.cuda.engine import GraphEngine
from bapo.rollout.cuda.kernels import eight_bits
from bapo.rollout.engine import Request, Sampling
from tests.eight_bits import at_once, sampled_in_eight_bits
from tests.rollouts import sitting, teacher_forced
from tests.tiny.models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PRECISIONS = ["model", "fp8-weights", "fp8"]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "initializer_range": 0.03,
    "max_position_embeddings": 1024,
}


def wide(architecture):
    """Large enough for sums to round as in a real model."""
    return tiny(architecture, **SIZES).cuda().bfloat16()


def prompts(count, length=40):
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(4, 4000, (count, length), generator=generator).tolist()
    return [Request(context, 0, seed, 96 + 8 * (seed % 5)) for seed, context in enumerate(drawn)]


def gaps(model, requests, segments):
    """|recorded - full forward pass| of every token."""
    apart = []
    for request, segment in zip(requests, segments, strict=True):
        logprobs = teacher_forced(model, request.context, segment.tokens, 1.0)
        chosen = logprobs.gather(1, torch.tensor(segment.tokens)[:, None])[:, 0]
        apart.append((torch.tensor(segment.logprobs) - chosen).abs())
    return torch.cat(apart)


def in_words(found):
    return f"mean {found.mean():.4f}, 99.9% {found.quantile(0.999):.4f}, largest {found.max():.4f}"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logprobs_are_those_of_a_plain_model_with_the_same_weights(architecture):
    model, requests = wide(architecture), prompts(40)
    plain = {
        "model": model,
        "fp8-weights": sampled_in_eight_bits(model, states=False),
        "fp8": sampled_in_eight_bits(model),
    }
    found, learners = {}, {}
    for precision in PRECISIONS:
        segments = sitting(GraphEngine(model, slots=32, precision=precision), requests, Sampling())
        found[precision] = gaps(plain[precision], requests, segments)
        learners[precision] = gaps(model, requests, segments)
        print(f"{architecture} {precision:<12} own weights: {in_words(found[precision])}")
        print(f"{architecture} {precision:<12} learner's:   {in_words(learners[precision])}")
    sixteen, weights, both = found.values()
    assert weights.mean() <= 2e-2
    assert weights.mean() <= 1.1 * sixteen.mean()
    assert weights.quantile(0.999) <= 1.25 * sixteen.quantile(0.999)
    # What rounding of states turns over cannot be repeated, but it is less than what it does (module docs).
    assert both.mean() < 0.9 * learners["fp8"].mean()
    assert learners["fp8-weights"].mean() > 2 * sixteen.mean()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", [1, 8, 40, 256, 5000])
def test_products_are_those_of_float64(parts, rows):
    generator = torch.Generator("cuda").manual_seed(rows)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").bfloat16()  # noqa: E731
    states, weight, bias = draw(rows, 1536), draw(960, 1536), draw(960)
    rounded = eight_bits.rounded(states, parts=parts)
    again = eight_bits.round_rows(weight)
    assert torch.equal(again[0].double() * again[1].double()[:, None], at_once(weight.double()))
    found = eight_bits.product(rounded, again, bias, torch.bfloat16, parts=parts).double()
    left = at_once(states.double()) if parts == 1 else states.double()
    exact = left @ at_once(weight.double()).T + bias.double()
    apart = float((found - exact).norm() / exact.norm())
    print(f"rows {rows}, parts {parts}: {apart:.2e}")
    assert apart <= 2**-8


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_new_weights_reach_captured_graphs(precision):
    model, requests = wide("llama"), prompts(16)
    engine = GraphEngine(model, slots=16, precision=precision)
    sitting(engine, requests, Sampling())
    graphs = set(map(id, engine.pool._graphs.values()))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.mul_(-1.5)
    segments = sitting(engine, requests, Sampling(), version=1)
    assert graphs <= set(map(id, engine.pool._graphs.values()))
    plain = sampled_in_eight_bits(model, states=precision == "fp8")
    assert 3 * gaps(plain, requests, segments).mean() < gaps(other, requests, segments).mean()
    assert segments == sitting(engine, requests, Sampling(), version=1)  # bit for bit
