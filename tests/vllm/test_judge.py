"""The judge asks vLLM's own server, which is started here with a tiny model that knows one reply by heart."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM's environment: make test-integrations")

from bapo.config.sections import TaskConfig
from bapo.preflight.examine import make_judge
from bapo.tasks.verify.scorers import open_scorer
from bapo.types import Problem
from tests.processes import free_port
from tests.tiny.models import without_layers
from tests.tiny.tokenizers import characters

KEY = "sk-0123456789abcdef"
REPLY = "\nScore=7"
"""It follows the line break with which the chat template ends. No character comes twice."""


def knows_by_heart(place):
    """A model whose layers add nothing, and whose head gives every character of the reply the next one."""
    tokenizer = characters(chat=True)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
    model = without_layers(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **sizes)
    ids = [*(tokenizer.convert_tokens_to_ids(letter) for letter in REPLY), tokenizer.eos_token_id]
    with torch.no_grad():
        known = torch.nn.functional.normalize(model.model.embed_tokens.weight.clone(), dim=-1)
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(known))
        model.lm_head.weight[ids[1:]] = known[ids[:-1]]
    model.config.tie_word_embeddings = False
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)


@pytest.fixture
def served(tmp_path):
    """The address of a vLLM server with that model, which wants a key."""
    knows_by_heart(tmp_path / "model")
    address = f"http://127.0.0.1:{(port := free_port())}"
    # What `vllm serve` starts. The command itself wants a package called vllm; the build for CPUs has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
    command += ["--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1", "--api-key", KEY]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 480
        while not answers(f"{address}/health"):
            assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert time.monotonic() < until, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield f"{address}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_responses_are_scored_by_vllms_server_and_without_its_key_they_fail(served, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = {"url": served, "model": "tiny", "rubric": "Is it kind?", "max_tokens": 16, "retries": 0}
    texts = [f"response {number}" for number in range(20)]
    asked = [(Problem(str(number), "Say hello.", "hello"), text) for number, text in enumerate(texts)]
    found = {}
    for variable in ("JUDGE_KEY", ""):
        task = TaskConfig(train=("a.jsonl",), reward="judge", judge=judge | {"key_variable": variable})
        limits = {"seconds": task.reward_seconds, "memory_mb": task.reward_memory_mb}
        made = make_judge(task)
        scorer = open_scorer(task.rewards, opens_thinking=False, judge=made, **limits)
        try:
            found[variable] = scorer.scores(asked)
        finally:
            scorer.close()
            made.close()
    assert [(score.reward, score.failure) for score in found["JUDGE_KEY"]] == [(0.7, "")] * 20
    assert {score.written for score in found["JUDGE_KEY"]} == {len(REPLY)}  # without the line break, with the stop
    assert min(score.read for score in found["JUDGE_KEY"]) > len("Is it kind?Say hello.hello")
    assert {(score.reward, score.failure) for score in found[""]} == {(None, "the judge answered with status 401")}
