"""The overview table: one row per arm of reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bapo.report import cells
from bapo.report.arms import Arm, samples_per_problem
from bapo.report.cells import Cell, Facts, Table
from bapo.runs.numbers import number
from bapo.runs.read import STOP_REASONS, Run
from bapo.runs.statistics import mean, measures, sampled_responses, stop_shares, update_means, worst


def table(arms: Sequence[Arm]) -> Table:
    """The overview of these arms."""
    k = samples_per_problem(arms)
    columns = [
        (
            "setting",
            "Setting",
            "Where old data comes from: how often responses are reused, replay, partial rollout; or the keys in which "
            "the runs differ.",
        ),
        ("objective", "Objective", "The loss that was trained with."),
        cells.SEEDS,
        (
            "avg",
            f"avg@{k}",
            f"How often an answer to a held-out problem is right after training: the mean reward over {k} samples of "
            "each. Small print: before training.",
        ),
        (
            "pass",
            f"pass@{k}",
            f"How often at least one of {k} samples solves a held-out problem after training. Small print: "
            "before training.",
        ),
        (
            "entropy",
            "Entropy",
            "How undecided the model is about its next token on held-out problems after training, in nats; 0 is "
            "certain. Small print: before training.",
        ),
        cells.GRAD_NORM,
        (
            "staleness",
            "Staleness",
            "How old the oldest token was when it was trained on, in updates since it was sampled. Small print: the "
            "oldest age that the run allows.",
        ),
        (
            "share",
            "Positive share",
            "How much of the learning signal that the clip lets through comes from tokens with a positive advantage; "
            "the mean over all updates. Small print: over the first and over the last tenth of updates.",
        ),
        (
            "stop",
            "Search ended",
            "Where BAPO's search for clip bounds ended most often, as a share of updates. Small print: where else. "
            "Other objectives do not search.",
        ),
        (
            "responses",
            "Responses",
            "Responses sampled for training, per run, whether or not filtering kept them. Small print: response tokens "
            "trained on; a token counts each time it is used.",
        ),
        cells.SECONDS,
    ]
    return cells.make_table(columns, [(index, arm, _cells(arm)) for index, arm in enumerate(arms)])


def _cells(arm: Arm) -> dict[str, Cell]:
    facts = Facts(arm, [_facts(run) for run in arm.runs])
    shared = facts.cells()
    tokens = shared.pop("tokens")
    return {
        **shared,
        "avg": facts.estimate("avg", before="avg_before"),
        "pass": facts.estimate("pass", before="pass_before"),
        "entropy": facts.estimate("entropy", before="entropy_before"),
        "staleness": _staleness(facts),
        "share": facts.estimate("share") | {"below": _share_ends(facts)},
        "stop": _stop(facts),
        "responses": facts.mean("responses", cells.count) | {"below": f"{tokens['text']} tokens"},
    }


def _staleness(facts: Facts) -> Cell:
    ages = facts.of("staleness_max")
    oldest = worst(ages) if ages else math.nan
    bound = facts.arm.config["offpolicy"]["max_staleness"]
    return cells.cell(number(oldest), f"{oldest:.0f}" if ages else "–", f"bound {bound}")


def _share_ends(facts: Facts) -> str:
    """The mean over seeds at the start and at the end of training."""
    first, last = (facts.mean(f"share_{end}", "{:.3f}".format)["text"] for end in ("first", "last"))
    return f"{first} → {last}" if facts.of("share_last") else ""


def _stop(facts: Facts) -> Cell:
    """The most frequent reason; the others below."""
    shares = {name: mean(facts.of(f"stop_{name}")) for name in STOP_REASONS if facts.of(f"stop_{name}")}
    reasons = sorted(((share, name) for name, share in shares.items() if share > 0), reverse=True)
    if not reasons:
        return cells.cell(None, "–")
    first, *others = [f"{name.replace('_', ' ')} {share:.0%}" for share, name in reasons]
    return cells.cell(reasons[0][0], first, ", ".join(others))


def _facts(run: Run) -> dict[str, float]:
    """What the table says about one run. An unfinished run has no score after training."""
    facts = measures(run) if run.summary else {}
    if not run.summary and run.evals and run.evals[0]["step"] == 0:
        first = run.evals[0]
        before = {"avg_before": "eval/avg", "pass_before": "eval/pass", "entropy_before": "eval/entropy"}
        facts |= {name: float(first[key]) for name, key in before.items() if isinstance(first.get(key), int | float)}
    if ages := run.series("staleness_max"):
        facts["staleness_max"] = worst(ages)
    if responses := sampled_responses(run):
        facts["responses"] = float(responses[-1])
    return facts | cells.common_facts(run) | cells.ends(run, "share", "share") | update_means(run) | stop_shares(run)
