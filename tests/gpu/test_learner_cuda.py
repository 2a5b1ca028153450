"""The learner on CUDA: packed, padded and one by one are the same pass; CUDA is CPU; a resumed run is the whole run."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch.testing import assert_close

from bapo.learn.forward import can_fuse, can_pack, deterministic, hidden_states
from bapo.learn.fused.layer import fused_forwards
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.optimizer import FlatOptimizer, _can_be_flat
from bapo.models.layers import LoraSettings, add_lora
from tests.tiny.batches import batch_of, flat_batch, on_cuda
from tests.tiny.models import tiny
from tests.tiny.runs import assert_resumes_bit_for_bit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

LENGTHS = [40, 1, 17, 33, 8, 2, 64, 29]


def run(model, batch, **way):
    """States, and the gradients of a fixed function of them."""
    model.zero_grad()
    states = hidden_states(model, batch, **way)
    weights = torch.linspace(-1, 1, states.numel(), device=states.device, dtype=torch.float32).view_as(states)
    with deterministic(states.device):
        (states.float() * weights).sum().backward()
    return states.detach().float(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_packed_equals_padded_equals_one_by_one(name):
    batch = flat_batch(LENGTHS)
    exact = tiny(name).bfloat16().double()  # the same weights
    states, gradients = run(exact, batch, packed=False)
    states, gradients = states.cuda(), {name: g.cuda() for name, g in gradients.items()}
    model = tiny(name).bfloat16().cuda()
    assert can_pack(model)
    alone = []
    for part in batch.input_ids.split(batch.offsets.diff().tolist()):
        alone.append(hidden_states(model, on_cuda(batch_of([part])), packed=True).detach().float())
    assert relative(torch.cat(alone), states) < 0.05
    results = {way: run(model, on_cuda(batch), packed=way) for way in (False, True)}
    for ours, found in results.values():
        assert relative(ours, states) < 0.05
        assert found.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            if gradient.norm() > 1e-3 * max(g.norm() for g in gradients.values()):
                assert relative(found[parameter], gradient) < 0.15, parameter
    # Packing itself costs nothing: it is as near to the exact states as padding is.
    errors = {way: relative(ours, states) for way, (ours, _) in results.items()}
    assert errors[True] < 1.5 * errors[False] + 1e-3
    assert relative(results[True][0], torch.cat(alone)) < 0.03


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_float32_on_cuda_equals_cpu(name):
    batch = flat_batch(LENGTHS)
    cpu = run(tiny(name), batch, packed=False)
    cuda = run(tiny(name).cuda(), on_cuda(batch), packed=False)
    assert relative(cuda[0].cpu(), cpu[0]) < 1e-4
    for parameter, gradient in cpu[1].items():
        assert_close(cuda[1][parameter].cpu(), gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()) + 1e-5)


def test_float32_is_padded_and_says_so(caplog):
    assert not can_pack(tiny().cuda())
    assert "is trained on padded batches: its weights are torch.float32" in caplog.text
    caplog.clear()
    assert can_pack(tiny().bfloat16().cuda())
    assert not caplog.text


def test_checkpointed_layers_give_the_same_gradients_packed():
    batch, model = on_cuda(flat_batch(LENGTHS)), tiny("qwen3").bfloat16().cuda()
    plain, again = (run(model, batch, packed=True, recompute=recompute) for recompute in (False, True))
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def test_the_same_backward_pass_twice_gives_the_same_bits():
    batch, model = on_cuda(flat_batch([300] * 40)), tiny().bfloat16().cuda()
    first, second = (run(model, batch, packed=True)[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("objective", ["bapo", "grpo", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_does_not_depend_on_how_it_is_cut(objective, dtype):
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 30, (length,), generator=generator) for length in LENGTHS if length > 1]
    start = tiny("qwen2").to("cuda", dtype)
    whole = on_cuda(batch_of(sequences))
    first = Learner(start, LearnerSettings())
    with torch.no_grad():
        behavior = first.logprobs(whole)[0] + 0.1
    whole = dataclasses.replace(whole, behavior_logprobs=behavior.clamp(max=0))
    places, tokens = [len(x) for x in sequences], [len(x) - 1 for x in sequences]
    flat = {name: getattr(whole, name).split(tokens) for name in ("behavior_logprobs", "advantages", "versions")}
    singles = []
    for i in range(len(places)):
        single = on_cuda(batch_of([sequences[i]]))
        singles.append(dataclasses.replace(single, **{name: parts[i] for name, parts in flat.items()}))
    results = []
    for batches in ([whole], singles):
        learner = Learner(copy.deepcopy(start), LearnerSettings(objective=objective, lr=1e-3))
        assert learner.packed == (dtype == torch.bfloat16)
        metrics = learner.step_on(batches).metrics
        results.append((metrics, torch.cat([m.detach().flatten() for m in learner.optimizer.masters])))
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    for name in ("loss", "clip_low", "clip_high", "grad_norm", "entropy", "kl"):
        if name in results[0][0]:
            assert results[1][0][name] == pytest.approx(results[0][0][name], rel=tolerance, abs=tolerance), name
    before = torch.cat([p.detach().float().flatten() for p in first.optimizer.masters])
    moved = [after - before for _, after in results]
    # Adam's first step has the sign of the gradient: rounding turns it where the gradient is nearly 0.
    agree = torch.nn.functional.cosine_similarity(*moved, dim=0)
    assert float(agree) > (0.99 if dtype == torch.float32 else 0.9)


def test_one_update_waits_for_the_device_once():
    learner = Learner(tiny().bfloat16().cuda(), LearnerSettings(objective="grpo", ess_reference=1.0))
    batch = on_cuda(flat_batch(LENGTHS))
    for _ in range(2):
        learner.step_on([batch])
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner.step_on([batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, waits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_resumed_run_is_the_uninterrupted_one(dtype, tmp_path):
    assert_resumes_bit_for_bit(
        tmp_path,
        device="cuda",
        model={"dtype": dtype},
        rollout={"prompts": 8},
        learn={"batch_groups": 8, "micro_tokens": 1000},
        eval={"problems": 8},
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_give_the_same_update(recompute):
    losses, weights = [], []
    for compiled in (False, True):
        model = tiny("qwen3", initializer_range=0.3, num_hidden_layers=3).bfloat16().cuda()
        settings = LearnerSettings(objective="grpo", lr=1e-2, compile=compiled, activation_checkpointing=recompute)
        learner = Learner(model, settings)
        losses.append([learner.step_on([on_cuda(flat_batch(LENGTHS[: 8 - i]))]).metrics["loss"] for i in range(3)])
        weights.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.05, atol=0.02)
    assert relative(weights[1], weights[0]) < 0.02


def fused_run(model, batch, **way):
    return run(model, batch, packed=True, forwards=fused_forwards(model, batch), **way)


@pytest.mark.parametrize("lengths", [LENGTHS, [2500, 3, 700]], ids=["short", "long"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_fused_pass_is_as_exact_as_the_pass_of_transformers(name, lengths):
    batch, sizes = flat_batch(lengths), {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 4096}
    exact = tiny(name, **sizes).bfloat16().double().cuda()
    states, gradients = run(exact, on_cuda(batch), packed=False)
    model = tiny(name, **sizes).bfloat16().cuda()
    assert can_fuse(model)
    theirs, their_gradients = run(model, on_cuda(batch), packed=True)
    ours, our_gradients = fused_run(model, on_cuda(batch))
    assert relative(ours, states) < 1.2 * relative(theirs, states)
    assert our_gradients.keys() == gradients.keys()
    largest = max(g.norm() for g in gradients.values())
    for parameter, gradient in gradients.items():
        if gradient.norm() > 1e-3 * largest:
            error = relative(their_gradients[parameter], gradient)
            assert relative(our_gradients[parameter], gradient) < 1.5 * error + 1e-3, parameter


def test_a_fused_pass_gives_the_same_bits_every_time_and_when_layers_run_again():
    model, batch = tiny("qwen3", hidden_size=256, head_dim=64).bfloat16().cuda(), on_cuda(flat_batch([40, 77, 3, 64]))
    first = fused_run(model, batch)
    for again in (fused_run(model, batch), fused_run(model, batch, recompute=True)):
        assert torch.equal(again[0], first[0])
        assert all(torch.equal(again[1][name], gradient) for name, gradient in first[1].items())


def test_the_learner_fuses_what_it_can():
    fits = Learner(tiny("llama", hidden_size=64).bfloat16().cuda(), LearnerSettings())
    assert fits.whole.fused
    assert isinstance(fits.optimizer, FlatOptimizer)
    assert not Learner(tiny("llama").bfloat16().cuda(), LearnerSettings()).whole.fused  # heads are 8 wide
    assert not Learner(tiny("llama", hidden_size=64).cuda(), LearnerSettings()).whole.fused  # float32


@pytest.mark.parametrize("rank", [0, 4])
def test_fused_updates_stay_near_updates_through_transformers(rank, monkeypatch):
    """The same updates with and without the fused layers and the flat optimizer, in bfloat16 with float32 masters."""
    after = {}
    for fused in (True, False):
        model = tiny("qwen2", hidden_size=256, head_dim=64).bfloat16()
        if rank:
            add_lora(model, LoraSettings(rank), seed=0)
        monkeypatch.setattr("bapo.learn.head.can_fuse", can_fuse if fused else lambda model: False)
        monkeypatch.setattr("bapo.learn.optimizer._can_be_flat", _can_be_flat if fused else lambda trained: False)
        learner = Learner(model.cuda(), LearnerSettings(lr=1e-3, micro_tokens=120))
        assert learner.whole.fused == fused
        before = torch.cat([m.detach().flatten() for m in learner.optimizer.masters])
        for seed in range(3):
            learner.step_on([on_cuda(flat_batch([40, 30, 20], seed)), on_cuda(flat_batch([60, 2], seed + 9))])
        after[fused] = torch.cat([m.detach().flatten() for m in learner.optimizer.masters]) - before
    # The first steps of Adam follow the signs of gradients, so rounding turns those that are nearly zero.
    assert torch.nn.functional.cosine_similarity(after[True], after[False], dim=0) > 0.9
