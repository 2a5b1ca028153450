"""Table and figure of supervised runs: the loss on the demonstrations they learn from, and on those held out.

Runs of `bapo sft` have no rewards, bounds or staleness, so they are not rows of the overview. Their table has the same
form, and their figure uses the same colours and averages seeds in the same way. Every function here takes all arms of
a report and leaves out the others, so that an arm keeps its number.
"""

from __future__ import annotations

from collections.abc import Sequence

from bapo.report import cells
from bapo.report.arms import Arm
from bapo.report.cells import Cell, Facts, Table
from bapo.report.panels import Figure, curves, figure
from bapo.runs.read import Run
from bapo.runs.statistics import measures

COLUMNS = (
    ("setting", "Setting", "The model, or the keys in which the runs differ."),
    ("objective", "Objective", "sft: supervised training on demonstrations."),
    cells.SEEDS,
    (
        "held_out",
        "Held-out loss",
        "How unexpected held-out responses are to the model after training, in nats per token; lower is better. "
        "Small print: before training.",
    ),
    (
        "perplexity",
        "Perplexity",
        "exp of the held-out loss: among how many equally likely tokens the model chooses, so to speak. Small "
        "print: before training.",
    ),
    (
        "accuracy",
        "Next token right",
        "How often the model's most likely token is the one in the held-out response. Small print: before training.",
    ),
    ("loss", "Training loss", "Mean over the last tenth of updates. Small print: over the first tenth."),
    cells.GRAD_NORM,
    ("updates", "Updates", "Optimizer steps, per run."),
    cells.TOKENS,
    cells.SECONDS,
)


def sft_table(arms: Sequence[Arm]) -> Table:
    """One row per supervised arm."""
    return cells.make_table(COLUMNS, [(index, arm, _cells(arm)) for index, arm in enumerate(arms) if arm.sft])


def sft_figures(arms: Sequence[Arm]) -> list[Figure]:
    """Losses over updates; no figure without a supervised run."""
    chosen = [index for index, arm in enumerate(arms) if arm.sft]
    if not chosen:
        return []
    held_out = curves(arms, "held_out/loss", "Held-out loss, nats per token", lines="evals", only=chosen)
    return [
        figure(
            "sft",
            ("Supervised training", None),
            "Mean negative log-prob of response tokens: those of each update, just before the update, and those of "
            "held-out demonstrations. If the first falls while the second rises, the model is learning by heart.",
            [
                curves(arms, "imitation/loss", "Training loss, nats per token", only=chosen),
                held_out,
                curves(arms, "held_out/accuracy", "Held-out tokens predicted right, share", lines="evals", only=chosen),
                curves(arms, "grad_norm", "Gradient norm before clipping", only=chosen),
            ],
            note=None if held_out["series"] else "Nothing was held out, so there is no held-out loss.",
        )
    ]


def _cells(arm: Arm) -> dict[str, Cell]:
    facts = Facts(arm, [_facts(run) for run in arm.runs])
    return {
        **facts.cells(),
        "held_out": facts.estimate("held_out", before="held_out_before"),
        "perplexity": facts.estimate("perplexity", before="perplexity_before"),
        "accuracy": facts.estimate("accuracy", before="accuracy_before"),
        "loss": facts.estimate("loss_last", before="loss_first"),
        "updates": facts.mean("updates", cells.count),
    }


def _facts(run: Run) -> dict[str, float]:
    """What the table says about one run. An unfinished run has no loss after training."""
    facts = measures(run) if run.summary else {}
    return (
        facts
        | cells.common_facts(run)
        | cells.ends(run, "imitation/loss", "loss")
        | {"updates": float(len(run.updates))}
    )
