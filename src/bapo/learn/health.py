"""Updates that must not be taken, or that give reason to doubt: how they are found, and what is known of their cause.

Not finite. A step with a NaN or an infinity would spoil the weights for good. So an update whose loss or gradient is
not finite is skipped: weights and moments stay as they are, bit for bit.

    CPU             log-probs are looked at before they enter the loss, which would refuse them
    accelerators    a bad log-prob makes loss and gradient norm NaN; the host reads both anyway, before the step
    ranks           all of them see the same numbers, or agree on them, and skip together

A skipped update counts as a version. Its draw from the buffer has happened, and the schedule of learning rates, the
batches of demonstrations, the ledger and checkpoints all count by versions; so a resumed run needs to know nothing
else. Tokens count as one update older than they are, which is the safe side of the staleness bound. It does not count
as a use of its tokens, because they moved nothing.

A step with finite gradients cannot make weights infinite: gradients are clipped to a norm c, so AdamW moves a weight by
at most lr (weight_decay |w| + c / eps), and `config/base.py` bounds lr, lr weight_decay and c. What is saved is
checked nevertheless, because memory may fail, too.

Sampler and learner apart. On fresh tokens, the learner's log-probs must be those that the sampler recorded. A token is
fresh in an update if its version is the learner's: no update has been taken since it was sampled. The pass of the
update computes its log-prob anyway, so the comparison costs no pass. Every update with fresh tokens logs how far the
two are apart (`core/anchor.py` defines the gap). What follows depends on the mean over its fresh tokens:

    at most what rounding explains      nothing, unless the gaps have a signature that rounding never has
    above it                            the run says so, once, with the likely cause
    above `learn.anchor_limit`          the update is not taken and the run ends: its ratios mean nothing

Responses that go on with keys and values of older weights (`offpolicy.partial_cache = "keep"`) were not sampled from
any one version, so only those count that this version sampled from their first token on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bapo.core.anchor import FEWEST, MANY, SHARP, Pairs, likely_cause, positions_of
from bapo.learn.ranks import Ranks, columns_of_all, highest, largest
from bapo.types import Metrics, TokenBatch

Predicted = tuple[Tensor, Tensor]
"""Log-probs and entropies of the response tokens of a micro-batch."""
GIVEN = ("behavior_logprobs", "advantages", "targets", "versions", "uses")
COLUMNS = ("logprobs", "entropy", *GIVEN, "log_kept", "sequence_ids")
WHOLE = ("targets", "versions", "uses", "sequence_ids")
"""Columns of integers."""
EXPLAINED = {
    **{"torch.float64": 1e-3, "torch.float32": 1e-3, "torch.float16": 0.02, "torch.bfloat16": 0.1},
    **{"fp8": 0.5, "fp8-weights": 0.5},
}
"""The mean gap that rounding explains, in nats.

Measured between engines and learner: float32 up to 9e-5 at a single token; bfloat16 in the mean up to 0.09 for 1.5B
large random weights, and 0.005 to 0.04 for trained ones. float16 has three more bits. e4m3 has four significant bits
instead of eight, so each of its roundings is 16 times as large; but bfloat16 rounds more often, and on both sides. The
gaps of trained models are 4 to 5 times those of bfloat16 (0.02 and 0.23), and so is the limit."""
LOOK = 0.1
"""From this part of what rounding explains on, gaps are looked at for a signature that rounding never has."""


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
    """Whether it was refused because sampler and learner do not mean the same policy."""


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
        given = [getattr(batch, name) for name in GIVEN]
        columns = (logprobs, entropy, *given, batch.log_masses, batch.sequence_ids + sequences)
        rows.append(torch.stack([column.detach().double() for column in columns]))
        sequences += len(batch.offsets) - 1
    parts = columns_of_all(torch.cat(rows, dim=1), ranks)
    before = 0.0
    for part in parts:
        part[-1] += before
        before = float(part[-1].max()) + 1 if part.shape[1] else before
    named = dict(zip(COLUMNS, torch.cat(parts, dim=1).cpu(), strict=True))
    if not named["log_kept"].any():
        del named["log_kept"]
    dump = {name: column.to(torch.int64 if name in WHOLE else torch.float32) for name, column in named.items()}
    return dump | {"version": torch.tensor(version), "update": torch.tensor(version + 1)}


def cause_of(model: Any, tokens: Mapping[str, Tensor], seen: str, ranks: Ranks) -> str:
    """What is known of why an update is not finite. `seen`: what the learner saw of it."""
    bad = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if largest(len(bad), ranks, next(model.parameters()).device):
        where = f" (the first is {bad[0]})" if bad else ", on another rank"
        return f"weights of the model are not finite{where}"
    logprobs = tokens["logprobs"]
    broken = int((~torch.isfinite(logprobs)).sum())
    if broken:
        sizes = torch.stack([mine(p).abs().max().double() for p in model.parameters() if mine(p).numel()])
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


def mine(tensor: Tensor) -> Tensor:
    """A tensor, or this rank's shard of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(mine(tensor)).all())


