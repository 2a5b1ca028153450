"""How often each token was trained on before its update: as the dump says, or from responses that it shows twice.

A response that is trained on again has the behaviour log-probs of the first time, bit for bit. The converse holds if
chance cannot produce the same response twice. A second sample is the same response with the probability of the response
itself, exp(sum of its behaviour log-probs), so one that was improbable enough, and whose log-probs take several values,
can be recognised. Short or certain responses cannot: their uses stay unknown.

    a later use    is as good as certain: an earlier update of the dump trained on the same response
    a first use    is the first in this dump: updates that were not logged, or lie before it, do not show

If no response appears twice, that proves something only if the behaviour log-probs are the sampler's own, which no
trainer recomputes from update to update, and if the learner's are from the updates themselves.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from bapo.diagnose.dump_files import Array
from bapo.diagnose.dumps import NAMES, Dump, LoggedUpdate

UNKNOWN = -1
"""The uses of a token whose response cannot be recognised."""
SURPRISE = 14.0
"""Least surprise of a response in nats: another sample is the same with a probability of at most one in a million."""
VALUES = 8
"""Least number of different log-probs in it, so that coarse ones do not make different responses look alike."""
MOST_TOKENS = 0.5
"""Uses are inferred only if at least this share of all tokens is in responses that can be recognised."""

Source = Literal["logged", "inferred", "unknown"]


class Uses(NamedTuple):
    """Where the uses of a dump come from."""

    source: Source
    words: str = ""
    """How they were inferred, or why they are unknown."""


class Seen(NamedTuple):
    """What the responses of a dump say about their uses."""

    before: list[Array]
    """One array [tokens] per update: in how many earlier updates a token's response appears, or UNKNOWN."""
    again: int
    """Responses that appear in an earlier update."""
    repeated: int
    """Responses that appear in their own update, too."""


def with_uses(dump: Dump) -> tuple[Dump, Uses]:
    """The dump with `uses` in every update, or in none; and where they come from."""
    updates, seen = dump.updates, recognise(dump.updates)
    if all(update.uses is not None for update in updates):
        return replace(dump, notes=[*dump.notes, *_contradictions(updates, seen)]), Uses("logged")
    doubt = _doubt(dump, seen)
    if doubt:
        return replace(dump, updates=[replace(update, uses=None) for update in updates]), Uses("unknown", doubt)
    words = _how(updates, seen)
    inferred = [replace(update, uses=uses) for update, uses in zip(updates, seen.before, strict=True)]
    return replace(dump, updates=inferred, notes=[*dump.notes, words]), Uses("inferred", words)


def recognise(updates: Sequence[LoggedUpdate]) -> Seen:
    """In how many earlier updates each response appears. Within one update, copies of a response count once."""
    count: Counter[bytes] = Counter()
    before, again, repeated = [], 0, 0
    for update in updates:
        names = _fingerprints(update)
        uses = [UNKNOWN if name is None else count[name] for name in names]
        known = [name for name in names if name is not None]
        again += sum(one > 0 for one in uses)
        repeated += len(known) - len(set(known))
        count.update(set(known))
        if update.sequence_ids is None:
            before.append(np.full(len(update.logprobs), UNKNOWN))
        else:
            before.append(np.asarray(uses, dtype=np.int64)[update.sequence_ids])
    return Seen(before, again, repeated)


def _fingerprints(update: LoggedUpdate) -> list[bytes | None]:
    """A digest of the behaviour log-probs of each response; None if chance could produce them twice."""
    if not update.sequences:
        return []
    order = np.argsort(update.sequence_ids, kind="stable")  # type: ignore[arg-type]
    ends = np.cumsum(np.bincount(update.sequence_ids))  # type: ignore[arg-type]
    responses = np.split(update.behavior_logprobs[order].astype(np.float64), ends[:-1])
    return [hashlib.sha256(values.tobytes()).digest() if _improbable(values) else None for values in responses]


def _improbable(values: Array) -> bool:
    return bool(-values.sum() >= SURPRISE) and len(np.unique(values)) >= VALUES


def _doubt(dump: Dump, seen: Seen) -> str:
    """Why uses cannot be inferred; empty if they can."""
    if len(dump.updates) == 1:
        return "there is only one update"
    if any(update.sequence_ids is None for update in dump.updates):
        return "it does not say which response a token belongs to"
    recognisable = float((np.concatenate(seen.before) != UNKNOWN).mean())
    if recognisable < MOST_TOKENS:
        return (
            f"only {recognisable:.0%} of the tokens are in responses that are long and uncertain enough to be "
            "recognised when they appear again"
        )
    if seen.again:
        return ""
    behavior, learner = dump.columns["behavior_logprobs"], dump.columns.get("logprobs", "logprobs")
    if behavior in NAMES["anchor"]:
        return (
            f"no response appears in two updates, but if {behavior} is recomputed for every update, a response that is "
            "used again cannot be recognised"
        )
    if learner in NAMES["anchor"]:
        return "it was written before the first step on each rollout batch, so further passes over it do not show"
    return ""


def _how(updates: Sequence[LoggedUpdate], seen: Seen) -> str:
    """What was inferred, in words."""
    responses = sum(update.sequences or 0 for update in updates)
    text = (
        f"the dump has no column for uses, so they are inferred: {seen.again} of {responses} responses have, bit for "
        "bit, the behaviour log-probs of a response in an earlier update. Updates that are not in the dump do not count"
    )
    unknown = float((np.concatenate(seen.before) == UNKNOWN).mean())
    if unknown:
        text += f"; {unknown:.1%} of the tokens are in responses too short or too certain to be recognised"
    if seen.repeated:
        text += (
            f"; {seen.repeated} responses appear more than once within one update, which counts as one use. If its "
            "number covers several optimizer steps, number the steps"
        )
    return text


def _contradictions(updates: Sequence[LoggedUpdate], seen: Seen) -> list[str]:
    """What the dump itself says against its uses."""
    wrong = sum(int((update.uses < found).sum()) for update, found in zip(updates, seen.before, strict=True))
    if not wrong:
        return []
    return [
        f"uses cannot be right: {wrong} tokens are in responses that appear in more of the earlier updates than their "
        "uses say. Count every update that trained on a response before this one"
    ]
