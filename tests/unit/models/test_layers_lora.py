"""Low-rank additions: trained alone, sampled with, kept small, exported merged and by themselves."""

from functools import cache

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.state import FINGERPRINT
from bapo.models.export import save_additions, save_policy
from bapo.models.layers import LoraSettings, add_lora, merged_weights, merging
from bapo.models.loading import load_policy
from bapo.rollout.cuda.decoder import Decoder, unsupported
from bapo.rollout.cuda.engine import GraphEngine
from bapo.rollout.engine import Request, Sampling
from tests.rollouts import assert_matches_teacher_forcing, sitting
from tests.rounding import carried, logprob_limit
from tests.tiny.families import make_model, publish
from tests.unit.models.test_models import batches, sampled_groups

ALL = pytest.mark.parametrize("name", ["smollm2", "r1-distill-qwen", "qwen3", "gemma3"])  # tied, untied, norms, windows


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {name: publish(name, root / name) for name in ("smollm2", "r1-distill-qwen", "qwen3", "gemma3")}


def loaded(path, *, dtype="float32", **lora):
    return load_policy(path, dtype=dtype, device="cpu", lora=LoraSettings(**{"rank": 4, **lora}), seed=1)


def trained(policy, **settings):
    """Two updates, so that both factors have moved."""
    learner = Learner(policy.model, LearnerSettings(**{"lr": 2e-2, **settings}))
    for _ in range(2):
        learner.step_on(batches(learner, sampled_groups(policy, temperature=1.0)))
    return learner


@pytest.fixture(scope="module")
def taught(published):
    """A function that gives a policy and its learner after two updates. All tests share them and change nothing."""

    @cache
    def made(name, dtype):
        policy = loaded(published[name], dtype=dtype)
        return policy, trained(policy)

    return made


def logits(model):
    return model(torch.arange(20)[None]).logits


@ALL
def test_training_starts_at_the_model_and_changes_the_additions_only(published, name):
    plain = load_policy(published[name], dtype="float32", device="cpu").model
    policy = loaded(published[name])
    assert torch.equal(logits(policy.model), logits(plain))
    before = {key: tensor.clone() for key, tensor in policy.model.state_dict().items()}
    learner = trained(policy)
    changed = {key for key, tensor in policy.model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {key for key in before if "lora_" in key}
    assert len(learner.optimizer.weights) == len(changed)
    assert not torch.allclose(logits(policy.model), logits(plain), atol=1e-3)


@pytest.mark.numeric
@ALL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sampler_samples_with_the_additions(taught, name, dtype):
    policy, learner = taught(name, dtype)
    groups = sampled_groups(policy, temperature=1.0)
    bound = logprob_limit(learner, batches(learner, groups), size=torch.mean)
    for batch in batches(learner, groups):
        assert (learner.logprobs(batch)[0] - batch.behavior_logprobs).abs().mean() < bound
    with policy.adapters.disable_adapter():
        for batch in batches(learner, groups):
            assert (learner.logprobs(batch)[0] - batch.behavior_logprobs).abs().mean() > 2 * bound


@ALL
def test_activation_checkpointing_recomputes_the_additions_too(published, name):
    weights = [trained(loaded(published[name]), activation_checkpointing=on).model.state_dict() for on in (False, True)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.numeric
@ALL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_is_plain_and_computes_the_same(published, taught, name, dtype, tmp_path):
    policy, _ = taught(name, dtype)
    before = logits(policy.model)
    save_policy(policy, tmp_path / "model", card="")
    assert torch.equal(logits(policy.model), before)  # saving changes nothing
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert merged.state_dict().keys() == make_model(name)[0].state_dict().keys()
    assert merged.dtype == policy.model.dtype
    limit = carried(lambda: logits(merged))  # merged weights are rounded once more, which counts as a product that errs
    assert (logits(merged) - before).abs().max() < limit < 0.3 * before.abs().max()
    plain = load_policy(published[name], dtype=dtype, device="cpu").model
    assert (logits(plain) - before).abs().max() / before.abs().max() > 0.1


@pytest.mark.numeric
def test_the_adapter_by_itself_fits_the_base_model(published, taught, tmp_path):
    policy, _ = taught("smollm2", "float32")
    save_additions(policy, tmp_path / "adapter", card="# card", base=published["smollm2"])
    base = AutoModelForCausalLM.from_pretrained(published["smollm2"])
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    limit = carried(lambda: logits(policy.model))
    torch.testing.assert_close(logits(again), logits(policy.model), atol=limit, rtol=0)
    assert again.peft_config["default"].base_model_name_or_path == published["smollm2"]
    assert (tmp_path / "adapter" / "README.md").read_text() == "# card"
    assert all("lora_" in key for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_rank_alpha_and_targets_are_what_peft_gets(published):
    policy = loaded(published["smollm2"], rank=2, alpha=6.0, targets=("q_proj", "v_proj"))
    config = policy.adapters.peft_config["default"]
    assert (config.r, config.lora_alpha, config.target_modules) == (2, 6.0, {"q_proj", "v_proj"})
    names = {key.split(".lora_")[0].split(".")[-1] for key in policy.model.state_dict() if "lora_" in key}
    assert names == {"q_proj", "v_proj"}
    everywhere = loaded(published["smollm2"], rank=2)
    assert everywhere.adapters.peft_config["default"].lora_alpha == 4
    names = {key.split(".lora_")[0].split(".")[-1] for key in everywhere.model.state_dict() if "lora_" in key}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "query"])
def test_head_embedding_and_unknown_names_are_refused(target):
    model, _ = make_model("smollm2")
    with pytest.raises(
        ValueError, match=f"names '{target}', which is not a linear layer .*down_proj, .*v_proj, or none"
    ):
        add_lora(model, LoraSettings(4, targets=(target,)), seed=0)


def test_one_seed_is_one_beginning_and_the_global_generator_is_left_alone(published):
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    weights = [loaded(published["smollm2"]).model.state_dict() for _ in range(2)]
    assert torch.equal(torch.rand(1), first)
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_additions_are_float32_in_a_16_bit_model(published):
    policy = loaded(published["qwen3"], dtype="bfloat16")
    kinds = {parameter.dtype for parameter in policy.model.parameters() if parameter.requires_grad}
    assert kinds == {torch.float32}
    assert policy.model.dtype == torch.bfloat16


def test_a_checkpoint_keeps_the_additions_and_knows_their_model(published, taught, tmp_path):
    policy, learner = taught("smollm2", "float32")
    learner.save(tmp_path)
    kept = load_file(tmp_path / "shard-00001.safetensors")
    assert {key for key in kept if "lora_" not in key} == {FINGERPRINT}
    again = loaded(published["smollm2"])
    Learner(again.model, LearnerSettings()).load(tmp_path, version=learner.version)
    assert torch.equal(logits(again.model), logits(policy.model))
    other = loaded(published["smollm2"])
    with torch.no_grad():
        other.model.model.layers[1].mlp.up_proj.base_layer.weight[3, 5] += 1e-3
    with pytest.raises(KeyError, match="holds another model now"):
        Learner(other.model, LearnerSettings()).load(tmp_path, version=learner.version)
    with pytest.raises(KeyError, match=r"are unknown and .* are missing"):
        Learner(make_model("smollm2")[0], LearnerSettings()).load(tmp_path, version=learner.version)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smollm2", "r1-distill-qwen", "qwen3"])
def test_the_fused_engine_holds_the_merged_weights(taught, name, dtype):
    model = taught(name, dtype)[0].model
    decoder = Decoder(model)
    weights = list(model.named_parameters())
    decoder.load(reversed(weights))  # in any order
    expected = merged_weights(model)
    for place, tensor in decoder._places.items():
        assert torch.equal(tensor, expected[place])
    own = {key.replace(".base_layer.", "."): weight for key, weight in weights if "lora_" not in key}
    moved = sum(not torch.equal(place, own[key]) for key, place in decoder._places.items())
    assert moved == 7 * model.config.num_hidden_layers


@pytest.mark.numeric
def test_the_fused_engine_samples_with_the_additions(taught):
    model = taught("qwen3", "float32")[0].model
    requests = [Request([5, 6, 7], 0, 1, 3), Request([8], 0, 2, 3)]
    segments = sitting(GraphEngine(model, slots=2), requests, Sampling(0.8))
    assert_matches_teacher_forcing(model, requests, segments, 0.8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target_modules": ["lm_head"]}, "head and embedding are Linear"),
        ({"target_modules": ["embed_tokens"]}, "head and embedding are"),
    ],
)
def test_the_fused_engine_refuses_other_additions_with_the_reason(options, reason):
    model, _ = make_model("r1-distill-qwen")
    assert unsupported(model) is None
    get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))
    assert reason in unsupported(model)


