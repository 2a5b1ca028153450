"""The flat optimizer against the plain one: same steps, same checkpoints."""

import copy

import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close

from bapo.learn.fsdp import ShardedLearner
from bapo.learn.fused.linear import adjacent
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.optimizer import Conveyor, FlatOptimizer, Optimizer, optimizer_for
from bapo.learn.state import load_state, save_state
from tests.tiny.models import tiny
from tests.tiny.optimizers import copies_of, put_back, tensors_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def pair():
    """A model with each optimizer: the same weights."""
    model = tiny("qwen2", num_hidden_layers=1).to(DEVICE, torch.bfloat16)
    other = copy.deepcopy(model)
    return (model, FlatOptimizer(model.parameters(), **OPTIONS)), (
        other,
        Optimizer(other.parameters(), lr=0.1, **OPTIONS),
    )


def give_gradients(model, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (size * p.float() * torch.randn(p.shape, generator=generator).to(DEVICE)).sum() for p in model.parameters()
    )
    loss.backward()


def same_state(flat, plain):
    for ours, theirs in zip(flat.masters, plain.masters, strict=True):
        assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(flat.weights, plain.weights, strict=True):
        assert_close(ours.detach(), theirs.detach(), rtol=1e-2, atol=1e-6)


def test_steps_are_those_of_the_plain_optimizer():
    (model, flat), (other, plain) = pair()
    for update in range(4):
        for parts in range(1 + update % 2):  # gradients of several passes are added
            give_gradients(model, 10 * update + parts)
            give_gradients(other, 10 * update + parts)
        clip = 0.5 if update % 2 else 1e9
        assert_close(flat.clip(clip), plain.clip(clip), rtol=1e-5, atol=0)
        flat.step(0.01 / (1 + update))
        plain.step(0.01 / (1 + update))
        same_state(flat, plain)
        assert not any(weight.main_grad.any() for weight in flat.weights)
    for weight, master in zip(flat.weights, flat.masters, strict=True):
        if DEVICE == "cuda":
            assert torch.equal(weight, master.bfloat16())
        else:  # Triton's interpreter cuts the last bits off instead of rounding
            assert_close(weight.detach().float(), master.detach(), rtol=2**-7, atol=0)


def updated(optimizer, model, updates):
    """The norms of these updates."""
    norms = []
    for update in updates:
        give_gradients(model, update)
        norms.append(float(optimizer.clip(0.5 if update % 2 else 1e9)))
        optimizer.step(0.01 / (1 + update))
    return norms


def everything(optimizer):
    return {name: tensor.cpu() for name, tensor in tensors_of(optimizer).items()} | {
        f"{index}.weight": weight.detach().cpu() for index, weight in enumerate(optimizer.weights)
    }


def same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.fixture(params=[640, 2**24])
def parts(request, monkeypatch):
    """Numbers in a part: matrices are cut and so is the border of what decays, or all is one part."""
    monkeypatch.setattr(Conveyor.__init__, "__kwdefaults__", {"part": request.param})


@pytest.mark.usefixtures("parts")
def test_masters_and_moments_on_the_host_give_the_same_bits():
    (model, flat), _ = pair()
    other = tiny("qwen2", num_hidden_layers=1).to(DEVICE, torch.bfloat16)
    offloaded = FlatOptimizer(other.parameters(), offload=True, **OPTIONS)
    assert updated(offloaded, other, range(4)) == updated(flat, model, range(4))
    same_bits(everything(offloaded), everything(flat))
    assert {tensor.device.type for tensor in tensors_of(offloaded).values()} == {"cpu"}
    assert not any(weight.main_grad.any() for weight in offloaded.weights)


@pytest.mark.usefixtures("parts")
def test_an_optimizer_on_the_host_goes_on_from_any_checkpoint():
    (model, flat), (_, plain) = pair()
    updated(flat, model, range(2))
    kept = {name: tensor.clone() for name, tensor in everything(flat).items() if not name.endswith(".weight")}
    offloaded = FlatOptimizer(
        (continued := tiny("qwen2", num_hidden_layers=1).to(DEVICE, torch.bfloat16)).parameters(),
        offload=True,
        **OPTIONS,
    )
    put_back(offloaded, kept)
    offloaded.round()
    updated(flat, model, range(2, 4))
    updated(offloaded, continued, range(2, 4))
    same_bits(everything(offloaded), everything(flat))
    put_back(plain, copies_of(offloaded))
    assert_close(plain.masters[0].detach(), offloaded.masters[0].detach().to(DEVICE))


