"""Models that were cut short, changed or spoiled: each gets one error in words."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo.cli import run
from bapo.models.loading import load_policy, outline_policy
from tests.tiny.families import publish

FILE = "model.safetensors"
WEIGHT = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return publish("llama3", tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def model(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


def refused(directory):
    with pytest.raises(ValueError, match=str(directory)) as error:
        load_policy(str(directory), dtype="float32", device="cpu")
    return str(error.value)


def change(directory, edit):
    weights = load_file(directory / FILE)
    edit(weights)
    save_file(weights, directory / FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("left", [0, 5, 100, 0.5, 0.999])
def test_a_file_that_was_cut_short_is_named(model, left):
    data = (model / FILE).read_bytes()
    (model / FILE).write_bytes(data[: left if isinstance(left, int) else int(left * len(data))])
    told = refused(model)
    assert f"{FILE} is damaged or incomplete" in told
    assert "download it again" in told


def test_a_weight_of_another_shape_is_named_with_both_shapes(model):
    rows, columns = load_file(model / FILE)[WEIGHT].shape
    change(model, lambda weights: weights.update({WEIGHT: weights[WEIGHT][:, 1:].contiguous()}))
    assert f"{WEIGHT} with shape {(rows, columns - 1)}, but its config.json asks for {(rows, columns)}" in refused(
        model
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(model, bad):
    change(model, lambda weights: weights[WEIGHT][:2, 0].fill_(bad))
    assert f"has 2 numbers in {WEIGHT} that are NaN or infinite" in refused(model)


def test_tensors_that_are_not_used_are_named(model):
    change(model, lambda weights: weights.update({f"extra.{i}": torch.zeros(3) for i in range(7)}))
    with pytest.warns(UserWarning, match=r"has 7 tensors that LlamaForCausalLM does not use: extra\.0, .*extra\.4, …"):
        load_policy(str(model), dtype="float32", device="cpu")


class Touch:
    """A pickle of this runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("hostile", [False, True])
def test_a_pickle_is_refused_unopened(model, tmp_path, hostile):
    weights = load_file(model / FILE)
    (model / FILE).unlink()
    torch.save({"a": Touch(tmp_path / "ran")} if hostile else weights, model / "pytorch_model.bin")
    assert "has its weights only as a pickle, pytorch_model.bin" in refused(model)
    assert not (tmp_path / "ran").exists()


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("file", ["pytorch_model.bin", "weights.dat", "../outside.safetensors", "{place}", "", 3, None])
def test_an_index_that_leads_to_a_pickle_or_elsewhere_is_refused(model, tmp_path, file):
    named = str(tmp_path / "outside.safetensors") if file == "{place}" else file
    (model / FILE).rename(tmp_path / "outside.safetensors")
    shutil.copy(tmp_path / "outside.safetensors", model / "other.safetensors")  # so it is not only a pickle
    torch.save({"a": Touch(tmp_path / "ran")}, model / "pytorch_model.bin")
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {WEIGHT: named}}))
    told = refused(model)
    assert f"{named!r}" in told
    assert INDEX in told
    assert (
        "opening a pickle can run code" if file in ("pytorch_model.bin", "weights.dat") else "own directory"
    ) in told
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match=INDEX):
        outline_policy(str(model))


@pytest.mark.parametrize("index", ["[1]", '{"weight_map": 3}', "{", '{"weight_map": ["x.bin"]}'])
def test_an_index_that_is_none_is_refused(model, index):
    (model / INDEX).write_text(index)
    assert INDEX in refused(model)


@pytest.mark.parametrize("within", [False, True], ids=["", "the text model's own"])
def test_a_configuration_that_names_a_pickle_or_a_place_elsewhere_is_refused(model, tmp_path, within):
    """With some architectures, transformers goes on with the part of the configuration that is the text model's."""

    def named(name):
        setting = {"transformers_weights": name}
        changed_json(model / "config.json", **({"text_config": setting} if within else setting))
        return refused(model)

    torch.save({"a": Touch(tmp_path / "ran")}, model / "adapter_model.bin")
    assert "has weights in 'adapter_model.bin', says its config.json, and opening a pickle" in named(
        "adapter_model.bin"
    )
    assert "not a file in its own directory" in named("x/../../y.safetensors")
    (model / "mine.safetensors.index.json").write_text(json.dumps({"weight_map": {WEIGHT: "adapter_model.bin"}}))
    assert "says its mine.safetensors.index.json, and opening a pickle" in named("mine.safetensors.index.json")
    (tmp_path / "elsewhere.index.json").write_text("no JSON")
    assert "not a file in its own directory" in named("../elsewhere.index.json")
    assert not (tmp_path / "ran").exists()


