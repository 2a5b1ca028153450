"""Sampling in eight bits: what is rounded and by how much, the kernels, and the forward pass against a plain model."""

from __future__ import annotations

import pytest
import torch

from bapo.config.errors import ConfigError
from bapo.config.run import Config
from bapo.core.kernels import layers
from bapo.models.layers import LoraSettings, add_lora, merging
from bapo.rollout.cuda.engine import GraphEngine
from bapo.rollout.cuda.kernels import eight_bits
from bapo.rollout.engine import Request, Sampling
from bapo.rollout.local.engine import engine_for
from bapo.train.machine import resolve
from tests.eight_bits import at_once, in_eight_bits, sampled_in_eight_bits, scale_of
from tests.rollouts import assert_matches_teacher_forcing, sitting
from tests.tiny.models import shallow, tiny


def rows(dtype, width=48):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 1e-3, 448.0, 3e30, 1e-36, 0.0])
    drawn = torch.randn(len(sizes), width, generator=generator) * sizes[:, None]
    drawn[2, 0] = 448.0 * 8  # exactly the largest number, times a power of two
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_as_one_number_after_the_other_in_float64(dtype):
    given = rows(dtype)
    rounded, scales = eight_bits.round_rows(given)
    assert scales.tolist() == [scale_of(row.double()) for row in given]
    found = rounded.double() * scales.double()[:, None]
    assert torch.equal(found, in_eight_bits(given))
    assert torch.equal(found, at_once(given.double()))
    assert torch.equal(found[:4], found[:4].bfloat16().double())  # a plain model in 16 bits can hold them


def test_a_number_loses_at_most_a_sixteenth_of_itself():
    given = rows(torch.float32)
    rounded, scales = eight_bits.round_rows(given)
    scale = scales.double()[:, None]
    lost = (rounded.double() * scale - given.double()).abs()
    assert (lost <= torch.maximum(given.double().abs() / 16, scale * 2.0**-10)).all()
    assert (lost > given.double().abs() / 20).any()


def assert_rounded(found, exact):
    """One part is the nearest number; two parts hold all bits of 16, but for what is lost beside the largest."""
    rounded, scales = found
    assert scales[: len(exact)].tolist() == [scale_of(row) for row in exact.double()]
    values = (rounded.double() * scales.double()[:, None]).view(-1, *exact.shape)
    assert torch.equal(values[0], in_eight_bits(exact))
    if len(values) == 2:
        step = scales[: len(exact), None].double() * 2.0**-9 / 16
        rest = exact.double() - values[0]
        assert ((values[1] - rest).abs() <= torch.maximum(step / 2, rest.abs() / 16)).all()
        assert exact.dtype == torch.float32 or torch.equal(values.sum(0)[:2], exact.double()[:2])


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)])
def test_kernels_round_what_the_plain_ones_give(dtype, parts):
    given = rows(dtype)
    assert_rounded(eight_bits.rounded(given, parts=parts), given)
    x, delta, gain = given[:3], given[:3].flip(0), given[0] + 2
    plain, residual = layers.add_norm(summed := x.clone(), delta, gain, 1e-6), x.clone()
    assert_rounded(eight_bits.add_norm(residual, delta, gain, 1e-6, parts=parts), plain)
    assert torch.equal(residual, summed)
    alone = eight_bits.add_norm(x.clone(), None, gain, 1e-6, parts=parts)
    assert_rounded(alone, layers.add_norm(x.clone(), None, gain, 1e-6))
    for gated in (given[:2], torch.linspace(-3, 3, 8208).to(dtype)[None]):  # the second needs two turns
        assert_rounded(eight_bits.gate(gated, parts=parts), layers.gate(gated))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_product_is_that_of_the_rounded_rows(parts):
    generator = torch.Generator().manual_seed(1)
    states, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 64), (32, 64), (32,)))
    states, bias, rounded = states.bfloat16(), bias.bfloat16(), eight_bits.round_rows(weight)
    found = eight_bits.product(
        eight_bits.rounded(states, parts=parts), rounded, bias, torch.bfloat16, parts=parts
    ).double()
    left = in_eight_bits(states) if parts == 1 else states.double()
    exact = left @ in_eight_bits(weight).T + bias.double()
    torch.testing.assert_close(found, exact, rtol=2**-8, atol=2**-8)  # one rounding to bfloat16


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("llama", "fp8"), ("qwen2", "fp8"), ("qwen3", "fp8"), ("qwen2", "fp8-weights")],
)
def test_logprobs_are_those_of_a_plain_model_that_rounds_alike(architecture, precision):
    model, requests = shallow(architecture), [Request([5, 6, 7, 8], 0, seed, 2) for seed in (1, 2)]
    engine = GraphEngine(model, slots=2, precision=precision)
    segments = sitting(engine, requests, Sampling(0.8))
    plain = sampled_in_eight_bits(model, states=precision == "fp8")
    tolerance = 2e-5 if precision == "fp8" else 0.02  # two parts hold 8 of float32's 24 bits
    assert_matches_teacher_forcing(plain, requests, segments, 0.8, tolerance=tolerance)
    with pytest.raises(AssertionError):
        assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=2e-3)


def test_every_load_rounds_again_in_place():
    model = shallow()
    engine, requests = GraphEngine(model, slots=1, precision="fp8"), [Request([5, 6], 0, 1, 1)]
    sitting(engine, requests, Sampling())
    places = {name: tensor.data_ptr() for name, tensor in engine.decoder._weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    segments = sitting(engine, requests, Sampling(), version=1)
    assert_matches_teacher_forcing(sampled_in_eight_bits(model), requests, segments, 1.0, tolerance=2e-5)
    assert places == {name: tensor.data_ptr() for name, tensor in engine.decoder._weights.items()}


def test_low_rank_additions_are_merged_before_they_are_rounded():
    model = shallow()
    add_lora(model, LoraSettings(4), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    requests = [Request([5, 6], 0, 1, 1)]
    segments = sitting(GraphEngine(model, slots=1, precision="fp8"), requests, Sampling())
    merged = shallow()
    merged.load_state_dict(dict(merging(model.named_parameters(), 2.0)), strict=False)
    assert_matches_teacher_forcing(sampled_in_eight_bits(merged), requests, segments, 1.0, tolerance=2e-5)


def test_widths_that_products_in_eight_bits_cannot_have_are_refused():
    with pytest.raises(ValueError, match="no multiples of 16"):
        GraphEngine(tiny("llama", intermediate_size=40), slots=1, precision="fp8")


def test_eight_bits_without_the_cuda_engine_are_refused():
    with pytest.raises(ValueError, match=r"rollout.precision='fp8' needs the CUDA engine.* it is on cpu"):
        engine_for(shallow(), slots=1, precision="fp8")
    with pytest.raises(ConfigError, match="fp8-weights' is for bfloat16 weights on CUDA, but the run has float32 on"):
        resolve(Config.model_validate({"device": "cpu", "rollout": {"precision": "fp8-weights"}}))
