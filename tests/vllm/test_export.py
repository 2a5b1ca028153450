"""vLLM serves an exported model as it was trained: the same tokens with the same log-probs.

Needs vLLM's interpreter, BAPO_VLLM_PYTHON, and the real model, BAPO_SMOLLM2. `make test-integrations` has both.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from bapo.models.export import save_policy
from bapo.models.layers import LoraSettings
from bapo.models.loading import load_policy

PYTHON, MODEL = os.environ.get("BAPO_VLLM_PYTHON"), os.environ.get("BAPO_SMOLLM2")
pytestmark = pytest.mark.skipif(not (PYTHON and MODEL), reason="needs BAPO_VLLM_PYTHON and BAPO_SMOLLM2")
TOKENS = 16


def demo():
    """A model with a head of its own and an alphabet of 21."""
    return load_policy("demo", dtype="float32", device="cpu"), "5,12,5=2:"


def smollm2():
    """A model whose head is its embedding, with low-rank additions that are not zero."""
    policy = load_policy(str(MODEL), dtype="float32", device="cpu", lora=LoraSettings(rank=4))
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.01
    return policy, [{"role": "user", "content": "What is 17 + 25?"}]


def said_by_vllm(model: Path, prompt: list[int]) -> dict:
    script = Path(__file__).with_name("continue_greedily.py")
    # Not our own packages: vLLM wants an older transformers.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, script, model, str(TOKENS), *map(str, prompt)],
        env=own | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("trained", [demo, smollm2])
@torch.no_grad()
def test_vllm_says_what_the_policy_says(tmp_path, trained):
    policy, problem = trained()
    save_policy(policy, tmp_path / "model", card="# A test", temperature=0.7)
    prompt = policy.encode(problem)
    said = said_by_vllm(tmp_path / "model", prompt)

    ids = torch.tensor([[*prompt, *said["tokens"]]])
    logprobs = policy.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert len(said["tokens"]) == TOKENS
    torch.testing.assert_close(
        torch.tensor(said["logprobs"]), logprobs.max(-1).values, atol=1e-4, rtol=0, msg="not the policy's own choices"
    )
    torch.testing.assert_close(
        logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0], logprobs.max(-1).values, atol=1e-4, rtol=0
    )
    assert said["text"] == policy.decode(said["tokens"])
    assert said["default"] == {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