@dataclass(frozen=True)
class Drift:
    """Sampler and learner do not mean the same policy."""

    words: str
    """How far they are apart, and the likely cause, as sentences."""
    refused: bool
    """Whether the update must not be taken."""
    tokens: dict[str, Tensor]
    """The update's tokens on all ranks, as the columns of a dump that `bapo diagnose` reads."""


def fresh_tokens(batches: Sequence[TokenBatch], *, version: int, kept_caches: bool) -> Tensor:  # [tokens] bool
    """Which tokens of these micro-batches the learner's present weights sampled."""
    return torch.cat([_fresh(b.versions, b.sequence_ids, version=version, kept_caches=kept_caches) for b in batches])


def _fresh(versions: Tensor, sequence_ids: Tensor, *, version: int, kept_caches: bool) -> Tensor:
    fresh = versions == version
    if kept_caches and len(versions):
        oldest = torch.full_like(versions, version).scatter_reduce(0, sequence_ids, versions, "amin")
        fresh &= oldest[sequence_ids] == version
    return fresh


def anchor_metrics(sampler_logprobs: Tensor, logprobs: Tensor, fresh: Tensor) -> dict[str, Tensor]:
    """0-d metrics over the fresh tokens. Without any they are NaN, and are left out of what is logged.

    The learner's log-probs are of the whole vocabulary, and so must the sampler's be, whatever it left out.
    """
    gaps = torch.where(fresh, sampler_logprobs.double() - logprobs.double(), 0.0)
    count = fresh.sum()
    return {
        "anchor_tokens": count,
        "anchor_gap": gaps.abs().sum() / count,
        "anchor_gap_max": gaps.abs().max(),
        "anchor_bias": gaps.sum() / count,
    }


def drift(
    logged: Metrics,
    all_tokens: Callable[[], dict[str, Tensor]],  # of the update, as `logged_tokens` gives them
    *,
    version: int,
    precision: str,
    kept_caches: bool,
    limit: float,
    before: float | None,
) -> Drift | None:
    """What the fresh tokens of an update say about sampler and learner. `before`: the gap of the first comparison."""
    noise, gap = EXPLAINED[precision], cast(float, logged.get("anchor_gap", 0.0))
    if cast(float, logged.get("anchor_tokens", 0)) < FEWEST or gap <= min(LOOK * noise, limit):
        return None
    tokens = all_tokens()
    fresh = _fresh(tokens["versions"], tokens["sequence_ids"], version=version, kept_caches=kept_caches)
    sampler_logprobs = tokens["behavior_logprobs"] + tokens.get("log_kept", torch.zeros(()))
    pairs = Pairs(
        sampler_logprobs[fresh],
        tokens["logprobs"][fresh],
        tokens["entropy"][fresh],
        positions_of(tokens["sequence_ids"])[fresh],
        tokens["targets"][fresh],
    )
    cause = likely_cause(pairs, noise=noise, before=before)
    if gap <= min(noise, limit) and (cause.name not in SHARP or len(pairs.gaps) < MANY):
        return None
    words = (
        f"on {len(pairs.gaps)} fresh tokens, the sampler's log-probs and the learner's are {gap:.2g} nats apart in the "
        f"mean ({logged['anchor_gap_max']:.2g} at most, {logged['anchor_bias']:+.2g} with signs), where rounding in "
        f"{precision.removeprefix('torch.')} explains {noise:g}. Likely cause: {cause.name}; {cause.words}"
    )
    return Drift(words, gap > limit, tokens)