def changed_json(path, **changed):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changed))


def test_files_that_stand_in_for_others_are_refused_unread(model, tmp_path):
    """What is checked is what is read."""
    torch.save({"a": Touch(tmp_path / "ran")}, model / "adapter_model.bin")
    shutil.copy(model / "config.json", model / "config.4.0.0.json")
    changed_json(model / "config.4.0.0.json", transformers_weights="adapter_model.bin")
    changed_json(model / "config.json", configuration_files=["config.4.0.0.json"])
    assert "its config.json names other files in place of the usual ones (configuration_files)" in refused(model)
    with pytest.raises(ValueError, match="configuration_files"):
        outline_policy(str(model))
    shutil.copy(model / "config.4.0.0.json", model / "config.json")
    changed_json(model / "config.json", transformers_weights=None)
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.4.0.0.json")
    changed_json(model / "tokenizer_config.json", fast_tokenizer_files=["../tokenizer.4.0.0.json"])
    assert "its tokenizer_config.json names other files" in refused(model)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "key",
    [
        *("vocab", "merges", "gguf_file", "vocab_file", "merges_file", "tokenizer_file", "spm_file", "init_inputs"),
        *("source_spm", "target_spm"),
    ],
)
def test_settings_that_name_files_for_a_tokenizer_are_refused_unread(model, tmp_path, file, key):
    (model / "tokenizer.json").rename(tmp_path / "outside.json")
    changed_json(model / file, **{key: [str(tmp_path / "outside.json")] if key == "init_inputs" else "../outside.json"})
    assert f"its {file} names other files in place of the usual ones ({key})" in refused(model)
    with pytest.raises(ValueError, match=key):
        outline_policy(str(model))


def test_settings_that_old_versions_of_transformers_wrote_are_no_harm(model):
    changed_json(model / "tokenizer_config.json", tokenizer_file=None, special_tokens_map_file="/root/map.json")
    load_policy(str(model), dtype="float32", device="cpu")


def evil_processor(directory, mark):
    """A processor with code of its own, which transformers would take for a tokenizer of this name."""
    (directory / "evil.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import ProcessorMixin\nclass P(ProcessorMixin): pass\n"
    )
    changed_json(directory / "processor_config.json", auto_map={"AutoProcessor": "evil.P"}, processor_class="P")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["AutoProcessor", "AutoProcessorFast", "AutoTokenizer", "RagTokenizer", "pipeline", 3])
def test_a_tokenizer_that_is_none_is_refused_and_nobody_is_asked(model, tmp_path, monkeypatch, file, name):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    evil_processor(model, tmp_path / "ran")
    changed_json(model / "tokenizer_config.json", tokenizer_class=None)
    changed_json(model / file, tokenizer_class=name)
    assert f"its {file} has tokenizer_class={str(name)!r}, which is no tokenizer" in refused(model)
    with pytest.raises(ValueError, match="which is no tokenizer"):
        outline_policy(str(model))
    assert asked == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "OfSomebody", None]
)
def test_a_tokenizer_of_transformers_or_of_an_unknown_name_loads(model, name):
    changed_json(model / "tokenizer_config.json", tokenizer_class=name)
    load_policy(str(model), dtype="float32", device="cpu")


def test_names_of_tensors_cannot_colour_a_warning(model):
    change(model, lambda weights: weights.update({"\x1b[31mred\x1b[0m\n": torch.zeros(3)}))
    with pytest.warns(UserWarning, match=r"does not use: ·\[31mred·\[0m\. They"):
        load_policy(str(model), dtype="float32", device="cpu")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_code_on_the_hub_that_a_configuration_names_is_refused(model, key):
    for value in ("someone/kernel", {"text_config": "someone/kernel:f"}):
        changed_json(model / "config.json", **{key: value})
        assert f"has {key}=" in refused(model)
        assert "which names code on the hub" in refused(model)


