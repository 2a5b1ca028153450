"""Whether an engine samples from the policy that it was given: a probe after every transfer of weights.

The learner publishes, with each version of its weights, the log-probs of all next tokens after a few fixed contexts.
The engine samples tokens after the same contexts, in its ordinary way, and says how likely each was:

    gap(context, token) = | log-prob that the engine gives  -  the table's value at (context, token) |

Two programs that compute the same policy differ by rounding. Wrong weights differ by more, whatever the reason is: a
tensor that was skipped, a head that stayed as it was, keys and values of an older version. The probe needs only
`submit` and `collect`, so it serves every engine, and it sees what any response would be sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo.rollout.engine import Engine, Request, Sampling, generate


class WrongWeights(RuntimeError):  # noqa: N818
    """The engine does not sample from the policy that it was given."""


@dataclass(frozen=True)
class Probed:
    """How far the engine's log-probs were from those of the table."""

    gap_max: float
    gap_mean: float
    tokens: int
    """How many tokens were compared."""


def probe(
    engine: Engine,
    contexts: Sequence[Sequence[int]],
    table: Tensor,  # [contexts, vocabulary] log-probs at temperature 1
    *,
    temperature: float = 1.0,
    draws: int = 4,
    tolerance: float,
    mean_tolerance: float = math.inf,
) -> Probed:
    """Sample `draws` tokens after each context and compare their log-probs with the table's.

    The table holds log-probs at temperature 1. The tempered ones follow from them: log_softmax(table / temperature).
    `tolerance` is for the largest gap, `mean_tolerance` for the mean: in 16 bits single tokens may be far off.
    """
    if len(table) != len(contexts) or not contexts or draws < 1 or not temperature > 0:
        raise ValueError(
            f"a probe needs one row of the table per context, a positive temperature and at least one draw, but there "
            f"are {len(table)} rows, {len(contexts)} contexts, temperature {temperature} and {draws} draws."
        )
    expected = torch.log_softmax(table.double() / temperature, dim=-1)
    requests = [
        Request(list(context), position=0, seed=draw, max_new_tokens=1) for context in contexts for draw in range(draws)
    ]
    segments = generate(engine, requests, Sampling(temperature=temperature))
    tokens = torch.tensor([segment.tokens[0] for segment in segments])
    logprobs = torch.tensor([segment.logprobs[0] for segment in segments], dtype=torch.float64)
    rows = torch.arange(len(contexts)).repeat_interleave(draws)
    gaps = (logprobs - expected.cpu()[rows, tokens]).abs()
    found = Probed(gap_max=float(gaps.max()), gap_mean=float(gaps.mean()), tokens=len(gaps))
    if not (found.gap_max <= tolerance and found.gap_mean <= mean_tolerance):
        worst = int(gaps.nan_to_num(nan=torch.inf).argmax())
        raise WrongWeights(
            f"{type(engine).__name__} with weights of version {engine.version} does not sample from the policy of that "
            f"version: after context {int(rows[worst])} it gave token {int(tokens[worst])} the log-prob "
            f"{float(logprobs[worst]):.4f}, where the learner has {float(expected[rows[worst], tokens[worst]]):.4f}. "
            f"The gaps of {found.tokens} tokens are {found.gap_mean:.2g} in the mean and {found.gap_max:.2g} at most; "
            f"{mean_tolerance:.2g} and {tolerance:.2g} are allowed for rounding. A weight is wrong or stale. Load the "
            "weights again; if the gap stays, start the engine again; if it stays then, the engine computes this model "
            "differently, and another dtype or engine is needed."
        )
    return found
