"""vLLM's engine for tests, and what transformers says to its samples."""

import os
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bapo.rollout.engine import Request, Segment
from bapo.rollout.vllm.engine import VllmEngine
from bapo.rollout.vllm.start import Settings

SETTINGS = {"dtype": "float32", "positions": 128, "slots": 8, "cache_bytes": 2**28, "threads": 1}


def policy(path: str):
    """The model by transformers, whose log-probs are the standard."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def made(path: str, **settings: object) -> VllmEngine:
    """A started engine that can be sabotaged."""
    return VllmEngine(Settings(path, **SETTINGS | {"extension": "tests.vllm.sabotage.Sabotage"} | settings))


def order(engine: VllmEngine, method: str, *arguments: object) -> None:
    """Call a method of tests/vllm/sabotage.py in the workers."""
    engine._ask(engine._vllm.collective_rpc(method, args=arguments), method)


@torch.no_grad()
def gap(model, requests: list[Request], segments: list[Segment], temperature: float = 1.0) -> float:
    """The largest difference between the log-probs of sampled tokens and a full forward pass by transformers."""
    gaps = []
    for request, segment in zip(requests, segments, strict=True):
        ids = torch.tensor([[*request.context, *segment.tokens]])
        start = len(request.context)
        expected = (model(ids).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
        gaps.append((torch.tensor(segment.logprobs) - expected.gather(1, ids[0, start:, None])[:, 0]).abs().max())
    return float(torch.stack(gaps).max())


@torch.no_grad()
def changed(model, seed: int):
    """The same model after something like an update: every weight has moved a little."""
    other = deepcopy(model)
    torch.manual_seed(seed)
    for weight in other.parameters():
        weight.add_(torch.randn_like(weight) * 0.2 * weight.std())
    return other


def tree(pid: int) -> set[int]:
    """A process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def engine_processes() -> dict[str, int]:
    """vLLM's processes below this one, by their titles."""
    titles = {}
    for pid in tree(os.getpid()):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        if title.startswith("VLLM::"):
            titles[title.removeprefix("VLLM::").split()[0]] = pid
    return titles