def test_there_must_be_something_to_offload():
    with pytest.raises(ValueError, match=r"offload_optimizer=True .* the trained weights are torch\.float32 on cpu"):
        optimizer_for(tiny().parameters(), lr=0.1, offload=True, **OPTIONS)


def test_ranks_that_share_a_model_do_not_offload():
    group = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
    with pytest.raises(ValueError, match=r"learn\.offload_optimizer=True, but this model is spread over 1 ranks"):
        ShardedLearner(
            tiny(),
            LearnerSettings(offload_optimizer=True),
            ranks=group,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )


def test_gradients_that_are_forgotten_leave_no_trace():
    (model, flat), (other, plain) = pair()
    give_gradients(model, 0, size=100.0)
    flat.clip(0.001)
    flat.forget_gradients()
    for one, optimizer in ((model, flat), (other, plain)):
        give_gradients(one, 1)
        optimizer.step(0.01)
    same_state(flat, plain)


def test_each_reads_the_checkpoints_of_the_other():
    (model, flat), (other, plain) = pair()
    for optimizer, one in ((flat, model), (plain, other)):
        give_gradients(one, 0)
        optimizer.step(0.01)
    assert tensors_of(flat).keys() == tensors_of(plain).keys()
    (model_2, flat_2), (other_2, plain_2) = pair()
    put_back(flat_2, copies_of(plain))
    put_back(plain_2, copies_of(flat))
    for optimizer, one in ((flat_2, model_2), (plain_2, other_2)):
        optimizer.round()
        give_gradients(one, 1)
        optimizer.step(0.01)
    for optimizer, one in ((flat, model), (plain, other)):
        give_gradients(one, 1)
        optimizer.step(0.01)
    same_state(flat_2, plain_2)
    same_state(flat_2, plain)


def test_a_checkpoint_from_before_the_first_update_has_no_moments(tmp_path):
    (first, flat), _ = pair()
    save_state(tmp_path, first, flat, {}, None)
    with safe_open(tmp_path / "shard-00001.safetensors", "pt") as file:
        assert {name.split(".")[0] for name in file.keys()} == {"weight"}  # noqa: SIM118
    (model, other), _ = pair()
    give_gradients(model, 0)
    other.step(0.01)
    load_state(tmp_path, model, other, {}, None)
    assert other.moments(other.masters[0]) == {}
    assert all(map(torch.equal, other.masters, flat.masters))


def test_weights_that_are_multiplied_together_lie_together():
    model = tiny("qwen2", num_hidden_layers=1, hidden_size=256).to(DEVICE, torch.bfloat16)
    FlatOptimizer(model.parameters(), **OPTIONS)
    layer = model.model.layers[0]
    attention = layer.self_attn
    for kind in ("weight", "bias"):
        assert adjacent([getattr(m, kind) for m in (attention.q_proj, attention.k_proj, attention.v_proj)])
    both = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
    assert adjacent(both)
    assert adjacent([weight.main_grad for weight in both])


def test_one_model_has_one_optimizer():
    (model, _), _ = pair()
    with pytest.raises(AssertionError, match="another optimizer"):
        FlatOptimizer(model.parameters(), **OPTIONS)


def test_only_16_bit_weights_on_a_gpu_are_flat():
    model = tiny()
    assert isinstance(optimizer_for(model.parameters(), lr=0.1, **OPTIONS), Optimizer)
    assert isinstance(optimizer_for(tiny().bfloat16().parameters(), lr=0.1, **OPTIONS), Optimizer)


@pytest.mark.parametrize("writes", ["flat", "plain"])
def test_each_goes_on_from_what_either_saved(tmp_path, writes):
    (model, flat), (other, plain) = pair()
    give_gradients(model, 0)
    give_gradients(other, 0)
    flat.step(0.01)
    plain.step(0.01)
    save_state(tmp_path, model if writes == "flat" else other, flat if writes == "flat" else plain, {}, None)
    (model_2, flat_2), (other_2, plain_2) = pair()
    load_state(tmp_path, model_2, flat_2, {}, None)
    load_state(tmp_path, other_2, plain_2, {}, None)
    saved = copies_of(flat if writes == "flat" else plain)
    same_bits(tensors_of(flat_2), saved)
    same_bits(tensors_of(plain_2), saved)
    for one, optimizer in ((model, flat), (model_2, flat_2), (other_2, plain_2)):
        give_gradients(one, 1)
        optimizer.step(0.01)
    same_state(flat_2, flat)
    same_state(flat_2, plain_2)
