"""The embedded model: its tokenizer, its demonstrations, its files, and how well it searches."""

import json
import re
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import bapo.demo
from bapo.demo import MAX_RESPONSE_TOKENS, model_path
from bapo.tasks.countdown import ALPHABET, Countdown
from bapo.types import Problem
from tools.demo_model import (
    IGNORED,
    Noise,
    Response,
    build_model,
    build_tokenizer,
    demonstrate,
    encode_demonstrations,
    measure,
    sample,
    train,
)

TASK = Countdown()
PROBLEM = Problem(id="by-hand", prompt="3,7,2=13:", answer={"numbers": [3, 7, 2], "target": 13})
SILENT = Noise(careless=0.0, near=0.0, false_stop=0.0, wrong_sum=0.0)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(model_path(), local_files_only=True).eval()


# Demonstrations


def test_a_noiseless_search_uses_the_numbers_states_true_values_and_stops_at_the_target():
    rng = Random(0)
    closed = 0
    for problem in TASK.train[:200]:
        text = demonstrate(problem, rng, SILENT, max_length=64)
        tries = re.split("[;.]", text)[:-1]
        for one in tries:
            expression, value = one.split("=")
            a, p, b, q, c = re.fullmatch(r"(\d+)(\D)(\d+)(\D)(\d+)", expression).groups()
            x = int(a), int(b), int(c)
            assert sorted(x) == sorted(problem.answer["numbers"])
            by_hand = {
                "++": x[0] + x[1] + x[2], "+-": x[0] + x[1] - x[2], "+*": x[0] + x[1] * x[2],
                "-+": x[0] - x[1] + x[2], "--": x[0] - x[1] - x[2], "-*": x[0] - x[1] * x[2],
                "*+": x[0] * x[1] + x[2], "*-": x[0] * x[1] - x[2], "**": x[0] * x[1] * x[2],
            }  # fmt: skip
            assert int(value) == by_hand[p + q]
            is_last_of_closed = text.endswith(".") and one == tries[-1]
            assert (int(value) == problem.answer["target"]) == is_last_of_closed
        assert TASK.score(problem, text) == float(text.endswith("."))
        assert text.endswith(".") or len(text) == 64
        closed += text.endswith(".")
    assert 40 < closed < 160


def test_each_kind_of_noise_does_what_it_says():
    def texts(noise, count=400):
        rng = Random(1)
        return [demonstrate(PROBLEM, rng, noise, max_length=64) for _ in range(count)]

    def solved(noise):
        return sum(TASK.score(PROBLEM, text) for text in texts(noise))

    assert all(text.count(";") == 0 and text.endswith(".") for text in texts(Noise(0.0, 0.0, 1.0, 0.0)))
    assert solved(Noise(0.0, 1.0, 0.0, 0.0)) > 350  # four of the ten nearest expressions hit: 0.6**7 of searches fail
    assert 100 < solved(SILENT) < 300  # blind: four of about fifty
    assert solved(Noise(1.0, 0.0, 0.0, 0.0)) < 0.8 * solved(SILENT)
    assert any("7+3*2=12" in text for text in texts(Noise(0.0, 0.0, 0.0, 1.0)))
    assert not any("7+3*2=13" in text for text in texts(Noise(0.0, 0.0, 0.0, 1.0)))


def test_demonstrations_depend_on_the_seed_only():
    def draw(seed):
        rng = Random(seed)
        return [demonstrate(problem, rng, Noise(), max_length=64) for problem in TASK.train[:50]]

    assert draw(0) == draw(0) != draw(1)


# Tokenizer


def test_tokenizer_has_one_token_per_character_and_round_trips(tokenizer):
    rng = Random(0)
    for problem in [*TASK.train, *TASK.test]:
        text = demonstrate(problem, rng, Noise(), max_length=64)
        for piece in (problem.prompt, text, problem.prompt + text):
            ids = tokenizer.encode(piece)
            assert len(ids) == len(piece)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == piece


def test_special_tokens_are_apart_from_the_alphabet(tokenizer):
    special = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    assert len(special) == 3
    assert not special & set(tokenizer.encode(ALPHABET))
    assert len(tokenizer) == len(ALPHABET) + 3
    closed = [*tokenizer.encode("7+3*2=13."), tokenizer.eos_token_id]
    assert tokenizer.decode(closed, skip_special_tokens=True) == "7+3*2=13."
    assert tokenizer.encode("é\n") == [tokenizer.unk_token_id] * 2


def test_shipped_tokenizer_is_the_one_the_rebuild_makes(tokenizer):
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


# Training and measuring


