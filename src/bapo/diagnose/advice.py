"""From numbers to words: the diagnosis in one sentence, what to do about the clip, and what the dump cannot tell.

Group-normalised advantages cancel between responses. On-policy, the positive share is therefore the positive responses'
share of the length, so an imbalance is one of *length*. The clip can repair it only if ratios spread so far that moving
a bound lets tokens pass. The advice follows from these cases, in this order:

    a serious finding                            repair it first
    every ratio is 1, or there is no signal      no clip does anything here
    the effective sample size is low             reduce staleness; no clip makes up for it
    the share meets the target at the start      adaptive bounds stay at their start, so a fixed clip will do
    it is below, and no bound moves it           ratios are near 1: look at lengths and at the averaging of the loss
    it is below, and the bounds move it          BAPO, with the setting that reaches the target most often

Beside it stands what push once would do, if the dump says which tokens were trained on before (uses.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

from bapo.diagnose.dumps import NAMES, Dump
from bapo.diagnose.measure import SETTINGS, Numbers
from bapo.diagnose.problems import FEW_RESPONSES, LOW_ESS, Finding
from bapo.diagnose.uses import Uses, first, later, of_uses

RAISES_ENTROPY = ("low_prob_high_adv", "high_prob_low_adv")
LOWERS_ENTROPY = ("high_prob_high_adv", "low_prob_low_adv")
SPELLED = {"bapo weak-model": 'ClipSettings.preset("weak-model")', "bapo": "ClipSettings()"}
"""The settings that may be advised, and how they are written. If both reach their target equally often, the first is
advised: it starts at (0.8, 1.2)."""
MOST = 2 / 3
"""A case applies if at least this share of the updates with a signal agree."""
MOVES = 0.02
"""Adaptive bounds are worth it only if the whole path raises the share by at least this much."""
NOTABLE = 0.01
"""Blocking is mentioned only if it affects at least this share of the gradient."""
HOW_TO_PUSH_ONCE = (
    "To set it: in this trainer, objective.name = 'push_once' (the default from eight passes on); in policy_loss, "
    "objective='push_once' with uses=; in TRL, bapo_objective='push_once'; in verl, policy_loss.objective=push_once "
    "(docs/adapters)."
)
MOST_LINES = 10
"""A recommendation is read only if it is short."""

Case = Literal["no signal", "all ones", "fixed will do", "cannot move", "bapo moves"]


Tone = Literal["decided", "open", "wrong"]
"""Something can be done or nothing needs doing; no clip helps; look at this first."""


class Headline(NamedTuple):
    """One sentence or two, and how a page shows them."""

    text: str
    tone: Tone


def _clip_case(numbers: Numbers) -> Case:
    """What BAPO's bounds can do for these updates."""
    if math.isnan(numbers.shares["gradient"]["unclipped"].share):
        return "no signal"
    if not numbers.pooled.log_ratio.any():
        return "all ones"
    weak = numbers.searched("bapo weak-model")
    if sum(bounds.stop == "START" for bounds in weak) >= MOST * len(weak):
        return "fixed will do"
    start, end = _path(numbers)
    return "cannot move" if end - start < MOVES else "bapo moves"


def _path(numbers: Numbers) -> tuple[float, float]:
    """The share at the first and at the last bounds that BAPO's search may reach, as means over updates."""
    found = numbers.searched("bapo")
    return fmean(bounds.share_at_start for bounds in found), fmean(bounds.share_at_end for bounds in found)


def _advised(numbers: Numbers) -> str:
    """The setting of BAPO that reaches its target most often."""
    return max(SPELLED, key=lambda name: sum(bounds.reached for bounds in numbers.searched(name)))


def _push_once_matters(numbers: Numbers, uses: Uses) -> bool:
    """Whether push once would block a notable part of the negative gradient."""
    whole = of_uses(numbers.pushes)
    known = uses.source != "unknown" and later(numbers.pushes).gradient > 0
    return known and whole.gradient - whole.kept_gradient >= NOTABLE * whole.gradient


