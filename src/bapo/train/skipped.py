"""What a run does about updates that were skipped, and about a sampler that has drifted away from the learner.

Each skipped update gets a line of its own kind in metrics.jsonl. An update is skipped for one of two reasons:

    its numbers are not finite           the run stops after `learn.skip_limit` of them in a row: chances are that the
    (`learn/health.py`)                  policy has diverged, and no later update would be taken either
    sampler and learner have drifted     the run stops at once: every ratio is wrong, and nothing would mend it
    apart (`learn/health.py`)

The tokens of the last one are kept as `skipped/update-000012.safetensors`, a dump that `bapo diagnose` reads.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, cast

from bapo.config.errors import DriftedApart
from bapo.learn.learner import Update
from bapo.runs.write import RunDirectory

GIVEN = ("logprobs", "entropy", "targets", "sequence_ids", "update")
"""What is known of tokens that no policy sampled."""


def ends_run(update: Update, *, in_a_row: int, limit: int) -> bool:
    """Whether no update may follow this one. `in_a_row`: skipped updates in a row, this one included."""
    return update.skipped is not None and (update.skipped.drifted or in_a_row >= limit)


def skipped_line(update: Update, *, step: int, in_a_row: int) -> dict[str, Any]:
    """The line of metrics.jsonl for an update that was skipped."""
    assert update.skipped is not None
    line = {"kind": "skipped", "step": step, "version": update.version} | update.metrics
    return line | {"skipped/in_a_row": in_a_row, "skipped/cause": update.skipped.cause}


def stop_after(run: RunDirectory, update: Update, *, in_a_row: int, lr: float, sampled: bool = True) -> NoReturn:
    """End the run, and keep the tokens of this skipped update. `sampled`: a policy did, so there is a clip to see."""
    assert update.skipped is not None
    name, tokens = f"skipped/update-{update.version:06d}.safetensors", update.skipped.tokens
    run.write_arrays(name, {key: tensor.numpy() for key, tensor in tokens.items() if sampled or key in GIVEN})
    look = f"look at it with `bapo diagnose {run.path / name}`" if sampled else f"see logprobs in {run.path / name}"
    if update.skipped.drifted:
        raise DriftedApart(
            f"update {update.version} was not taken, because its ratios would mean nothing: {update.skipped.cause}\n"
            f"The batch is saved; {look}. The gap may be learn.anchor_limit at most. If you know why it is larger and "
            f"want to go on all the same: `bapo resume {run.path} --learn.anchor_limit {_above(update):g}`."
        )
    raise FloatingPointError(
        f"{in_a_row} updates in a row were skipped, up to update {update.version}: {update.skipped.cause}. They "
        f"changed no weight. The batch of the last one is saved; {look}. Lower learn.lr (now {lr:g}), or check "
        "that the model in model.path is sound."
    )


def _above(update: Update) -> float:
    """A limit that would have let this update pass, with some room."""
    return math.ceil(20 * cast(float, update.metrics["anchor_gap"]) + 1) / 10
