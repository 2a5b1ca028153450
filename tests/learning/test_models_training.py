"""Whole runs on models as people publish them: with a chat template, with low-rank additions, and what they leave."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.models.layers import LoraSettings
from bapo.models.loading import load_policy
from bapo.tasks.countdown import Countdown
from bapo.train import build as build_module
from bapo.train.run import resume, start
from bapo.types import Problem, Score
from tests.tiny.families import publish
from tests.tiny.runs import configured

LORA = {"lora": {"rank": 4, "alpha": 16.0}}


def run(out, **sections):
    start(configured(out, **sections), plain=True)
    return out


def lines(out, kind):
    return [
        line for text in (out / "metrics.jsonl").read_text().splitlines() if (line := json.loads(text))["kind"] == kind
    ]


class Capitals:
    """Reward 1 for an answer that starts with a capital letter."""

    def __init__(self):
        self.train = [Problem(str(i), [{"role": "user", "content": f"Word {i}?"}], None) for i in range(8)]
        self.test = self.train

    def scores(self, responses):
        return [Score(float("A" <= text[:1] <= "Z")) for _, text in responses]


def test_a_chat_model_learns_from_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "make_task", lambda config, policy, data: (Capitals(), []))
    out = run(
        tmp_path / "run",
        steps=12,
        model={"path": publish("qwen2.5-instruct", tmp_path / "qwen")},
        rollout={"prompts": 8, "responses": 16, "max_tokens": 4},
        learn={"batch_groups": 8, "lr": 1e-2, "warmup_updates": 0},
        eval={"problems": 8, "k": 8, "every": 0},
    )
    rewards = [line["reward"] for line in lines(out, "rollout")]
    assert sum(rewards[:2]) / 2 < 0.4
    assert sum(rewards[-2:]) / 2 > 0.8
    sample = json.loads((out / "rollouts.jsonl").read_text().splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    asked = tokenizer.decode(sample["trajectories"][0]["prompt"])
    assert asked.endswith("?<|im_end|>\n<|im_start|>assistant\n")
    before, after = (line["eval/avg"] for line in lines(out, "eval"))
    assert after > before + 0.4


@pytest.fixture(scope="module")
def with_lora(tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "run"
    return run(out, model=LORA, eval={"also_at": [0.6, 0.0]}, checkpoint_every=2)


def test_a_run_with_additions_leaves_a_plain_model_and_the_additions(with_lora):
    merged = AutoModelForCausalLM.from_pretrained(with_lora / "model").eval()
    base = load_policy("demo", dtype="float32", device="cpu").model
    assert merged.state_dict().keys() == base.state_dict().keys()
    changed = {k for k, v in merged.state_dict().items() if not torch.equal(v, base.state_dict()[k])}
    assert changed == {k for k in base.state_dict() if "_proj" in k}
    assert (with_lora / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((with_lora / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "demo"
    kept = load_file(with_lora / "checkpoints" / "step-000004" / "shard-00001.safetensors")
    assert sum(t.numel() for name, t in kept.items() if name.startswith("weight.")) < 0.2 * sum(
        p.numel() for p in base.parameters()
    )


def test_a_run_with_additions_resumes_bit_for_bit(with_lora, tmp_path):
    out = tmp_path / "killed"  # as if killed after the checkpoint of step 2
    shutil.copytree(with_lora, out)
    (out / "summary.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-000004")
    resume(out, plain=True)
    for name in ("metrics.jsonl", "model/model.safetensors", "adapter/adapter_model.safetensors", "model/README.md"):
        assert (out / name).read_bytes() == (with_lora / name).read_bytes(), name


class Products:
    """Reward 1 for a search that multiplies at once; the embedded model tries every operator."""

    def __init__(self):
        problems = Countdown()
        self.train, self.test = problems.train[:64], problems.test[:16]

    def scores(self, responses):
        return [Score(float("*" in text)) for _, text in responses]


def test_additions_to_the_embedded_model_learn(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "make_task", lambda config, policy, data: (Products(), []))
    out = run(
        tmp_path / "run",
        steps=8,
        model={"lora": {"rank": 8}},
        rollout={"prompts": 8, "responses": 8, "max_tokens": 4},
        learn={"batch_groups": 8, "lr": 2e-3, "warmup_updates": 0},
        eval={"problems": 16, "k": 8, "every": 0},
    )
    before, after = (line["eval/avg"] for line in lines(out, "eval"))
    assert after > before + 0.3


def test_the_card_says_what_the_run_did(with_lora):
    card = (with_lora / "model" / "README.md").read_text()
    summary = json.loads((with_lora / "summary.json").read_text())
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert front.splitlines()[0] == 'base_model: "demo"'
    assert "rank 4, alpha 16, on every linear layer but the head" in body
    assert "brake, low 0.8, high 1.2, delta 0.03; the lower bound of used tokens rises to 1" in body
    assert f"| updates | {summary['updates']}, steps: 4; AdamW" in body
    assert "no token older than 3 updates (bound 16)" in body
    for key, name in (("eval/avg", "avg@2"), ("eval/pass", "pass@2")):
        before, after = (
            f"{line[key]:.3f}  [{line[f'{key}_low']:.3f}, {line[f'{key}_high']:.3f}]"
            for line in (summary["before"], summary["after"])
        )
        assert f"| 1 | {name} | {before} | {after} |" in body
    assert f"| 0.6 | avg@2 | {summary['also_at'][0]['before']['eval/avg']:.3f}  [" in body
    assert f"| 0 | avg@1 | {summary['also_at'][1]['before']['eval/avg']:.3f}  [" in body
    assert "bapo eval --model MODEL --data countdown --k 2 --temperature 1 --max-tokens 48" in body
    assert card == (with_lora / "adapter" / "README.md").read_text()


def test_a_published_model_without_a_token_to_pad_with_trains_and_is_exported(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "make_task", lambda config, policy, data: (Capitals(), []))
    out = run(
        tmp_path / "run",
        steps=1,
        model={"path": publish("llama3", tmp_path / "llama"), "dtype": "bfloat16", "attention": "eager"},
        rollout={"prompts": 4, "responses": 4, "max_tokens": 8},
        learn={"batch_groups": 4, "activation_checkpointing": True},
    )
    generation = json.loads((out / "model" / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == ["<|end_of_text|>", "<|eot_id|>"]
    again = load_policy(str(out / "model"), dtype="bfloat16", device="cpu", lora=LoraSettings(2))
    assert again.encode("Hi").count(tokenizer.bos_token_id) == 1


def test_an_objective_with_a_fixed_clip_has_its_options_on_the_card(tmp_path):
    objective = {"name": "grpo", "options": {"low": 0.7, "high": 1.3}}
    out = run(tmp_path / "run", steps=1, objective=objective, offpolicy={"reuse": 1, "replay_fraction": 0.25})
    card = (out / "model" / "README.md").read_text()
    assert "| objective | grpo, low 0.7, high 1.3 |" in card
    assert "each rollout batch used once, 25% of a batch replayed" in card
    assert "| prompts | as plain text |" in card
    assert "all weights trained" in card
