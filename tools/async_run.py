"""Sampling beside learning against taking turns, in real runs on this machine: python tools/async_run.py.

A small Llama with random weights ends a response at every token with a chance of about one in 32, so lengths are
geometric: a long tail, whose 99th percentile is near seven medians. Rewards are a coin that depends on the text. One
rollout actor and one learner rank, a core each, train on it through Ray:

    in turns     cluster.ahead = 0: sampling and learning wait for each other, and a step for its longest response
    beside       cluster.ahead = 1 and 2

Beside the measured seconds per step stands what `schedule_loops` predicts for the same lengths, with speeds that are
measured here: the engine's from two rates of the same engine class, the learner's from the run in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from schedule_loops import Setting, asynchronous, synchronous
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bapo.demo import model_path
from bapo.rollout.engine import Request, Sampling, generate
from bapo.rollout.local.engine import LocalEngine

REWARD = """
import hashlib

def coin(response, answer):
    return float(hashlib.sha256(response.encode()).digest()[0] % 2)
"""
PROMPTS, RESPONSES, STALENESS = 8, 8, 16
BATCHES, PASSES = 1, 1  # so that sampling and learning take about equally long
WARM = 3  # steps that are not counted


def make_model(directory: Path, hidden: int, layers: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        intermediate_size=3 * hidden,
        vocab_size=32,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def train(where: Path, name: str, ahead: int, steps: int) -> Path:
    out = where / name
    options = {
        **{"steps": steps, "out": out, "device": "cpu", "threads": 2, "checkpoint-every": 1000},
        **{"model.path": where / "model", "task.name": "data", "task.reward": "coin:coin"},
        **{"task.train": where / "data.jsonl", "task.test": where / "test.jsonl"},
        **{"rollout.prompts": PROMPTS, "rollout.responses": RESPONSES, "rollout.max-tokens": 512},
        **{"learn.batch-groups": PROMPTS // BATCHES, "learn.lr": 1e-9},
        **{"offpolicy.reuse": PASSES, "offpolicy.max-staleness": STALENESS},
        **{"eval.problems": 1, "eval.k": 1, "eval.every": 0, "cluster.rollouts": 1, "cluster.ahead": ahead},
    }
    command = [sys.executable, "-m", "bapo", "train", *(str(x) for key, v in options.items() for x in (f"--{key}", v))]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    return out


def read(run: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def seconds_per_step(run: Path) -> float:
    return statistics.fmean(line["seconds"] for line in read(run, "timing.jsonl")[WARM:])


def engine_speed(where: Path) -> tuple[float, float]:
    """Tokens per second of a response alone, and what many tend to: a step takes 1 / alone + n / saturated."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(where / "model")
    engine = LocalEngine(model)
    engine.load(model.named_parameters(), version=0)
    step = {}
    for rows in (1, 64):
        requests = [Request([1, 2, 3], 0, seed, 128, seed) for seed in range(rows)]
        generate(engine, requests, Sampling(), token_budget=rows)
        began = time.perf_counter()
        generate(engine, requests, Sampling())
        step[rows] = (time.perf_counter() - began) / 128
    each = (step[64] - step[1]) / 63
    return 1 / (step[1] - each), 1 / each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    where = Path(tempfile.mkdtemp(prefix="async-run-"))
    make_model(where / "model", options.hidden, options.layers)
    (where / "coin.py").write_text(REWARD)
    for file, numbers in (("data.jsonl", range(200)), ("test.jsonl", range(200, 204))):
        rows = [{"prompt": f"{number % 13},{number % 7},{number}=", "answer": "0"} for number in numbers]
        (where / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone, saturated = engine_speed(where)
    runs = {ahead: train(where, f"ahead-{ahead}", ahead, options.steps) for ahead in (0, 1, 2)}
    lengths = [
        [len(trajectory["tokens"]) for trajectory in line["trajectories"]]
        for run in runs.values()
        for line in read(run, "rollouts.jsonl")
    ]
    flat = sorted(length for group in lengths for length in group)
    turns = read(runs[0], "timing.jsonl")[WARM:]
    updates = [line for line in read(runs[0], "metrics.jsonl") if line["kind"] == "update"]
    tokens = statistics.fmean(line["tokens"] for line in updates) * BATCHES * PASSES
    learn = tokens / statistics.fmean(line["learn_seconds"] for line in turns)
    setting = Setting(
        prompts=PROMPTS, responses=RESPONSES, steps=200, batches=BATCHES, passes=PASSES, ahead=0, staleness=STALENESS,
        engines=1, slots=128, alone=alone, saturated=saturated, prefill=10 * saturated, prompt_tokens=8, learn=learn,
        update_seconds=0.0, gather_seconds=0.05, load_seconds=0.05,
    )  # fmt: skip
    print(f"{len(flat)} lengths: mean {statistics.fmean(flat):.0f}, median {flat[len(flat) // 2]}, "
          f"99th percentile {flat[int(0.99 * len(flat))]}, longest {flat[-1]}")  # fmt: skip
    print(f"engine: {alone:.0f} tokens/s alone, {saturated:.0f} saturated; learner: {learn:.0f} tokens/s\n")
    print("| | seconds per step | speed-up | predicted | engine samples |\n|---|---|---|---|---|")
    base = seconds_per_step(runs[0])
    many = [lengths[index % len(lengths)] for index in range(PROMPTS * 210)]
    first = synchronous(setting, many).step_seconds
    for ahead, run in runs.items():
        found = asynchronous(replace(setting, ahead=ahead), many).step_seconds
        name = "in turns" if ahead == 0 else f"beside, ahead = {ahead}"
        busy = statistics.fmean(line["sampling_share"] for line in read(run, "timing.jsonl")[WARM:])
        measured = seconds_per_step(run)
        print(f"| {name} | {measured:.2f} | {base / measured:.2f} | {first / found:.2f} | {busy:.0%} |")


if __name__ == "__main__":
    main()