@pytest.mark.parametrize(
    "changed",
    [
        {"attribute_map": {"a": "num_hidden_layers"}, "a": 10**9},
        {"attribute_map": {"a": "_attn_implementation_internal"}, "a": "someone/kernel"},
        {"attribute_map": {"tokenizer_class": "a"}, "a": "Qwen2VLProcessor"},
        {"_auto_class": "AutoConfig"},
        {"__dict__": {"_attn_implementation_internal": "someone/kernel"}},
        {"to_json_string": 1},
    ],
    ids=["layers", "code on the hub", "a processor", "files of Python", "all attributes", "a function"],
)
def test_a_setting_that_changes_what_others_mean_is_refused(model, changed):
    changed_json(model / "config.json", text_config=changed)
    told = f"its config.json has {next(iter(changed))}="
    assert told in refused(model)
    changed_json(model / "config.json", text_config=None, **changed)
    assert told in refused(model)


@pytest.mark.parametrize("end", ["abc", [[1]], [10**30], {"a": 1}])
def test_an_end_that_is_no_token_is_quoted(model, end):
    changed_json(model / "generation_config.json", eos_token_id=end)
    with pytest.raises(ValueError, match=r"as its end, which is no token|cannot be loaded"):
        load_policy(str(model), dtype="float32", device="cpu")


def test_an_index_of_shards_loads(model):
    weights = load_file(model / FILE)
    (model / FILE).unlink()
    save_file(weights, model / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    map = dict.fromkeys(weights, "model-00001-of-00001.safetensors")
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": map}))
    load_policy(str(model), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", ["../../../outside", "/outside", "a\0b", "x" * 300, ""])
def test_a_template_with_a_name_that_leads_elsewhere_is_refused_before_it_is_written(model, name):
    (model / "chat_template.jinja").unlink(missing_ok=True)
    listed = [{"name": "default", "template": "{{ messages }}"}, {"name": name, "template": "a"}]
    changed_json(model / "tokenizer_config.json", chat_template=listed)
    assert "which cannot be that of a file" in refused(model)


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{% for m in messages %}\n{{ m.content ", "in line 2: unexpected end of template"),
        ("{{ messages | nofilter }}", "in line 1: No filter named 'nofilter'."),
        ("{% endfor %}", "in line 1: Encountered unknown tag 'endfor'"),
    ],
)
def test_a_template_that_cannot_be_read_is_quoted(model, template, cause):
    (model / "chat_template.jinja").write_text(template)
    told = refused(model)
    assert cause in told
    assert "Correct chat_template.jinja" in told


def test_a_template_that_fails_is_quoted(model):
    (model / "chat_template.jinja").write_text("{{ messages + 1 }}")
    policy = load_policy(str(model), dtype="float32", device="cpu")
    with pytest.raises(
        ValueError, match=r"chat template refuses a chat with the roles user: TypeError: can only concat"
    ):
        policy.encode("Hi")


@pytest.mark.parametrize("length", ["many", {}])
def test_settings_with_which_a_tokenizer_cannot_work_are_quoted(model, length):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": length}))
    told = refused(model)
    assert "cannot encode '0': TypeError: '>' not supported" in told
    assert "correct tokenizer.json and tokenizer_config.json" in told


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", "two"), ("hidden_size", -3)])
def test_a_config_that_makes_no_sense_is_quoted(model, key, value):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert "cannot be loaded: " in refused(model)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_hidden_layers", 10**9, "its config.json has num_hidden_layers="),
        ("num_attention_heads", 10**400, "its config.json has num_attention_heads="),
        ("vocab_size", 50_000_000_000, "its config.json has vocab_size="),
        ("hidden_size", 10**8, "its config.json has hidden_size="),
        ("intermediate_size", 10**15, "its config.json has intermediate_size="),
    ],
    ids=["layers", "heads", "vocabulary", "width", "inner"],
)
def test_a_config_that_asks_for_far_more_than_the_weights_is_refused_before_memory_fills(model, key, value, told):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert told in refused(model)
    with pytest.raises(ValueError, match=told):
        outline_policy(str(model))


