"""Policies of real families: what they read, where they stop, what learner and sampler make of them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen2ForCausalLM

from bapo.config.sections import RolloutConfig
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack
from bapo.models.export import save_policy
from bapo.models.loading import load_policy
from bapo.models.policy import Policy, find_stop_ids
from bapo.rollout.engine import Request, Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.types import Group, Problem, Status, Trajectory
from tests.rollouts import sitting
from tests.rounding import carried, logprob_limit
from tests.tiny.families import FAMILIES, make_model, make_tokenizer, publish, soft_capped

ALL = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {name: publish(name, root / name) for name in FAMILIES}


def loaded(path, **options):
    return load_policy(path, dtype=options.pop("dtype", "float32"), device="cpu", **options)


def sampled_groups(policy, *, temperature=0.7, max_tokens=12):
    """Two prompts of different lengths, two responses each, with the log-probs the engine gives."""
    engine = LocalEngine(policy.model, slots=3)
    prompts = [policy.encode("Hi"), policy.encode("How many letters has this question?")]
    requests = [Request(prompt, 0, seed, max_tokens) for seed, prompt in enumerate([*prompts, *prompts])]
    segments = sitting(engine, requests, Sampling(temperature, policy.stop_ids), version=0)
    groups = []
    for g, prompt in enumerate(prompts):
        trajectories = []
        for i in (g, g + 2):
            s = segments[i]
            response = Trajectory(prompt, i, s.tokens, s.logprobs, s.entropies, s.versions, Status.TRUNCATED)
            response.reward = float(i < 2)
            trajectories.append(response)
        groups.append(Group(g, Problem(str(g), "", None), trajectories))
    return groups


def batches(learner, groups):
    return list(pack(groups, estimator="grpo", micro_tokens=4096, device=learner.device, padded=not learner.packed))


@ALL
def test_stop_tokens_are_all_that_anybody_names(published, name):
    policy = loaded(published[name])
    assert set(policy.tokenizer.convert_ids_to_tokens(sorted(policy.stop_ids))) == set(FAMILIES[name].stops)


def test_each_place_that_can_name_a_stop_token_is_asked():
    model, tokenizer = make_model("llama3")
    tokenizer.chat_template = None
    tokenizer.eos_token = None
    model.config.eos_token_id = 7
    model.generation_config.eos_token_id = [8, 9]
    assert find_stop_ids(tokenizer, model) == {7, 8, 9}
    model.generation_config.eos_token_id = None
    assert find_stop_ids(tokenizer, model) == {7}
    tokenizer.eos_token = "<|end_of_text|>"
    assert find_stop_ids(tokenizer, model) == {7, tokenizer.convert_tokens_to_ids("<|end_of_text|>")}


def test_a_template_that_ends_turns_with_plain_text_or_refuses_names_no_stop_token():
    model, tokenizer = make_model("mistral")
    (eos,) = find_stop_ids(tokenizer, model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    assert find_stop_ids(tokenizer, model) == {eos}
    tokenizer.chat_template = "{{ raise_exception('tools only') }}"
    assert find_stop_ids(tokenizer, model) == {eos}


@ALL
def test_a_chat_is_what_its_template_writes_with_one_beginning(published, name):
    policy, family = loaded(published[name]), FAMILIES[name]
    ids = policy.encode([{"role": "user", "content": "Hi"}])
    assert policy.decode(ids) == family.asked
    assert ids == policy.encode("Hi")  # a chat model gets text as a user's message
    if family.bos and family.bos != "<|im_start|>":
        assert ids.count(policy.tokenizer.bos_token_id) == 1


@ALL
def test_text_is_continued_as_it_stands_with_one_beginning_if_the_tokenizer_wants_it(published, name):
    policy, family = loaded(published[name], chat=False), FAMILIES[name]
    beginning = family.bos if family.adds_bos else ""
    assert policy.decode(policy.encode("2 + 2 =")) == f"{beginning}2 + 2 ="
    assert policy.decode(policy.encode(f"{beginning}2 + 2 =")) == f"{beginning}2 + 2 ="


def test_a_tokenizer_that_ends_texts_does_not_end_the_prompt():
    from tokenizers import processors

    family = FAMILIES["mistral"]
    tokenizer = make_tokenizer(family)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ids)
    assert tokenizer.decode(tokenizer.encode("Hi")) == "<s>Hi</s>"
    policy = Policy(None, tokenizer, frozenset({1}))
    assert policy.decode(policy.encode("Hi")) == "<s>Hi"


def test_options_reach_the_template_and_those_it_does_not_read_are_refused(published):
    thinking = loaded(published["qwen3"]).encode("Hi")
    policy = loaded(published["qwen3"], template_options={"enable_thinking": False})
    assert policy.decode(policy.encode("Hi")) == FAMILIES["qwen3"].asked + "<think>\n\n</think>\n\n"
    assert policy.encode("Hi")[: len(thinking)] == thinking
    with pytest.raises(ValueError, match=r"template_options\.enable_thinking=False is not read by the chat template"):
        loaded(published["llama3"], template_options={"enable_thinking": False})
    for part_of_a_name in ("mess", "role", "enable"):
        with pytest.raises(ValueError, match=rf"template_options\.{part_of_a_name}=1 is not read by the chat template"):
            loaded(published["qwen3"], template_options={part_of_a_name: 1})


def test_a_system_message_is_added_where_there_is_none(published):
    policy = loaded(published["smollm2"], system="Be brief.")
    assert policy.decode(policy.encode("Hi")).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi"
    )
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    assert "Be brief." not in policy.decode(policy.encode(own))


def test_a_template_that_refuses_a_chat_is_quoted(published):
    policy = loaded(published["gemma3"], system="Be brief.")
    with pytest.raises(ValueError, match=r"refuses a chat with the roles system, user: System role not supported"):
        policy.encode("Hi")
    with pytest.raises(ValueError, match="without messages"):
        policy.encode([])


def test_a_base_model_gets_the_messages_of_a_chat_as_text(published):
    tokenizer = loaded(published["llama3"]).tokenizer
    tokenizer.chat_template = None
    policy = Policy(None, tokenizer, frozenset({1}))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert policy.encode(chat) == policy.encode("Be brief.\n\nHi")


def test_who_opens_the_thinking_is_noticed(published):
    assert loaded(published["r1-distill-qwen"]).opens_thinking
    assert not loaded(published["llama3"]).opens_thinking


def test_decoding_changes_no_letter(published):
    policy = loaded(published["r1-distill-qwen"])
    text = "<think>\nI 'm not sure , is n't it ?  \\frac{1}{2} é 你好\n</think>\n\\boxed{4} ."
    assert policy.decode(policy.tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.numeric
@ALL
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_teacher_forced_log_probs_are_the_samplers(published, name, attention):
    policy = loaded(published[name], attention=attention)
    assert policy.model.config._attn_implementation == attention
    groups = sampled_groups(policy)
    learner = Learner(policy.model, LearnerSettings(temperature=0.7))
    for batch in batches(learner, groups):
        logprobs, entropies = learner.logprobs(batch)
        limit = logprob_limit(learner, [batch])
        torch.testing.assert_close(logprobs, batch.behavior_logprobs, atol=limit, rtol=0)
        assert entropies.min() > 0.01


@pytest.mark.numeric
@ALL
def test_in_bfloat16_they_are_as_close_as_its_rounding(published, name):
    policy = loaded(published[name], dtype="bfloat16")
    groups = sampled_groups(policy, temperature=1.0)
    learner = Learner(policy.model, LearnerSettings())
    packed = batches(learner, groups)
    differences = torch.cat([learner.logprobs(b)[0] - b.behavior_logprobs for b in packed])
    assert differences.abs().mean() < logprob_limit(learner, packed, size=torch.mean) < 0.5


@ALL
def test_activation_checkpointing_gives_the_same_update(published, name):
    weights = []
    for checkpointing in (False, True):
        policy = loaded(published[name])
        learner = Learner(policy.model, LearnerSettings(lr=1e-2, activation_checkpointing=checkpointing))
        update = learner.step_on(batches(learner, sampled_groups(policy, temperature=1.0)))
        assert update.metrics["grad_norm"] > 0
        weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
    torch.testing.assert_close(*weights, atol=0, rtol=0)
    assert not torch.equal(weights[0], torch.cat([p.flatten() for p in loaded(published[name]).model.parameters()]))


def test_soft_capped_logits_are_refused_even_where_a_few_would_not_show_it():
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM soft-caps .*final_logit_softcapping=30.*Gemma 3"):
        Learner(soft_capped(), LearnerSettings())


@pytest.mark.numeric
@ALL
def test_what_is_exported_is_what_was_trained(published, name, tmp_path):
    policy = loaded(published[name])
    learner = Learner(policy.model, LearnerSettings(lr=1e-2))
    learner.step_on(batches(learner, sampled_groups(policy, temperature=1.0)))
    save_policy(policy, tmp_path / "model", card="# card", temperature=0.6)
    assert not list(tmp_path.glob("*.partial"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([policy.encode("Hi")])
    limit = carried(lambda: policy.model(ids).logits)
    torch.testing.assert_close(again(ids).logits, policy.model(ids).logits, atol=limit, rtol=0)
    tied = policy.model.config.tie_word_embeddings
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    assert tokenizer.encode("2 + 2 =") == policy.tokenizer.encode("2 + 2 =")
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == sorted(policy.stop_ids)
    assert (generation["temperature"], generation["top_k"], generation["top_p"]) == (0.6, 0, 1.0)
    assert "min_p" not in generation
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == [type(policy.model).__name__]
    assert (tmp_path / "model" / "README.md").read_text() == "# card"
    assert loaded(str(tmp_path / "model")).stop_ids == policy.stop_ids


def test_export_leaves_the_policy_alone_and_takes_over_no_foreign_sampling_settings(published, tmp_path):
    policy = loaded(published["qwen2.5-instruct"])
    policy.model.generation_config.repetition_penalty = 1.05
    policy.model.generation_config.top_p = 0.8
    policy.model.generation_config.do_sample = False  # a combination that transformers refuses to write
    own = policy.model.generation_config
    save_policy(policy, tmp_path / "model", card="")
    assert policy.model.generation_config is own
    assert "repetition_penalty" not in (tmp_path / "model" / "generation_config.json").read_text()
    save_policy(policy, tmp_path / "model", card="", **RolloutConfig(top_p=0.9, top_k=5, min_p=0.1).sampling)
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert [generation[key] for key in ("temperature", "top_p", "top_k", "min_p")] == [1.0, 0.9, 5, 0.1]


def test_export_writes_over_what_a_killed_process_left(published, tmp_path):
    policy = loaded(published["smollm2"])
    for leftover in ("model", "model.partial"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "junk").touch()
    save_policy(policy, tmp_path / "model", card="")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "junk").exists()


def test_missing_weights_are_refused_not_drawn_at_random(published, tmp_path):
    model, tokenizer = make_model("llama3")
    weights = {k: v for k, v in model.state_dict().items() if k != "model.layers.1.mlp.up_proj.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 of the weights .*model\.layers\.1\.mlp\.up_proj\.weight"):
        loaded(str(tmp_path))


def test_places_without_a_model_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path='.*' cannot be loaded: .* or \"demo\"\."):
        loaded(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds an adapter, not a model.*merged model"):
        loaded(str(tmp_path))


def test_tied_and_untied_heads_both_train(published):
    for name, kind, tied in (("smollm2", LlamaForCausalLM, True), ("r1-distill-qwen", Qwen2ForCausalLM, False)):
        policy = loaded(published[name])
        assert isinstance(policy.model, kind)
        head, embedding = policy.model.get_output_embeddings().weight, policy.model.get_input_embeddings().weight
        assert (head is embedding) == tied
        before = head.detach().clone()
        learner = Learner(policy.model, LearnerSettings(lr=1e-2))
        learner.step_on(batches(learner, sampled_groups(policy, temperature=1.0)))
        assert not torch.equal(head, before)
        assert (policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight) == tied
