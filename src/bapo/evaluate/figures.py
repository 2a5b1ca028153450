"""From rows of responses to figures: per problem, per data set and overall. No model is involved.

`bapo.evaluate.estimates` defines avg@k, pass@k, maj@k and their intervals. `overall` gives every problem the same
weight, so a large data set outweighs a small one; `mean_over_data_sets` gives every data set the same weight. Both lack
maj@k if a data set lacks it: a problem whose responses cannot vote is not a problem whose responses vote wrongly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from bapo.evaluate import SOLVED, Estimate, avg_at_k, maj_at_k, mean, pass_at_k

__all__ = ["figures", "powers_up_to", "problem_figures", "results"]

Row = dict[str, Any]


def results(rows: Sequence[Row], identity: dict[str, Any]) -> dict[str, Any]:
    """The contents of results.json. They depend on configuration and responses only, not on times or paths."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    by_name = {name: figures([row for row in rows if row["data"] == name]) for name in names}
    overall = figures(rows)
    if any(found["maj"] is None for found in by_name.values()):
        overall["maj"] = None
    return {
        **identity,
        "data_sets": by_name,
        "overall": overall,
        "mean_over_data_sets": {key: _mean_value(by_name, key) for key in ("avg", "pass_k", "maj")},
        "problem_table": [problem_figures(row) for row in rows],
    }


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of some problems, as JSON values. Lengths count the stop token; a mean over nothing is null."""
    responses = [response for row in rows for response in row["responses"]]
    rewards = [[_reward(response) for response in row["responses"]] for row in rows]
    answers = [[response["answer"] for response in row["responses"]] for row in rows]
    k = min(map(len, rewards))
    truncated = [[float(response["status"] == "truncated") for response in row["responses"]] for row in rows]
    voted = any(answer is not None for row in answers for answer in row)
    right = [response["tokens"] for response in responses if _reward(response) > SOLVED]
    wrong = [response["tokens"] for response in responses if not _reward(response) > SOLVED]
    causes = Counter(response["failure"] for response in responses if response["reward"] is None)
    return {
        "problems": len(rows),
        "responses": len(responses),
        "avg": _estimate(avg_at_k(rewards)),
        "pass": {str(j): _estimate(pass_at_k(rewards, j)) for j in powers_up_to(k)},
        "pass_k": _estimate(pass_at_k(rewards, k)),
        "maj": _estimate(maj_at_k(rewards, answers)) if voted else None,
        "truncated": _estimate(avg_at_k(truncated)),
        "length": mean(response["tokens"] for response in responses),
        "length_correct": mean(right),
        "length_wrong": mean(wrong),
        "entropy": _entropy(responses),
        "answered": fmean(answer is not None for row in answers for answer in row) if voted else None,
        "failures": causes.total(),
        "failure_causes": dict(causes.most_common()),
    }


def problem_figures(row: Row) -> dict[str, Any]:
    """One line of the per-problem table."""
    responses = row["responses"]
    rewards = [_reward(response) for response in responses]
    answers = [response["answer"] for response in responses]
    votes = Counter(answer for answer in answers if answer is not None)
    return {
        "data": row["data"],
        "id": row["id"],
        "source": row["source"],
        "avg": fmean(rewards),
        "solved": sum(reward > SOLVED for reward in rewards),
        "verdicts": "".join("×" if r["reward"] is None else "■" if _reward(r) > SOLVED else "□" for r in responses),
        "maj": maj_at_k([rewards], [answers]).value if votes else None,
        "most_frequent": votes.most_common(1)[0][0] if votes else None,
        "length": fmean(response["tokens"] for response in responses),
        "truncated": sum(response["status"] == "truncated" for response in responses),
        "failures": sum(response["reward"] is None for response in responses),
    }


def powers_up_to(k: int) -> list[int]:
    """1, 2, 4, … below k, and k."""
    return [*(2**i for i in range(k.bit_length()) if 2**i < k), k]


def _reward(response: dict[str, Any]) -> float:
    """0 if the verifier failed, because nothing shows that the problem is solved."""
    return float(response["reward"] or 0.0)


def _entropy(responses: Sequence[dict[str, Any]]) -> float | None:
    """Mean over tokens, in nats."""
    known = [(r["entropy"], r["tokens"]) for r in responses if r["entropy"] is not None]
    tokens = sum(count for _, count in known)
    return sum(value * count for value, count in known) / tokens if tokens else None


def _estimate(estimate: Estimate) -> dict[str, float]:
    return asdict(estimate)


def _mean_value(by_name: dict[str, dict[str, Any]], key: str) -> float | None:
    """None if one of them has no value."""
    estimates = [found[key] for found in by_name.values()]
    return None if None in estimates else fmean(estimate["value"] for estimate in estimates)