def headline(numbers: Numbers | None, findings: Sequence[Finding], uses: Uses) -> Headline:
    """The diagnosis in a sentence or two."""
    serious = [finding.name for finding in findings if finding.serious]
    if serious:
        text = f"Something cannot be right ({', '.join(serious)}). Repair {'these' if len(serious) > 1 else 'it'} first"
        return Headline(f"{text}: the other numbers rest on it.", "wrong")
    if numbers is None:
        return Headline("No token is usable, so nothing can be said about the clip.", "wrong")
    best, ess, share = _advised(numbers), numbers.ratios["ess"], numbers.fates["grpo"].gradient.share
    target, reached = SETTINGS[best].target_share, numbers.fates[best].gradient.share
    tone: Tone = "decided"
    match _clip_case(numbers):
        case "no signal":
            return Headline("No token has an advantage, so these updates have no signal.", "wrong")
        case "all ones":
            return Headline("Every ratio is 1, so no clip does anything here.", "open")
        case _ if ess < LOW_ESS:
            text = f"The data is too stale for any clip: the effective sample size is {ess:.2f} of the tokens."
            return Headline(text, "wrong")
        case "fixed will do":
            text = (
                f"A fixed clip will do: positive tokens hold {share:.2f} of the gradient at (0.8, 1.2), and BAPO's "
                "bounds would stay where they start."
            )
        case "cannot move":
            tone = "open"
            text = (
                f"BAPO's bounds cannot repair the balance: positive tokens hold {share:.2f} of the gradient at "
                f"(0.8, 1.2), and the bounds of {best} get it to {reached:.2f}, with a target of {target:.2f}."
            )
        case "bapo moves":
            text = (
                f"BAPO would move the positive share of the gradient from {share:.2f} to {reached:.2f} with {best}, "
                f"whose target is {target:.2f}."
            )
    if _push_once_matters(numbers, uses):
        return Headline(f"{text} Push once alone would take it to {of_uses(numbers.pushes).share_then:.2f}.", "decided")
    return Headline(text, tone)


def advise(numbers: Numbers | None, findings: Sequence[Finding], uses: Uses) -> list[str]:
    """The recommendation: at most MOST_LINES sentences, each with its numbers."""
    lines = []
    if serious := [finding.name for finding in findings if finding.serious]:
        lines.append(f"First repair what cannot be right: {', '.join(serious)}. Until then, read the rest with care.")
    if numbers is None:
        return [*lines, "No token is usable, so nothing can be said about the clip."]
    lines += [*_about_uses(numbers, uses), *_about_the_clip(numbers), *_about_entropy(numbers)]
    if numbers.share_error is not None and numbers.sequences is not None:
        per_update = numbers.sequences / numbers.updates
        if per_update < FEW_RESPONSES:
            lines.append(
                f"With {per_update:.0f} responses per update, the share is known to ±{numbers.share_error:.2f} only: "
                "solve the bounds over the whole update, never per micro-batch."
            )
    return lines[:MOST_LINES]


