"""What depends on model and data together: how long a response may be, and the identity of an evaluation.

`Plan.identity` is everything that determines the result. Two evaluations with the same identity give the same bytes, so
the identity names the directory, and only the same identity continues it. Weights are identified by a hash of all their
values, problems by a hash of their ids, prompt tokens and answers.
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
from bapo.models.bits import fingerprint, packed
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
        """The problems that are sampled and saved together; all of a chunk come from one data set."""
        size = self.settings.chunk_problems
        return [(data, slice(i, i + size)) for data in data_sets for i in range(0, len(data.problems), size)]


def load_model(settings: Settings) -> Policy:
    """Load the model without log output. Device, dtype and threads of `settings` must be decided."""
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
    """Decide what is left to decide, and compute the identity."""
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
    """evals/MODEL-IDENTITY, so that the same command finds its directory again and others do not use it."""
    path = Path(plan.settings.model)
    name = path.parent.name if path.name == "model" and path.parent.name else path.name
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".-") or "model"
    digest = sha256(json.dumps(plan.identity, sort_keys=True).encode()).hexdigest()[:8]
    return Path("evals") / f"{name}-{digest}"


def fingerprint_of_weights(model: Any) -> str:
    """A hash of every value of every parameter."""
    return fingerprint(packed(name, values) for name, values in sorted(model.state_dict().items()))[:16]


_FIRST = ("model", "data", "k", "temperature")


def _max_tokens(settings: Settings, policy: Policy, longest: int) -> int:
    """The length asked for, which must fit the model; by default DEFAULT_MAX_TOKENS or what fits, if that is less."""
    positions = max_positions(policy.model)
    room = DEFAULT_MAX_TOKENS if positions is None else positions - longest
    if room < 1:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, but the model has only {positions} positions, which leaves no "
            "room for a response. Leave that problem out, or use a model with a longer context."
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
