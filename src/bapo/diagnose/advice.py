"""From numbers to words: what to do about the clip of these updates, and what the dump cannot tell.

The reasoning. Group-normalised advantages cancel between responses, so on-policy the positive share is that of the
positive responses in length: the imbalance is one of *length*. The clip can repair it only where ratios are wide enough
for a bound to pass tokens. Hence, in this order:

    a serious problem                            repair it first
    every ratio 1, or no signal                  no clip does anything here
    effective sample size low                    less staleness; no clip makes up for it
    share at or above the target at the start    adaptive bounds stay at their start: a fixed clip will do
    below it, and no bound moves it              ratios are near 1: look at lengths and at the averaging of the loss
    below it, and the bounds move it             BAPO, with the setting that reaches the target most often
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from bapo.diagnose.dumps import NAMES, Dump
from bapo.diagnose.findings import FEW_RESPONSES, LOW_ESS, Finding
from bapo.diagnose.measure import SETTINGS, Numbers

MOST = 2 / 3
"""Share of the updates with a signal that have to agree before one case is advised on."""
MOVES = 0.02
"""Least gain of share over the whole path that is worth adaptive bounds."""
NOTABLE = 0.01
"""Least share of a quadrant's gradient whose blocking is worth a sentence."""
RAISES_ENTROPY = ("low_prob_high_adv", "high_prob_low_adv")
LOWERS_ENTROPY = ("high_prob_high_adv", "low_prob_low_adv")
ADVISED = {"bapo weak-model": 'ClipSettings.preset("weak-model")', "bapo": "ClipSettings()"}
"""BAPO's settings that are advised. Where both meet their target equally often the first: it starts at (0.8, 1.2)."""


def advise(numbers: Numbers | None, findings: Sequence[Finding]) -> list[str]:
    """The recommendation: at most eight sentences, each with its numbers."""
    lines = []
    serious = [finding.name for finding in findings if finding.serious]
    if serious:
        lines.append(f"First repair what cannot be right: {', '.join(serious)}. Until then read the rest with care.")
    if numbers is None:
        return [*lines, "No token is usable, so nothing can be said about the clip."]
    lines += _about_the_clip(numbers)
    lines += _about_entropy(numbers)
    if numbers.share_error is not None and numbers.sequences is not None:
        per_update = numbers.sequences / numbers.updates
        if per_update < FEW_RESPONSES:
            lines.append(
                f"With {per_update:.0f} responses per update the share is known to ±{numbers.share_error:.2f} only: "
                "solve the bounds over the whole update, never per micro-batch."
            )
    return lines[:8]


def _about_the_clip(numbers: Numbers) -> list[str]:
    signal = numbers.shares["gradient"]["unclipped"]
    if math.isnan(signal.share):
        return ["No token has an advantage: filter groups of equal rewards and look at an update with a signal."]
    if not numbers.pooled.log_ratio.any():
        return [
            "Every ratio is 1, so no clip does anything here. Dump later updates of a rollout batch, with log-probs of "
            f"the sampler itself. {_balance(numbers)}".rstrip()
        ]
    lines = []
    ess = numbers.ratios["ess"]
    if ess < LOW_ESS:
        lines.append(
            f"Reduce staleness first: the effective sample size is {ess:.2f} of the tokens, KL "
            f"{numbers.ratios['kl']:.2g} per token. Fewer updates per rollout batch or a smaller learning rate; no "
            "clip makes up for it."
        )
    weak, default = numbers.searched("bapo weak-model"), numbers.searched("bapo")
    updates = _updates(numbers)
    target = SETTINGS["bapo weak-model"].target_share
    at_start = sum(bounds.stop == "START" for bounds in weak)
    start, end = fmean(b.share_at_start for b in default), fmean(b.share_at_end for b in default)
    if at_start >= MOST * len(weak):
        lines += [
            f"A fixed clip will do. The positive share is {signal.share:.2f}, and in {at_start} of {updates} "
            f"BAPO's target of {target:.2f} is met where its search starts, at (0.8, 1.2): adaptive bounds would stay.",
            "Do not take the `paper` preset here: it would sit at (0.6, 1.2), which clips fewer negative tokens than "
            "(0.8, 1.2).",
        ]
    elif end - start < MOVES:
        lines += [
            f"The clip cannot repair the balance. The positive share is {signal.share:.2f}, and over BAPO's whole path "
            f"of bounds it goes from {start:.2f} to {end:.2f}: only {numbers.ratios['wide']:.1%} of ratios lie outside "
            "(0.8, 1.2).",
            _balance(numbers),
        ]
    else:
        lines += _about_bapo(numbers)
    return [line for line in lines if line]