def _about_uses(numbers: Numbers, uses: Uses) -> list[str]:
    """What push once would do; nothing if uses are unknown, if no token is negative, or if every ratio is 1."""
    fresh, used, whole = first(numbers.pushes), later(numbers.pushes), of_uses(numbers.pushes)
    if uses.source == "unknown" or not whole.negative or not numbers.pooled.log_ratio.any():
        return []
    if not any(use > 0 for use in numbers.pushes):
        if uses.source == "logged":
            return ["Every token is used for the first time, so push once (used_low = 1) would change nothing."]
        return [
            "No response appears in two of these updates, so push once (used_low = 1) would change nothing in them. "
            "If the dump leaves updates out, log uses to be sure."
        ]
    if not used.gradient:
        return ["(0.8, 1.2) lets no negative token pass that was used before, so push once would change nothing."]
    if not _push_once_matters(numbers, uses):
        return [
            f"Push once (used_low = 1) would change little: it blocks {1 - whole.kept_mass:.1%} of the negative "
            "gradient that (0.8, 1.2) lets pass."
        ]
    inferred = " (uses inferred)" if uses.source == "inferred" else ""
    before = f"; in their first use, {fresh.below_share:.0%} are" if fresh.negative else ""
    return [
        f"Of the negative tokens in their second or later use{inferred}, {used.below_share:.0%} are already less "
        f"likely than when they were sampled{before}. A fixed clip of (0.8, 1.2) pushes {used.pushed_share:.0%} down "
        f"further, and these hold {used.pushed_mass:.0%} of the gradient of negative tokens in later uses.",
        f"Push once (used_low = 1) would stop that and keep {used.kept_share:.0%} of the negative tokens in later "
        f"uses, those that have become more likely. The positive share would go from {whole.share:.2f} to "
        f"{whole.share_then:.2f}. docs/results.md says where that helped.",
        HOW_TO_PUSH_ONCE,
    ]


def _about_the_clip(numbers: Numbers) -> list[str]:
    signal, case = numbers.shares["gradient"]["unclipped"], _clip_case(numbers)
    if case == "no signal":
        return ["No token has an advantage. Filter groups of equal rewards, and look at an update with a signal."]
    if case == "all ones":
        return [
            "Every ratio is 1, so no clip does anything here. Dump later updates of a rollout batch, with the "
            f"sampler's own log-probs. {_balance(numbers)}".rstrip()
        ]
    lines = []
    ess = numbers.ratios["ess"]
    if ess < LOW_ESS:
        lines.append(
            f"Reduce staleness first: the effective sample size is {ess:.2f} of the tokens, and the KL is "
            f"{numbers.ratios['kl']:.2g} per token. Take fewer updates per rollout batch, or lower the learning rate. "
            "No clip makes up for it."
        )
    if case == "fixed will do":
        target = SETTINGS["bapo weak-model"].target_share
        at_start = sum(bounds.stop == "START" for bounds in numbers.searched("bapo weak-model"))
        lines += [
            f"A fixed clip will do. The positive share is {signal.share:.2f}, and in {at_start} of {_updates(numbers)} "
            f"BAPO's target of {target:.2f} is met at (0.8, 1.2), where its search starts, so adaptive bounds would "
            "stay there.",
            "Do not use the `paper` preset here: it would stay at (0.6, 1.2), which clips fewer negative tokens than "
            "(0.8, 1.2).",
        ]
    elif case == "cannot move":
        start, end = _path(numbers)
        lines += [
            f"BAPO's bounds cannot repair the balance. The positive share is {signal.share:.2f}, and their whole path "
            f"moves it only from {start:.2f} to {end:.2f}, because only {numbers.ratios['wide']:.1%} of ratios lie "
            "outside (0.8, 1.2).",
            _balance(numbers),
        ]
    else:
        lines += _about_bapo(numbers)
    return [line for line in lines if line]


def _about_bapo(numbers: Numbers) -> list[str]:
    """For updates whose share the bounds can move: which setting to use, and how far it gets."""
    best = _advised(numbers)
    found, settings, updates = numbers.searched(best), SETTINGS[best], _updates(numbers)
    grpo, bapo = numbers.fates["grpo"], numbers.fates[best]
    reached = f"reaches its target of {settings.target_share:.2f} in {sum(b.reached for b in found)} of {updates}"
    lines = [
        "BAPO would change these updates. With a fixed clip of (0.8, 1.2), positive tokens hold "
        f"{grpo.gradient.share:.2f} of the remaining gradient; with {SPELLED[best]} they would hold "
        f"{bapo.gradient.share:.2f}.",
        f"That setting {reached}; the medians of its bounds are ({median(b.low for b in found):.2f}, "
        f"{median(b.high for b in found):.2f}).",
        f"It would block {bapo.clipped[1]:.1%} of positive and {bapo.clipped[2]:.1%} of negative tokens; (0.8, 1.2) "
        f"blocks {grpo.clipped[1]:.1%} and {grpo.clipped[2]:.1%}.",
    ]
    at_end = sum(bounds.stop == "END" for bounds in found)
    if at_end >= MOST * len(found):
        lines.append(
            f"In {at_end} of {updates} the search runs to its end, so a fixed clip of ({settings.low[1]}, "
            f"{settings.high[1]}) would do nearly the same. Compare with it, and with ({settings.low[1]}, 1.2)."
        )
    lines += [
        _balance(numbers),
        "This is what BAPO would do to these updates, not a promise of better results. In this project's study, bounds "
        "of (0.9, 2.0) raised pass@k under many passes over the same data and kept entropy, but cost avg@k at "
        "temperature 1 elsewhere. Bounds near (0.6, 1.2) did harm.",
    ]
    return lines


