"""Table and figure of supervised runs: the loss on what is learned, and on what is held out.

Runs of `bapo sft` have no rewards, bounds or staleness, so they are not rows of the overview. They share its form, the
page's colours and the way seeds are joined. Every function takes all arms of a report and leaves out the others, so
that an arm keeps its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bapo.report.arms import Arm
from bapo.report.figures import Figure, curves, figure
from bapo.report.table import duration, estimate, plain, short
from bapo.runs.numbers import number
from bapo.runs.read import Run
from bapo.runs.statistics import aggregate, mean, measures, worst

COLUMNS = (
    ("setting", "Setting", "The model, or the keys in which the runs differ"),
    ("objective", "Objective", "Supervised training"),
    ("seeds", "Seeds", "Runs of this configuration"),
    ("held_out", "Held-out loss", "Nats per response token after training ± 95% interval; before it below"),
    ("perplexity", "Perplexity", "exp of that loss"),
    ("accuracy", "Next token right", "Share of held-out response tokens that were the most likely one, likewise"),
    ("loss", "Training loss", "Mean over the last tenth of updates; over the first tenth below"),
    ("max_grad_norm", "Max grad norm", "Largest gradient norm of any update"),
    ("updates", "Updates", "Optimizer steps, per run"),
    ("tokens", "Tokens", "Response tokens trained on, per run; each use counts"),
    ("seconds", "Time", "Wall-clock time of training, per run"),
)


def sft_table(arms: Sequence[Arm]) -> dict[str, Any]:
    """One row per supervised arm, in the form of the overview."""
    return {
        "columns": [{"key": key, "label": label, "help": explanation} for key, label, explanation in COLUMNS],
        "rows": [{"arm": index, "cells": _cells(arm)} for index, arm in enumerate(arms) if arm.sft],
    }


def sft_figures(arms: Sequence[Arm]) -> list[Figure]:
    """Losses over updates; none without a supervised run."""
    chosen = [index for index, arm in enumerate(arms) if arm.sft]
    if not chosen:
        return []
    held_out = curves(arms, "held_out/loss", "Held-out loss, nats per token", lines="evals", only=chosen)
    return [
        figure(
            "sft",
            ("Supervised training", None),
            "Mean negative log-prob of response tokens: of each update's own before it is taken, and of held-out "
            "demonstrations. Where the former falls and the latter rises, the model learns by heart.",
            [
                curves(arms, "imitation/loss", "Loss of the update, nats per token", only=chosen),
                held_out,
                curves(arms, "held_out/accuracy", "Next held-out token right, share", lines="evals", only=chosen),
                curves(arms, "grad_norm", "Gradient norm", only=chosen),
            ],
            note=None if held_out["series"] else "Nothing was held out, so there is no held-out loss.",
        )
    ]


def _cells(arm: Arm) -> dict[str, dict[str, Any]]:
    facts = [_facts(run) for run in arm.runs]

    def joined(key: str) -> list[float]:
        return [fact[key] for fact in facts if key in fact]

    def cell(key: str, *, before: str | None = None, digits: int = 3) -> dict[str, Any]:
        values = joined(key)
        below = f"from {estimate(joined(before), digits)}" if before and joined(before) else ""
        return {"value": number(aggregate(values)[0]), "text": estimate(values, digits), "below": below}

    unfinished = sum(not run.summary for run in arm.runs)
    seeds = f"seed {', '.join(str(run.config['seed']) for run in arm.runs)}"
    return {
        "setting": {"value": arm.setting, "text": arm.setting, "below": ""},
        "objective": {"value": arm.objective, "text": arm.objective, "below": ""},
        "seeds": {
            "value": len(arm.runs),
            "text": str(len(arm.runs)),
            "below": f"{seeds}; {unfinished} unfinished" if unfinished else seeds,
        },
        "held_out": cell("held_out", before="held_out_before"),
        "perplexity": cell("perplexity", before="perplexity_before"),
        "accuracy": cell("accuracy", before="accuracy_before"),
        "loss": cell("loss_last", before="loss_first"),
        "max_grad_norm": cell("max_grad_norm", digits=2),
        "updates": plain(joined("updates"), short),
        "tokens": plain(joined("tokens"), short),
        "seconds": plain(joined("seconds"), duration),
    }


def _facts(run: Run) -> dict[str, float]:
    """What the table says of one run; an unfinished one has no loss after training."""
    facts = measures(run) if run.summary else {}
    if norms := run.series("grad_norm"):
        facts["max_grad_norm"] = worst(norms)
    if losses := run.series("imitation/loss"):
        tenth = max(1, len(losses) // 10)
        facts |= {"loss_first": mean(losses[:tenth]), "loss_last": mean(losses[-tenth:])}
    facts |= {"updates": float(len(run.updates)), "tokens": sum(run.series("tokens"))}
    facts["seconds"] = sum(line["seconds"] for line in run.timing if isinstance(line.get("seconds"), int | float))
    return facts