def _about_bapo(numbers: Numbers) -> list[str]:
    """The bounds can move the share: with which setting, and how far."""

    def reached(name: str) -> int:
        return sum(bounds.reached for bounds in numbers.searched(name))

    best = max(ADVISED, key=reached)
    found, settings, updates = numbers.searched(best), SETTINGS[best], _updates(numbers)
    grpo, bapo = numbers.fates["grpo"], numbers.fates[best]
    reached_words = f"reaches its target of {settings.target_share:.2f} in {reached(best)} of {updates}"
    lines = [
        f"BAPO would change these updates. At a fixed (0.8, 1.2) positive tokens hold {grpo.gradient.share:.2f} of the "
        f"gradient that is left; with {ADVISED[best]} they would hold {bapo.gradient.share:.2f}.",
        f"That setting {reached_words}; its bounds have medians ({median(b.low for b in found):.2f}, "
        f"{median(b.high for b in found):.2f}).",
        f"It would block {bapo.clipped[1]:.1%} of positive and {bapo.clipped[2]:.1%} of negative tokens, "
        f"(0.8, 1.2) {grpo.clipped[1]:.1%} and {grpo.clipped[2]:.1%}.",
    ]
    at_end = sum(bounds.stop == "END" for bounds in found)
    if at_end >= MOST * len(found):
        lines.append(
            f"In {at_end} of {updates} the search runs to its end, so a fixed ({settings.low[1]}, "
            f"{settings.high[1]}) would do nearly the same: compare with it, and with ({settings.low[1]}, 1.2)."
        )
    lines += [
        _balance(numbers),
        "That is what it would do, not what comes of it. In this project's study bounds of (0.9, 2.0) raised pass@k "
        "under many passes over the same data, kept entropy and cost avg@k at temperature 1 elsewhere; bounds near "
        "(0.6, 1.2) did harm.",
    ]
    return lines


def _updates(numbers: Numbers) -> str:
    """How many updates a search is about: those with a signal."""
    with_signal = len(numbers.searched("bapo"))
    return f"{with_signal} updates" + (" with a signal" if with_signal < numbers.updates else "")


def _balance(numbers: Numbers) -> str:
    """Where an imbalance comes from, and what averaging by response would make of it."""
    positive, negative = numbers.lengths.get("positive"), numbers.lengths.get("negative")
    share, even = numbers.shares["gradient"]["unclipped"].share, numbers.sequence_mean
    if positive is None or negative is None or even is None or share >= 0.45:
        return ""
    text = (
        f"Negative responses are {negative / positive:.1f} times as long as positive ones ({negative:.0f} against "
        f"{positive:.0f} tokens)"
    )
    if even.share > share + 0.05:
        return (
            f"{text}: a loss averaged per response (sequence_mean) would have a share of {even.share:.2f}. In this "
            "project's study that did more for avg@k than any clip."
        )
    return (
        f"{text}, which is not the cause: averaged per response the share is {even.share:.2f}. Look at the advantages."
    )


def _about_entropy(numbers: Numbers) -> list[str]:
    if numbers.quadrants is None:
        return []
    masses = [numbers.quadrants[objective] for objective in ("grpo", "bapo")]
    fixed, adaptive = ([_blocked(m, part) for part in (RAISES_ENTROPY, LOWERS_ENTROPY)] for m in masses)
    if max(*fixed, *adaptive) < NOTABLE:
        return []
    return [
        f"By the Entropy-Clip Rule a fixed (0.8, 1.2) blocks {fixed[0]:.1%} of the gradient that raises entropy and "
        f"{fixed[1]:.1%} of that which lowers it; ClipSettings() {adaptive[0]:.1%} and {adaptive[1]:.1%}. The rule is "
        "of first order: expect a hint, not a forecast."
    ]


def _blocked(masses: Mapping[str, float], quadrants: Sequence[str]) -> float:
    """What the clip blocks of the gradient in these quadrants."""
    stopped = sum(masses[f"{name}_blocked"] for name in quadrants)
    total = stopped + sum(masses[f"{name}_retained"] for name in quadrants)
    return stopped / total if total else 0.0


def unknowns(dump: Dump) -> list[str]:
    """What cannot be known from this file, and what to log to know it."""
    first = dump.updates[0]
    lines = []
    anchors = NAMES["anchor"]
    if dump.columns["behavior_logprobs"] in anchors:
        lines.append(
            f"{dump.columns['behavior_logprobs']} was recomputed by the trainer, so neither the mismatch with the "
            "engine that sampled nor staleness from before it was recomputed is in these ratios. Log the sampler's own."
        )
    if first.entropy is None:
        lines.append("No entropies: the Entropy-Clip quadrants, and whether tokens were sampled at this temperature.")
    if first.staleness is None:
        lines.append("No versions: how old the tokens are. Log staleness, or versions and the learner's version.")
    if first.rewards is None:
        lines.append("No rewards: length by correctness.")
    if first.sequence_ids is None:
        lines.append("No responses (packed tokens without sequence_ids): lengths, gspo, topr, the error of the share.")
    lines.append(
        "Whether a whole update was logged or a part of it: parts without an `update` number count as updates."
    )
    return lines
