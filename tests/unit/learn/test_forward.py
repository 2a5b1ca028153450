"""Two ways to run a flat batch, and layers that are computed twice: always the states of each sequence alone."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from bapo.learn.forward import PACKED_ATTENTION, attention, can_pack, disagreement, hidden_states, layers_of
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.rollout.engine import Request, Sampling
from bapo.rollout.local.engine import LocalEngine
from tests.rollouts import sitting
from tests.rounding import carried
from tests.tiny.batches import flat_batch
from tests.tiny.models import tiny, tiny_config, windowed

PACKED = ["llama", "qwen2", "qwen3"]


def one_by_one(model, batch):
    parts = batch.input_ids.split(batch.offsets.diff().tolist())
    return torch.cat([model.base_model(input_ids=part[None]).last_hidden_state[0] for part in parts])


def gradients(model, states):
    weights = torch.linspace(-1, 1, states.numel()).view_as(states)
    model.zero_grad()
    (states * weights).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.numeric
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_both_ways_give_the_states_and_gradients_of_each_sequence_alone(name, packed):
    model, batch = tiny(name), flat_batch([9, 1, 5, 2])
    expected = one_by_one(model, batch)
    states = hidden_states(model, batch, packed=packed)
    wanted, found = gradients(model, expected), gradients(model, states)
    limits = carried(lambda: [states := one_by_one(model, batch), *gradients(model, states)])
    for ours, theirs, limit in zip([states, *found], [expected, *wanted], limits, strict=True):
        assert_close(ours, theirs, rtol=0, atol=limit)
        assert limit < 1e-3 * float(theirs.detach().abs().max())


@pytest.mark.numeric
def test_a_model_with_windows_is_padded():
    batch, model = flat_batch([9, 4]), windowed()
    assert "sliding window" in disagreement(model)
    expected = one_by_one(model, batch)
    limit = carried(lambda: one_by_one(model, batch))
    assert_close(hidden_states(model, batch, packed=False), expected, rtol=0, atol=limit)
    full = tiny("qwen2")
    full.load_state_dict(model.state_dict())
    assert not torch.allclose(one_by_one(full, batch), expected, atol=0.1)  # the windows matter


def test_the_attention_of_the_model_is_its_own_again_after_a_pass():
    model = tiny()
    before = model.config._attn_implementation
    hidden_states(model, flat_batch([3, 2]), packed=True)
    assert model.config._attn_implementation == before
    with pytest.raises(RuntimeError, match="in between"), attention(model, PACKED_ATTENTION):
        raise RuntimeError("in between")
    assert model.config._attn_implementation == before


def test_what_packed_attention_cannot_do_is_refused():
    model = tiny()
    with attention(model, PACKED_ATTENTION), pytest.raises(ValueError, match="offsets of the sequences"):
        model.base_model(input_ids=torch.tensor([[1, 2, 3]]))
    assert not can_pack(model)  # on CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PACKED)
def test_these_models_can_be_packed(name, dtype):
    assert disagreement(tiny(name).to(dtype)) is None


def test_learned_positions_are_packed_and_soft_capped_attention_is_not():
    assert disagreement(tiny("gpt2")) is None
    assert "soft-capping" in disagreement(tiny("gemma2"))


@pytest.mark.parametrize("packed", [False, True])
def test_checkpointed_layers_run_twice_and_give_the_same_gradients(packed):
    model, batch = tiny("qwen2", num_hidden_layers=3), flat_batch([9, 1, 5, 2])
    calls = []
    for layer in layers_of(model):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    def run(recompute):
        calls.clear()
        kept = 0

        def count(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            states = hidden_states(model, batch, packed=packed, recompute=recompute)
        forward = len(calls)
        found = gradients(model, states)
        return states.detach(), found, forward, len(calls), kept

    plain, checkpointed = run(False), run(True)
    assert torch.equal(plain[0], checkpointed[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], checkpointed[1], strict=True))
    assert (plain[2:4], checkpointed[2:4]) == ((3, 3), (3, 6))
    assert checkpointed[4] < plain[4] / 3
    assert not any("forward" in vars(layer) for layer in layers_of(model))


def test_without_gradients_nothing_is_computed_twice():
    model, calls = tiny(), []
    layers_of(model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        hidden_states(model, flat_batch([4, 3]), packed=False, recompute=True)
    assert len(calls) == 1


def test_a_learner_that_checkpoints_takes_the_same_update_and_leaves_the_sampler_alone():
    start, batch = tiny(), flat_batch([9, 4, 6])
    sampled, updates = [], []
    for checkpointing in (False, True):
        model = copy.deepcopy(start)
        learner = Learner(model, LearnerSettings(objective="grpo", lr=1e-3, activation_checkpointing=checkpointing))
        updates.append(learner.step_on([batch]).metrics)
        engine = LocalEngine(model, slots=2)
        requests = [Request([3, 4], 0, 1, 5), Request([5], 0, 2, 6)]
        sampled.append(sitting(engine, requests, Sampling(1.0, frozenset({1})), version=1))
        learner.step_on([batch])  # and again after sampling
        updates.append([p.detach().clone() for p in model.parameters()])
        assert not any(module.training for module in model.modules())
    assert updates[0] == updates[2]
    assert all(torch.equal(a, b) for a, b in zip(updates[1], updates[3], strict=True))
    assert sampled[0] == sampled[1]


def test_a_model_without_such_layers_is_refused():
    class Plain(LlamaForCausalLM):
        def modules(self):
            return (m for m in super().modules() if not hasattr(m, "self_attn"))

    with pytest.raises(ValueError, match=r"learn\.activation_checkpointing=True, but Plain has no layers"):
        Learner(Plain(tiny_config()), LearnerSettings(activation_checkpointing=True))


def test_compiled_layers_are_exchanged_for_one_pass_only():
    model, batch = tiny(), flat_batch([5, 3])
    plain = hidden_states(model, batch, packed=False)
    calls = []

    def counted(forward):
        def run(*args, **kwargs):
            calls.append(1)
            return forward(*args, **kwargs)

        return run

    forwards = [counted(layer.forward) for layer in layers_of(model)]
    states = hidden_states(model, batch, packed=False, recompute=True, forwards=forwards)
    assert torch.equal(states, plain)
    states.sum().backward()
    assert len(calls) == 2 * len(forwards)  # once more in the backward pass
    hidden_states(model, batch, packed=False)
    assert len(calls) == 2 * len(forwards)
