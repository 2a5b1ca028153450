"""The fused layers against transformers' own, and their kernels against plain torch, in float32.

Without CUDA: under Triton's interpreter, which is slow, so everything is small; tests/gpu repeats it at size.
"""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from bapo.learn.forward import attend_one_by_one, hidden_states
from bapo.learn.fused import layer
from bapo.learn.fused.kernels import attention
from bapo.learn.fused.kernels.attention import Tile, Tiles, attend, attend_backward, blocks_of, plan_of
from bapo.learn.fused.layer import fused_forwards, try_attention, unsupported
from bapo.learn.fused.linear import adjacent, stacked
from bapo.models.layers import LoraSettings, add_lora, without_additions
from tests.tiny.batches import flat_batch
from tests.tiny.models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention, "SHORT", SMALL)


def on(batch):
    moved = {name: x.to(DEVICE) for name, x in vars(batch).items() if torch.is_tensor(x)}
    return type(batch)(**(vars(batch) | moved))


def passed(model, batch, **way):
    """States, and the gradients of a fixed function of them."""
    model.zero_grad()
    states = hidden_states(model, batch, packed=True, **way)
    weights = torch.linspace(-1, 1, states.numel(), device=DEVICE).view_as(states)
    (states * weights).sum().backward()
    return states.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_pass(model, batch):
    states, gradients = passed(model, batch)
    ours, found = passed(model, batch, forwards=fused_forwards(model, batch))
    assert_close(ours, states, rtol=1e-4, atol=2e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_fused_pass_is_the_pass_of_transformers(name):
    assert_same_pass(tiny(name, hidden_size=64, num_hidden_layers=1).to(DEVICE), on(flat_batch([36, 1, 17])))


def test_low_rank_additions_are_part_of_a_fused_pass():
    model = tiny("qwen2", hidden_size=64, num_hidden_layers=1)
    add_lora(model, LoraSettings(rank=3, alpha=5), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert unsupported(model) is None
    assert_same_pass(model.to(DEVICE), on(flat_batch([7, 5])))


@torch.no_grad()
def test_low_rank_additions_can_be_left_out_of_a_fused_pass():
    """As the reference of learn.kl does."""
    model, batch = tiny("qwen2", hidden_size=64, num_hidden_layers=1).to(DEVICE), on(flat_batch([7, 5]))
    plain = hidden_states(model, batch, packed=True)
    add_lora(model, LoraSettings(rank=3, alpha=5), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with without_additions(model):
        left_out = hidden_states(model, batch, packed=True, forwards=fused_forwards(model, batch))
    assert_close(left_out, plain, rtol=1e-4, atol=2e-5)
    added = hidden_states(model, batch, packed=True, forwards=fused_forwards(model, batch))
    assert (added - plain).abs().max() > 0.1


def test_gradients_go_where_main_grad_says():
    model, batch = tiny("qwen3", hidden_size=64, num_hidden_layers=1).to(DEVICE), on(flat_batch([7, 5]))
    _, expected = passed(model, batch)
    layer = [name for name, _ in model.named_parameters() if "layers" in name]
    parameters = dict(model.named_parameters())
    for name in layer:
        parameters[name].main_grad = torch.ones_like(parameters[name])
    _, rest = passed(model, batch, forwards=fused_forwards(model, batch))
    assert not rest.keys() & set(layer)
    for name in layer:
        added = parameters[name].main_grad - 1
        assert_close(added, expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max()), msg=name)


@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("lengths", [[1], [16, 32, 33], [70, 1, 31]])
def test_attention_and_its_gradients(lengths, heads, keys):
    width, places = 16, sum(lengths)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(places, n * width, generator=generator).to(DEVICE) for n in (heads, keys, keys))
    pull = torch.randn(places, heads * width, generator=generator).to(DEVICE)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    leaves = [x.double().view(places, -1, width).requires_grad_() for x in (q, k, v)]
    expected = attend_one_by_one(*leaves, offsets, max(lengths), 0.3).flatten(1)
    gradients = torch.autograd.grad(expected, leaves, pull.double())
    plan = plan_of(offsets, places, max(lengths))
    out, normalizers = attend(q, k, v, plan, width=width, scale=0.3)
    assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    row = torch.empty(places, (heads + 2 * keys) * width, device=DEVICE)
    targets = row.split([heads * width, keys * width, keys * width], dim=1)
    attend_backward(pull, q, k, v, out, normalizers, plan, targets, width=width, scale=0.3)
    for ours, theirs in zip(targets, gradients, strict=True):
        assert_close(ours, theirs.float().flatten(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("longest_last", [False, True])
def test_blocks_cover_every_place_once(longest_last):
    lengths = [5, 16, 1, 33]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    table = blocks_of(offsets, sum(lengths), 16, longest_last=longest_last).table
    covered = [place for first, _, end in table.tolist() for place in range(first, min(first + 16, end))]
    assert sorted(covered) == list(range(sum(lengths)))
    for first, begin, end in table.tolist():
        assert (begin, end) == (0, 0) or ((first - begin) % 16 == 0 and (begin, end) in pairwise(offsets))
    work = [end - first if longest_last else first - begin for first, begin, end in table.tolist() if end > first]
    assert work == sorted(work, reverse=True)


def test_stacked_weights_are_a_view_only_where_they_are_neighbours():
    whole = torch.arange(24.0).view(6, 4)
    assert stacked([whole[:2], whole[2:6]]).data_ptr() == whole.data_ptr()
    assert torch.equal(stacked([whole[:2], whole[2:6]]), whole)
    for apart in ([whole[:2], whole[3:]], [whole[:2], whole[2:].clone()], [whole[:, :2], whole[:, 2:]]):
        assert not adjacent(apart)
        assert torch.equal(stacked(apart), torch.cat(apart))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gpt2", {}, "architecture"),
        ("llama", {"hidden_size": 40, "num_attention_heads": 4}, "10 wide"),
        ("llama", {"hidden_size": 64, "hidden_act": "gelu"}, "activation"),
        ("qwen2", {"hidden_size": 64, "use_sliding_window": True, "max_window_layers": 0}, "sliding window"),
    ],
)
def test_other_models_are_left_alone(name, changes, reason):
    assert reason in unsupported(tiny(name, **changes))


def test_additions_of_another_kind_are_left_alone():
    import peft

    model = tiny("llama", hidden_size=64)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).disable_adapter_layers()
    assert "disabled" in unsupported(model)


def test_attention_is_tried_on_long_sequences_too(monkeypatch):
    tried = []
    monkeypatch.setattr(layer, "LONG_FROM", 40)
    monkeypatch.setattr(
        layer, "plan_of", lambda offsets, places, longest: tried.append(longest) or plan_of(offsets, places, longest)
    )
    try_attention(tiny("qwen2", hidden_size=64, num_hidden_layers=1).to(DEVICE))
    assert tried == [12, 40]
