"""What only model and data together can tell: how long a response may be, and what an evaluation is.

`Plan.identity` is everything that determines the result. Two evaluations with the same identity give the same bytes, so
it names the directory, and a directory with another one is not continued. Weights are known by all their values,
problems by their ids, the tokens they are put in and their answers.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers

import bapo
from bapo.config.errors import ConfigError
from bapo.demo import MAX_RESPONSE_TOKENS
from bapo.evaluate.data import DataSet, verifier_identity
from bapo.evaluate.settings import DEFAULT_MAX_TOKENS, Settings
from bapo.models import Policy, hush, load_policy
from bapo.rollout.requests import max_positions

__all__ = ["Plan", "default_directory", "fingerprint_of_weights", "load_model", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """An evaluation with everything decided."""

    settings: Settings
    max_tokens: int
    identity: dict[str, Any]
    """JSON values."""

    def chunks(self, data_sets: list[DataSet]) -> list[tuple[DataSet, slice]]:
        """What is sampled and saved together: some problems of one data set."""
        size = self.settings.chunk_problems
        return [(data, slice(i, i + size)) for data in data_sets for i in range(0, len(data.problems), size)]


def load_model(settings: Settings) -> Policy:
    """The model, quietly. `settings` have a device, a precision and threads."""
    hush()
    assert settings.threads is not None
    torch.set_num_threads(settings.threads)
    policy = load_policy(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        chat={"auto": None, "yes": True, "no": False}[settings.chat],
        system=settings.system,
        template_options=dict(settings.chat_options),
    )
    policy.model.eval()
    return policy


def make_plan(settings: Settings, policy: Policy, data_sets: list[DataSet]) -> Plan:
    """Decide the rest, and say what this evaluation is."""
    prompts = {data.name: [policy.encode(problem.prompt) for problem in data.problems] for data in data_sets}
    max_tokens = _max_tokens(settings, policy, max(len(ids) for listed in prompts.values() for ids in listed))
    fingerprints = {}
    for data in data_sets:
        digest = sha256()
        for problem, ids in zip(data.problems, prompts[data.name], strict=True):
            digest.update(json.dumps([problem.id, ids, problem.answer], sort_keys=True).encode() + b"\n")
        fingerprints[data.name] = digest.hexdigest()[:16]
    asked = asdict(settings)
    identity = {
        **{key: asked[key] for key in ("model", "data", "k", "temperature")},
        "max_tokens": max_tokens,
        **{key: value for key, value in asked.items() if key not in ("max_tokens", "chunk", *_FIRST)},
        "chunk": settings.chunk_problems,
        "stop_ids": sorted(policy.stop_ids),
        "weights": fingerprint_of_weights(policy.model),
        "fingerprints": fingerprints,
        "versions": _versions(settings) | verifier_identity(data_sets, settings),
    }
    return Plan(settings, max_tokens, json.loads(json.dumps(identity)))


def default_directory(plan: Plan) -> Path:
    """evals/MODEL-IDENTITY: the same command finds its directory again, and another evaluation gets another one."""
    path = Path(plan.settings.model)
    name = path.parent.name if path.name == "model" and path.parent.name else path.name
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".-") or "model"
    digest = sha256(json.dumps(plan.identity, sort_keys=True).encode()).hexdigest()[:8]
    return Path("evals") / f"{name}-{digest}"


def fingerprint_of_weights(model: Any) -> str:
    """A hash of every value of every parameter."""
    digest = sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


_FIRST = ("model", "data", "k", "temperature")


def _max_tokens(settings: Settings, policy: Policy, longest: int) -> int:
    """As asked for if the model has room for it; otherwise the usual, or the room there is."""
    positions = max_positions(policy.model)
    room = DEFAULT_MAX_TOKENS if positions is None else positions - longest
    if room < 1:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, and the model only {positions} positions: there is no room for "
            "a response. Leave that problem out, or use a model with a longer context."
        )
    if settings.max_tokens is None:
        return min(room, MAX_RESPONSE_TOKENS if settings.model == "demo" else DEFAULT_MAX_TOKENS)
    if positions is not None and settings.max_tokens > room:
        raise ConfigError(
            f"--max-tokens {settings.max_tokens} and prompts of up to {longest} tokens exceed the model's {positions} "
            f"positions. Set --max-tokens {room} or less."
        )
    return settings.max_tokens


def _versions(settings: Settings) -> dict[str, str]:
    versions = {
        "bapo": bapo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return versions | ({"gpu": torch.cuda.get_device_name()} if settings.device == "cuda" else {})
