"""The diagnosis in one sentence: which case these updates are, and what would change it.

The cases are those of the recommendation (advice.py), in the same order. `tone` says how a page shows the sentence:
decided (there is something to do, or nothing needs doing), open (no clip helps) or wrong (look at this first).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from bapo.diagnose.checks import LOW_ESS
from bapo.diagnose.findings import Finding
from bapo.diagnose.measure import SETTINGS, Numbers
from bapo.diagnose.push_once import later, of_uses
from bapo.diagnose.uses import Uses

MOST = 2 / 3
"""A case applies if at least this share of the updates with a signal agree."""
MOVES = 0.02
"""Adaptive bounds are worth it only if the whole path raises the share by at least this much."""
NOTABLE = 0.01
"""Blocking is mentioned only if it affects at least this share of the gradient."""
ADVISED = ("bapo weak-model", "bapo")
"""The settings of BAPO that may be advised. If both reach their target equally often, the first: it starts at
(0.8, 1.2)."""

Case = Literal["no signal", "all ones", "fixed will do", "cannot move", "bapo moves"]


@dataclass(frozen=True)
class Headline:
    """One sentence or two, and how to show them."""

    text: str
    tone: Literal["decided", "open", "wrong"]


def clip_case(numbers: Numbers) -> Case:
    """What BAPO's bounds can do for these updates."""
    if math.isnan(numbers.shares["gradient"]["unclipped"].share):
        return "no signal"
    if not numbers.pooled.log_ratio.any():
        return "all ones"
    weak, default = numbers.searched("bapo weak-model"), numbers.searched("bapo")
    if sum(bounds.stop == "START" for bounds in weak) >= MOST * len(weak):
        return "fixed will do"
    start, end = fmean(b.share_at_start for b in default), fmean(b.share_at_end for b in default)
    return "cannot move" if end - start < MOVES else "bapo moves"


def advised(numbers: Numbers) -> str:
    """The setting of BAPO that reaches its target most often."""
    return max(ADVISED, key=lambda name: sum(bounds.reached for bounds in numbers.searched(name)))


def push_once_matters(numbers: Numbers, uses: Uses) -> bool:
    """Whether push once would block a notable part of the negative gradient."""
    whole = of_uses(numbers.pushes)
    known = uses.source != "unknown" and later(numbers.pushes).gradient > 0
    return known and whole.gradient - whole.kept_gradient >= NOTABLE * whole.gradient


def headline(numbers: Numbers | None, findings: Sequence[Finding], uses: Uses) -> Headline:
    """The diagnosis in a sentence or two."""
    serious = [finding.name for finding in findings if finding.serious]
    if serious:
        many = len(serious) > 1
        return Headline(
            f"Something cannot be right ({', '.join(serious)}). Repair {'these' if many else 'it'} first: the other "
            "numbers rest on it.",
            "wrong",
        )
    if numbers is None:
        return Headline("No token is usable, so nothing can be said about the clip.", "wrong")
    case = clip_case(numbers)
    if case == "no signal":
        return Headline("No token has an advantage, so these updates have no signal.", "wrong")
    if case == "all ones":
        return Headline("Every ratio is 1, so no clip does anything here.", "open")
    if numbers.ratios["ess"] < LOW_ESS:
        return Headline(
            f"The data is too stale for any clip: the effective sample size is {numbers.ratios['ess']:.2f} of the "
            "tokens.",
            "wrong",
        )
    text, tone = _about_the_clip(numbers, case), "open" if case == "cannot move" else "decided"
    if push_once_matters(numbers, uses):
        text += f" Push once alone would take it to {of_uses(numbers.pushes).share_then:.2f}."
        tone = "decided"
    return Headline(text, tone)  # type: ignore[arg-type]


def _about_the_clip(numbers: Numbers, case: Case) -> str:
    share = numbers.fates["grpo"].gradient.share
    if case == "fixed will do":
        return (
            f"A fixed clip will do: positive tokens hold {share:.2f} of the gradient at (0.8, 1.2), and BAPO's bounds "
            "would stay where they start."
        )
    best = advised(numbers)
    target, reached = SETTINGS[best].target_share, numbers.fates[best].gradient.share
    if case == "cannot move":
        return (
            f"BAPO's bounds cannot repair the balance: positive tokens hold {share:.2f} of the gradient at (0.8, 1.2), "
            f"and the bounds of {best} get it to {reached:.2f}, with a target of {target:.2f}."
        )
    return (
        f"BAPO would move the positive share of the gradient from {share:.2f} to {reached:.2f} with {best}, "
        f"whose target is {target:.2f}."
    )