GPT_NEO = {"model_type": "gpt_neo", "hidden_size": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 22}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_type": "bart", "decoder_layers": 300_000, "d_model": 8}, "decoder_layers=300000"),
        (GPT_NEO | {"attention_types": [[["global", "local"], 10**9]]}, "a list=1000000000"),
        ({"text_config": {"below": {"num_hidden_layers": 300_000}}}, "num_hidden_layers=300000"),
    ],
    ids=["other layers", "a count in a list", "far below"],
)
def test_sizes_are_found_wherever_a_config_has_them(model, changed, told):
    changed_json(model / "config.json", **changed)
    assert f"its config.json has {told}" in refused(model)


@pytest.mark.parametrize(
    ("weights", "changed"),
    [
        ({"model.layers.299999.x": torch.zeros(1)}, {"num_hidden_layers": 300_000}),
        ({"x": torch.zeros(0, 10**12)}, {"num_attention_heads": 10**7}),
        ({f"x.{number}.y.{number}.z": torch.zeros(1) for number in range(2, 2000)}, {"num_hidden_layers": 8000}),
        ({f"x{number}.{number}.z": torch.zeros(1) for number in range(99)}, {"num_hidden_layers": 99}),
    ],
    ids=["a name", "an empty weight", "many layers", "numbers of other things"],
)
def test_a_name_or_an_empty_weight_allows_no_size(model, weights, changed):
    change(model, lambda present: present.update(weights))
    changed_json(model / "config.json", **changed)
    assert f"its config.json has {next(iter(changed))}=" in refused(model)


def test_weights_whose_names_have_no_numbers_are_no_layers(model):
    save_file({"x": torch.zeros(50_000)}, model / FILE, metadata={"format": "pt"})
    changed_json(model / "config.json", num_hidden_layers=200_000)
    assert "its config.json has num_hidden_layers=200000" in refused(model)


def test_tables_besides_the_weights_are_counted(model):
    """This architecture has a table of all pairs of positions in each layer."""
    change(model, lambda present: present.update(x=torch.zeros(20_000, 16)))
    one = {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2, "num_hidden_layers": 2}
    changed_json(model / "config.json", **GPT_NEO, **one, max_position_embeddings=50_000)
    assert "other numbers, more than its files hold" in refused(model)


def test_a_model_that_is_much_larger_than_its_files_is_refused(model):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 1000, "intermediate_size": 1000}))
    assert "other numbers, more than its files hold" in refused(model)


def with_tokenizer(directory, **changed):
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
)
def test_a_tokenizer_that_panics_is_refused_with_words(model, changed):
    with_tokenizer(model, **changed)
    refused(model)
    with pytest.raises(ValueError, match=str(model)):
        outline_policy(str(model))


def test_a_tokenizer_that_fails_at_a_prompt_is_refused_with_words(model, capsys):
    vocabulary = {letter: i for i, letter in enumerate("0123456789")}
    with_tokenizer(
        model,
        pre_tokenizer=None,
        model={"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "none"},
    )
    policy = load_policy(str(model), dtype="float32", device="cpu", chat=False)
    with pytest.raises(ValueError, match="tokenizer cannot encode 'é'"):
        policy.encode("é")
    assert run(["train", "--model.path", str(model), "--model.chat", "no", "--steps", "1", "--dry-run"]) == 2
    assert "tokenizer cannot encode" in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["train"]])
def test_a_tokenizer_that_cannot_be_saved_stops_a_run_before_its_first_step(model, command, here, capsys):
    """Half of a character outside the basic plane can be read from JSON, and not be written as UTF-8."""
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"note": "\ud800"}))
    words = ["--model.path", str(model), "--device", "cpu", "--steps", "1", "--rollout.max_tokens", "4"]
    assert run([*command, *words, "--out", "run"]) == 2
    assert "can be loaded and not saved (UnicodeEncodeError: " in " ".join(capsys.readouterr().err.split())
    assert not (here / "run" / "metrics.jsonl").exists()
