"""Updates whose numbers are not finite: how they are found, what is known of their cause, and what is kept of them.

A step with a NaN or an infinity would spoil the weights for good. So an update whose loss or gradient is not finite is
skipped: weights and moments stay as they are, bit for bit.

A skipped update counts as a version. Its draw from the buffer has happened, and the schedule of learning rates, the
batches of demonstrations, the ledger and checkpoints all count by versions; so a resumed run needs to know nothing
else. Tokens count as one update older than they are, which is the safe side of the staleness bound. It does not count
as a use of its tokens, because they moved nothing.

    CPU             log-probs are looked at before they enter the loss, which would refuse them
    accelerators    a bad log-prob makes loss and gradient norm NaN; the host reads both anyway, before the step
    ranks           all of them see the same numbers, or agree on them, and skip together

A step with finite gradients cannot make weights infinite: gradients are clipped to a norm c, so AdamW moves a weight by
at most lr (weight_decay |w| + c / eps), and `settings.py` bounds lr, lr weight_decay and c. What is saved is checked
nevertheless, because memory may fail, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bapo.learn.ranks import Ranks, columns_of_all, from_all, highest, largest
from bapo.types import TokenBatch

Predicted = tuple[Tensor, Tensor]
"""Log-probs and entropies of the response tokens of a micro-batch."""
COLUMNS = ("logprobs", "entropy", "behavior_logprobs", "advantages", "targets", "versions", "uses", "sequence_ids")
WHOLE = ("targets", "versions", "uses", "sequence_ids")
"""Columns of integers."""


class NotFinite(Exception):  # noqa: N818
    """The log-probs of an update are not finite. All ranks raise it together."""


@dataclass(frozen=True)
class Skipped:
    """An update that was not taken."""

    cause: str
    """What is known of it, as the part of a sentence."""
    tokens: dict[str, Tensor]
    """The update's tokens on all ranks, as the columns of a dump that `bapo diagnose` reads."""
    drifted: bool = False
    """Whether it was refused because sampler and learner do not mean the same policy (`anchor.py`)."""


def check_logprobs(logprobs: Tensor, ranks: Ranks) -> None:
    """Raise NotFinite on all ranks if a log-prob of one of them is not finite. Looks on CPUs only."""
    if logprobs.device.type != "cpu":
        return
    bad = not bool(torch.isfinite(logprobs.detach()).all())
    if largest(int(bad), ranks, logprobs.device):
        raise NotFinite


def logged_tokens(
    batches: Sequence[TokenBatch], predicted: Sequence[Predicted], ranks: Ranks, *, version: int
) -> dict[str, Tensor]:
    """The tokens of all micro-batches on all ranks, as the columns of a dump, on the host."""
    rows, sequences = [], 0
    for batch, (logprobs, entropy) in zip(batches, predicted, strict=True):
        given = [getattr(batch, name) for name in COLUMNS[2:-1]]
        columns = (logprobs, entropy, *given, batch.sequence_ids + sequences)
        rows.append(torch.stack([column.detach().double() for column in columns]))
        sequences += len(batch.offsets) - 1
    parts = _of_all(torch.cat(rows, dim=1), ranks)
    before = 0.0
    for part in parts:
        part[-1] += before
        before = float(part[-1].max()) + 1 if part.shape[1] else before
    named = dict(zip(COLUMNS, torch.cat(parts, dim=1).cpu(), strict=True))
    dump = {name: column.to(torch.int64 if name in WHOLE else torch.float32) for name, column in named.items()}
    return dump | {"version": torch.tensor(version), "update": torch.tensor(version + 1)}


def _of_all(mine: Tensor, ranks: Ranks) -> list[Tensor]:  # [columns, tokens] each
    if ranks is None:
        return [mine]
    widths = [int(count) for count in from_all(torch.tensor(mine.shape[1], device=mine.device), ranks)]
    return columns_of_all(mine, widths, ranks)


def cause_of(model: Any, tokens: Mapping[str, Tensor], seen: str, ranks: Ranks) -> str:
    """What is known of why an update is not finite. `seen`: what the learner saw of it."""
    bad = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if largest(len(bad), ranks, next(model.parameters()).device):
        where = f" (the first is {bad[0]})" if bad else ", on another rank"
        return f"weights of the model are not finite{where}"
    logprobs = tokens["logprobs"]
    broken = int((~torch.isfinite(logprobs)).sum())
    if broken:
        sizes = torch.stack([_mine(p).abs().max().double() for p in model.parameters() if _mine(p).numel()])
        return (
            f"{broken} of {len(logprobs)} log-probs are not finite although all weights are; the largest weight is "
            f"{float(highest(sizes, ranks)):.3g}"
        )
    ratio = float((logprobs.double() - tokens["behavior_logprobs"].double()).max().exp()) if len(logprobs) else 1.0
    return f"{seen} although all log-probs are finite; the largest ratio of a token is {ratio:.3g}"


def check_state(state: Mapping[str, Tensor], ranks: Ranks = None) -> None:
    """Refuse to save weights or moments that are not finite. Ranks must call this together, and all of them raise."""
    bad = [name for name, tensor in state.items() if tensor.is_floating_point() and not _finite(tensor)]
    device = next(iter(state.values())).device
    if largest(len(bad), ranks, device):
        where = f"{bad[0]} holds" if bad else "another rank holds"
        raise FloatingPointError(
            f"{where} a NaN or an infinity, so this state is not saved: nothing could be continued from it. Lower "
            "learn.lr, or look for a fault of the machine if no update was skipped."
        )


def _mine(tensor: Tensor) -> Tensor:
    """A tensor, or this rank's shard of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(_mine(tensor)).all())