def test_the_fused_engine_refuses_a_second_set_of_additions(published):
    policy = loaded(published["smollm2"])
    assert unsupported(policy.model) is None
    with policy.adapters.disable_adapter():
        assert "other low-rank additions than 'default', or they are disabled" in unsupported(policy.model)
    policy.adapters.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    assert "other low-rank additions than" in unsupported(policy.model)


def test_an_engine_without_some_additions_is_not_used(published):
    model = loaded(published["smollm2"]).model
    decoder = Decoder(model)
    with pytest.raises(AssertionError, match=r"1 weights were not loaded .*q_proj\.weight"):
        decoder.load(
            (key, weight) for key, weight in model.named_parameters() if "0.self_attn.q_proj.lora_B" not in key
        )
    weights = dict(model.named_parameters())
    base = "model.layers.0.self_attn.q_proj.base_layer.weight"
    with pytest.raises(AssertionError, match="other shapes than its weight"):
        decoder.load((weights | {base: weights[base][:1]}).items())


def test_merging_scales_by_alpha_over_rank():
    model, _ = make_model("smollm2")
    plain = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    add_lora(model, LoraSettings(2, alpha=3.0, targets=("q_proj",)), seed=0)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1.0)
    a = layer.lora_A["default"].weight
    expected = plain + 1.5 * a.sum(0, keepdim=True)  # (3 / 2) · B A with B all ones
    torch.testing.assert_close(merged_weights(model)["model.layers.0.self_attn.q_proj.weight"], expected)


def test_merging_one_by_one_is_merging_at_once():
    model, _ = make_model("smollm2")
    settings = LoraSettings(2, alpha=3.0)
    add_lora(model, settings, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator)
    at_once = merged_weights(model)
    one_by_one = dict(merging(((name, weight.detach()) for name, weight in model.named_parameters()), settings.scale))
    assert one_by_one.keys() <= at_once.keys()
    assert at_once.keys() - one_by_one.keys() <= {"lm_head.weight"}  # tied: it is the embedding
    for name, weight in one_by_one.items():
        torch.testing.assert_close(weight, at_once[name], rtol=1e-5, atol=1e-5)
