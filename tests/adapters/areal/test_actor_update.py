"""AReaL's real actor update, on CPU in two processes, does what the whole update through `bapo.policy_loss` does."""

import functools

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("areal")

from bapo import ClipSettings, policy_loss
from bapo.adapters.areal import WithinBounds
from bapo.core.bounds import StopReason
from tests.adapters.launched import launched
from tests.tiny.models import ONE_LAYER, tiny
from tests.tiny.tokenizers import words

LEARNING_RATE, VOCABULARY = 0.05, 24
STATS = "ppo_actor/update/"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny("qwen2", vocab_size=VOCABULARY, initializer_range=0.5, **ONE_LAYER).save_pretrained(path)
    words(VOCABULARY).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """Every case in two processes of four sequences each, one to a micro-batch."""
    out = tmp_path_factory.mktemp("two") / "results.pt"
    spmd = {"AREAL_SPMD_MODE": "1"}
    return launched("tests.adapters.areal.actor_update", 2, out=out, environment=spmd, model=str(model))


def whole_update(model, tokens, **options):
    """The same update with transformers and `bapo.policy_loss` alone: bounds, loss, and the weights one SGD step on."""
    from transformers import Qwen2ForCausalLM

    return one_step(Qwen2ForCausalLM.from_pretrained(model, attn_implementation="sdpa"), tokens, **options)


def one_step(network, tokens, **options):
    """One update of the network's weights in place; what the loss said, and the weights after it."""
    logits = network(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits
    following = torch.roll(tokens["input_ids"], -1, -1)
    logprobs = logits.log_softmax(-1).gather(-1, following[..., None]).squeeze(-1)
    mask = tokens["loss_mask"].bool()
    out = policy_loss(logprobs, tokens["logprobs"], tokens["advantages"], mask, **options)
    network.zero_grad()
    out.loss.backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    return out, {name: parameter.detach() for name, parameter in network.named_parameters()}


def test_bounds_loss_and_weights_are_those_of_the_whole_update(model, two):
    result = two["bapo"]
    out, weights = whole_update(model, result["tokens"], settings=ClipSettings(target_share=0.42))
    stats = {name.removeprefix(STATS): value for name, value in result["stats"].items()}
    assert StopReason(int(out.bounds.stop)) in (StopReason.RAISING_HIGH, StopReason.RAISING_LOW)  # a real search
    assert stats["bapo/clip_low"] == pytest.approx(out.bounds.low.item(), abs=1e-6)
    assert stats["bapo/clip_high"] == pytest.approx(out.bounds.high.item(), abs=1e-6)
    assert stats["bapo/share"] == pytest.approx(out.bounds.share.item(), abs=1e-6)
    assert stats[f"bapo/stop/{StopReason(int(out.bounds.stop)).name.lower()}"] == 1
    assert stats["actor_loss/avg"] == pytest.approx(out.loss.item(), abs=1e-6)
    assert stats["clip_ratio/avg"] == pytest.approx(out.metrics["clip_fraction"].item(), abs=1e-6)
    assert_close(result["weights"], weights, rtol=0, atol=1e-6)


RULES = {
    "push once": {"settings": ClipSettings(target_share=0.42, used_low=1.0)},
    "brake": {"objective": "brake", "delta": 1.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_several_passes_are_those_of_the_core(model, two, rule):
    """In float64. Rows of different uses are in one update, as a replay buffer would mix them."""
    from transformers import Qwen2ForCausalLM

    result, options, braked = two[rule], RULES[rule], []
    network = Qwen2ForCausalLM.from_pretrained(model, attn_implementation="sdpa").double()
    tokens = {name: x.double() if x.is_floating_point() else x for name, x in result["tokens"].items()}
    extra = torch.arange(len(tokens["loss_mask"]))[:, None].expand_as(tokens["loss_mask"]) % 2
    for uses, found in enumerate([result["stats"], *result["later stats"]]):
        out, weights = one_step(network, tokens, **options, uses=uses + extra)
        stats = {name.removeprefix(STATS): value for name, value in found.items()}
        for name in ("clip_low", "clip_high", "share", *(("drift", "used_low") if rule == "brake" else ())):
            assert stats[f"bapo/{name}"] == pytest.approx(out.metrics[name].item(), abs=1e-5)
        braked.append(float(out.bounds.used_low))
        assert stats["actor_loss/avg"] == pytest.approx(out.loss.item(), abs=1e-5)
        assert stats["clip_ratio/avg"] == pytest.approx(out.metrics["clip_fraction"].item(), abs=1e-5)
    assert max(braked) > 0.82
    assert rule != "brake" or any(0.8 < low < 1 for low in braked)
    assert all(torch.equal(two["first pass"]["weights"][name], value) for name, value in two["bapo"]["weights"].items())
    ours = {name: value.double() for name, value in result["weights"].items()}
    assert_close(ours, weights, rtol=0, atol=1e-5)
    assert max((ours[name] - two["off"]["weights"][name]).abs().max() for name in ours) > 1e-3


def test_fixed_bounds_are_areals_own_loss(two):
    assert two["areal"]["stats"][f"{STATS}clip_ratio/avg"] > 0
    assert_close(two["fixed"]["weights"], two["areal"]["weights"], rtol=0, atol=1e-7)
    for name in ("actor_loss/avg", "grad_norm", "clip_ratio/avg", "importance_weight/avg"):
        assert two["fixed"]["stats"][STATS + name] == pytest.approx(two["areal"]["stats"][STATS + name], abs=1e-6)


def test_one_collective_and_one_further_pass_per_update(two):
    assert len(two["bapo"]["float64_all_reduces"]) == 1
    assert two["areal"]["float64_all_reduces"] == []
    assert two["bapo"]["forwards"] == [False] * 4 + [True] * 4
    assert two["areal"]["forwards"] == [True] * 4


def test_refusals_say_what_to_set(two):
    assert "actor.eps_clip=0.3, actor.eps_clip_higher=None would be ignored" in two["refused"]["epsilon"]
    assert "use_decoupled_loss=false and recompute_logprob=false" in two["refused"]["decoupled"]
    assert "importance_sampling_level=sequence" in two["refused"]["sequence"]
    assert "no 'uses'. AReaL's PPOTrainer uses every rollout once" in two["refused"]["the rule without uses"]
    assert "uses= is given, but nothing asks for it" in two["refused"]["uses without the rule"]
    with pytest.raises(ValueError, match="AReaL's own engine for other losses"):
        WithinBounds().train_batch({}, lambda: None, lambda: None)


def test_a_weight_that_areals_loss_would_ignore_is_refused():
    class Weighing(WithinBounds):
        clip_settings = ClipSettings(remainder="weigh")

    loss = functools.partial(lambda: None, eps_clip=0.2, eps_clip_higher=None)
    with pytest.raises(ValueError, match="remainder='weigh' would be ignored: AReaL's own loss"):
        Weighing().train_batch({}, loss, lambda: None)
