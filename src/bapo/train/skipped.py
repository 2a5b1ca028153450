"""What a run does about updates that were skipped because their numbers are not finite (`learn/finite.py`).

Each one gets a line of its own kind in metrics.jsonl. After `learn.skip_limit` of them in a row the run stops: chances
are that the policy has diverged, and no later update would be taken either. The tokens of the last one are kept as
`skipped/update-000012.safetensors`, a dump that `bapo diagnose` reads.
"""

from __future__ import annotations

from typing import Any

from bapo.learn.learner import Update
from bapo.runs.write import RunDirectory


def skipped_line(update: Update, *, step: int, in_a_row: int) -> dict[str, Any]:
    """The line of metrics.jsonl for an update that was skipped."""
    assert update.skipped is not None
    line = {"kind": "skipped", "step": step, "version": update.version} | update.metrics
    return line | {"skipped/in_a_row": in_a_row, "skipped/cause": update.skipped.cause}


def stop_after(run: RunDirectory, update: Update, *, in_a_row: int, lr: float, dump: bool = True) -> None:
    """End the run, and keep the tokens of this skipped update. `dump`: they were sampled, so there is a clip to see."""
    assert update.skipped is not None
    kept = ""
    if dump:
        name = f"skipped/update-{update.version:06d}.safetensors"
        run.write_arrays(name, {key: tensor.numpy() for key, tensor in update.skipped.tokens.items()})
        kept = f"The batch of the last one is saved; look at it with `bapo diagnose {run.path / name}`. "
    raise FloatingPointError(
        f"{in_a_row} updates in a row were skipped, up to update {update.version}: {update.skipped.cause}. They "
        f"changed no weight. {kept}Lower learn.lr (now {lr:g}), or check that the model in model.path is sound."
    )