def test_encoded_demonstrations_learn_the_response_and_its_stop_token_only(tokenizer):
    problems = list(TASK.train[:64])
    ids, labels = encode_demonstrations(problems, tokenizer, Random(0), Noise())
    rng = Random(0)
    stopped = 0
    for problem, row, row_labels in zip(problems, ids.tolist(), labels.tolist(), strict=True):
        text = demonstrate(problem, rng, Noise(), max_length=MAX_RESPONSE_TOKENS)
        learned = [label for label in row_labels if label != IGNORED]
        assert tokenizer.decode(learned, skip_special_tokens=True) == text
        assert len(learned) <= MAX_RESPONSE_TOKENS
        assert row_labels[: len(problem.prompt)] == [IGNORED] * len(problem.prompt)
        assert row[len(problem.prompt) :][: len(learned)] == learned
        stopped += learned[-1] == tokenizer.eos_token_id
        assert text.endswith(".") or learned[-1] != tokenizer.eos_token_id
    assert 10 < stopped < 60


def test_training_lowers_the_loss_and_repeats_from_its_seed(tokenizer, capsys):
    def losses():
        torch.manual_seed(0)
        model = build_model(tokenizer)
        train(model, tokenizer, TASK.train[:8], steps=6, seed=0, noise=Noise())
        ids, labels = encode_demonstrations(TASK.train[:8], tokenizer, Random(5), Noise())
        with torch.inference_mode():
            return model(input_ids=ids, labels=labels).loss.item()

    first = losses()
    assert first < 2.9  # a uniform guess over 21 tokens costs 3.04
    assert losses() == first
    assert "step 6/6" in capsys.readouterr().out


def test_measure_by_hand():
    groups = [
        [Response("7+3*2=13.", 10, 5.0, 1.0), Response("3+7+2=12;3*7-2=18;", 30, 15.0, 0.0)],
        [Response("3+7+2=13.", 10, 0.0, 0.0), Response("3+7+2=12;3*7", 10, 0.0, 0.0)],
    ]
    result = measure(groups)
    assert result.avg == 0.25
    assert result.pass_any == 0.5
    assert result.entropy == pytest.approx(20 / 60)
    assert result.length == 15.0
    assert result.length_right == 10.0
    assert result.length_wrong == pytest.approx(50 / 3)
    assert result.positive_share == 0.25  # +1 on 10 tokens, -1 on 30; the second group has no signal
    assert result.closed_wrong == pytest.approx(1 / 3)
    assert result.true_statements == 0.6  # of five complete tries 3*7-2=18 and 3+7+2=13 are false


# The shipped model


def test_shipped_model_is_a_small_llama_with_room_for_prompt_and_response(model, tokenizer):
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert 750_000 < model.num_parameters() < 850_000
    longest_prompt = max(len(problem.prompt) for problem in [*TASK.train, *TASK.test])
    assert model.config.max_position_embeddings >= longest_prompt + MAX_RESPONSE_TOKENS
    assert model.config.vocab_size == len(tokenizer)
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
        assert config.bos_token_id is None
    assert model.generation_config.do_sample


def test_shipped_files_are_few_small_and_free_of_pickles():
    shipped = sorted(path.name for path in model_path().iterdir())
    assert shipped == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in model_path().iterdir()) <= 4_000_000
    config = json.loads((model_path() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_shipped_model_solves_a_fair_share_and_leaves_room_to_learn(model, tokenizer):
    result = measure(sample(model, tokenizer, TASK, TASK.test[:128], responses=8, seed=1))
    assert 0.30 < result.avg < 0.50
    assert result.pass_any > 0.80
    assert 0.40 < result.entropy < 0.60
    assert 42 < result.length < 54
    assert result.length_wrong > 1.5 * result.length_right
    assert 0.30 < result.positive_share < 0.40
    assert result.true_statements > 0.8


def test_generate_stops_at_the_stop_token(model, tokenizer):
    torch.manual_seed(0)
    prompts = tokenizer([TASK.test[0].prompt] * 32, return_tensors="pt")
    out = model.generate(input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"])
    responses = out[:, prompts["input_ids"].shape[1] :]
    assert responses.shape[1] <= MAX_RESPONSE_TOKENS
    closed = [row for row in responses.tolist() if tokenizer.eos_token_id in row]
    assert closed
    for row in closed:
        end = row.index(tokenizer.eos_token_id)
        assert tokenizer.decode(row[:end]).endswith(".")
        assert set(row[end + 1 :]) <= {tokenizer.pad_token_id}


def test_sampling_repeats_from_its_seed_and_keeps_the_order_of_problems(model, tokenizer):
    problems = TASK.test[:12]
    first = sample(model, tokenizer, TASK, problems, responses=2, seed=3)
    assert first == sample(model, tokenizer, TASK, problems, responses=2, seed=3)
    assert first != sample(model, tokenizer, TASK, problems, responses=2, seed=4)
    for problem, group in zip(problems, first, strict=True):
        assert len(group) == 2
        assert all(response.reward == TASK.score(problem, response.text) for response in group)


# Finding the files


def test_a_missing_model_is_reported_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(bapo.demo, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"demo_model\.py --out DIR"):
        model_path()