def _updates(numbers: Numbers) -> str:
    """The number of updates that a search is about, in words: those with a signal."""
    with_signal = len(numbers.searched("bapo"))
    return f"{with_signal} updates" + (" with a signal" if with_signal < numbers.updates else "")


def _balance(numbers: Numbers) -> str:
    """Where an imbalance comes from, and what averaging per response would do about it; empty if there is none."""
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
            f"{text}. A loss averaged per response (sequence_mean) would have a share of {even.share:.2f}. In this "
            "project's study that did more for avg@k than any clip."
        )
    return (
        f"{text}, but that is not the cause: averaged per response, the share is {even.share:.2f}. Look at the "
        "advantages."
    )


def _about_entropy(numbers: Numbers) -> list[str]:
    if numbers.quadrants is None:
        return []
    fixed, adaptive = (
        [_blocked(numbers.quadrants[objective], part) for part in (RAISES_ENTROPY, LOWERS_ENTROPY)]
        for objective in ("grpo", "bapo")
    )
    if max(*fixed, *adaptive) < NOTABLE:
        return []
    return [
        f"According to the Entropy-Clip Rule, a fixed clip of (0.8, 1.2) blocks {fixed[0]:.1%} of the gradient that "
        f"raises entropy and {fixed[1]:.1%} of the gradient that lowers it; ClipSettings() blocks {adaptive[0]:.1%} "
        f"and {adaptive[1]:.1%}. The rule is of first order, so this is a hint and not a forecast."
    ]


def _blocked(masses: Mapping[str, float], quadrants: Sequence[str]) -> float:
    """Share of the gradient in these quadrants that the clip blocks."""
    stopped = sum(masses[f"{name}_blocked"] for name in quadrants)
    total = stopped + sum(masses[f"{name}_retained"] for name in quadrants)
    return stopped / total if total else 0.0


def unknowns(dump: Dump, uses: Uses) -> list[str]:
    """What this dump cannot tell, and what to log to find out."""
    update = dump.updates[0]
    lines = []
    if dump.columns["behavior_logprobs"] in NAMES["anchor"]:
        lines.append(
            f"The trainer recomputed {dump.columns['behavior_logprobs']}, so these ratios show neither the mismatch "
            "with the engine that sampled nor staleness from before that. Log the sampler's own log-probs."
        )
    if update.entropy is None:
        lines.append("The Entropy-Clip quadrants, and whether tokens were sampled at this temperature: log entropies.")
    if update.staleness is None:
        lines.append("How old the tokens are: log staleness, or versions and the learner's version.")
    if uses.source == "unknown":
        lines.append(
            "Which tokens were trained on before, and so what push once (used_low = 1) would do: log uses. They cannot "
            f"be inferred from this dump, because {uses.words}."
        )
    if update.rewards is None:
        lines.append("Lengths of correct and wrong responses: log rewards.")
    if update.sequence_ids is None:
        lines.append("Lengths, gspo, topr and the error of the share: log sequence_ids with packed tokens.")
    lines.append(
        "Whether each file is a whole update or a part of one: without an `update` number, every part counts as an "
        "update."
    )
    return lines
