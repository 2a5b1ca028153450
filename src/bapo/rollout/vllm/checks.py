"""What vLLM's engine refuses beyond what every engine refuses, and how it verifies that weights have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from bapo.rollout.engine import Request

_LOWEST, _HIGHEST = 0.01, 2.0


def check_temperature(temperature: float) -> None:
    """vLLM would raise a lower temperature to its own lowest one, with only a warning."""
    if temperature != 0 and not _LOWEST <= temperature <= _HIGHEST:
        raise ValueError(
            f"sampling.temperature={temperature} is not one that vLLM samples at. Set it to 0 (greedy) or to a number "
            f"between {_LOWEST} and {_HIGHEST}, or sample with the in-process engine."
        )


def check_tokens(requests: Sequence[Request], vocabulary: int) -> None:
    """vLLM itself does not refuse a token that the model does not have: its worker fails, and EngineCore with it."""
    for index, request in enumerate(requests):
        if not (min(request.context) >= 0 and max(request.context) < vocabulary):
            wrong = next(token for token in request.context if not 0 <= token < vocabulary)
            raise ValueError(
                f"request {index} (seed {request.seed}) has the token {wrong} in its context, but the model's "
                f"vocabulary has {vocabulary} tokens. Use the model's own tokenizer."
            )


def fitting(
    weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights in ordinary memory, each checked against the names and shapes that the model has."""
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(
                f"the engine's model has no weight {name!r}, so vLLM cannot load it. The learner trains another model, "
                "or it has adapters: merge them into the weights before they are sent."
            )
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"the weight {name!r} has shape {tuple(tensor.shape)}, but the engine's model has {expected[name]}. "
                "Start the engine from the learner's model."
            )
        yield name, tensor.detach().cpu()


def check_arrived(reports: Sequence[dict[str, Any]], sent: dict[str, str], expected: set[str]) -> None:
    """Compare what the workers report with what was sent, and what was sent with what the model has."""
    wrong: dict[str, set[str]] = {"not sent": expected - sent.keys()}
    for report in reports:
        arrived = report["fingerprints"]
        found = {
            "sent, but not arrived in a worker": sent.keys() - arrived.keys(),
            "arrived in a worker with other bits": {n for n in sent if arrived.get(n, sent[n]) != sent[n]},
            "in vLLM's model, but not loaded": set(report["not_loaded"]),
        }
        wrong = {what: wrong.get(what, set()) | found.get(what, set()) for what in (*wrong, *found)}
    problems = [f"{what}: {_some(names)}" for what, names in wrong.items() if names]
    if problems:
        raise ValueError(
            f"vLLM does not have all weights as the learner has them ({'; '.join(problems)}), so it would sample from "
            "a policy that never existed. The engine samples nothing until all weights have been loaded again."
        )


def _some(names: set[str]) -> str:
    """`model.norm.weight`, or `model.norm.weight and 3 more`."""
    return f"{min(names)}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
