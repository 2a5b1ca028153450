"""The whole diagnosis: from a dump to numbers, findings and words; and what to do about the clip.

Group-normalised advantages cancel between responses. On-policy, the positive share is therefore the positive responses'
share of the length, so an imbalance is one of *length*. The clip can repair it only if ratios spread so far that moving
a bound lets tokens pass. Hence these cases, in this order. The first that holds is the headline; the advice has all.

    a serious finding                            repair it first
    the effective sample size is low             reduce staleness; no clip makes up for it
    used tokens are pushed down further          the brake and push once, if the dump says which tokens these are
    every ratio is 1, or there is no signal      no clip does anything here
    the share meets the target at the start      adaptive bounds stay at their start, so a fixed clip will do
    it is below, and no bound moves it           ratios are near 1: look at lengths and at the averaging of the loss
    it is below, and the bounds move it          BAPO, with the setting that reaches the target most often
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from bapo.diagnose.dumps import NAMES, Dump
from bapo.diagnose.measure import SETTINGS, Numbers, measure, total
from bapo.diagnose.problems import FEW_RESPONSES, LOW_ESS, Finding, find_problems
from bapo.diagnose.uses import UNKNOWN, Uses, first, later, of_uses, with_uses
from bapo.runs.files import strict

RAISES_ENTROPY = ("low_prob_high_adv", "high_prob_low_adv")
LOWERS_ENTROPY = ("high_prob_high_adv", "low_prob_low_adv")
SPELLED = {"bapo weak-model": 'ClipSettings.preset("weak-model")', "bapo": "ClipSettings()"}
"""The settings that may be advised, and how they are written. If both reach their target equally often, the first is
advised: it starts at (0.8, 1.2)."""
MOST = 2 / 3  # a case applies if at least this share of the updates with a signal agree
MOVES = 0.02  # adaptive bounds are worth it only if the whole path raises the share by at least this much
NOTABLE = 0.01  # blocking is mentioned only if it affects at least this share of the gradient
HOW_TO_BRAKE = (
    "To set the brake: in `bapo train`, objective.name = 'brake' (the default); in policy_loss, objective='brake' with "
    "uses=; in TRL, bapo_objective='brake'; in verl, policy_loss.objective=brake (docs/adapters). For push once, "
    "write 'push_once'."
)
MOST_LINES = 10  # a recommendation is read only if it is short
Tone = Literal["decided", "open", "wrong"]
"""How a page shows a headline: something can be done or nothing needs doing; no clip helps; look at this first."""


class Case(NamedTuple):
    """What holds for a dump, and what to do about it."""

    tone: Tone
    text: str
    """A sentence or two."""
    advice: Sequence[str] = ()
    """Further sentences, each with its numbers."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `bapo diagnose` has to say about a dump."""

    dump: Dump  # with uses in every update or in none, and with a note if they were inferred
    uses: Uses
    updates: list[Numbers]  # one entry per update that has a usable token
    overall: Numbers | None  # the numbers over all of these updates; None if there is none
    findings: list[Finding]
    headline: Case  # the first case that holds
    advice: list[str]  # what else there is to say, at most MOST_LINES sentences
    unknown: list[str]  # what the dump cannot tell, and what to log to find out


def diagnose(dump: Dump) -> Diagnosis:
    """Measure every update, look for problems, and put the results into words."""
    dump, uses = with_uses(dump)
    updates = [numbers for update in dump.updates if (numbers := measure(update)) is not None]
    overall = total(updates) if updates else None
    findings = find_problems(dump.updates)
    cases = _about_problems([finding.name for finding in findings if finding.serious])
    more = []
    if overall is None:
        cases.append(Case("wrong", "No token is usable, so nothing can be said about the clip."))
    else:
        cases += [*_about_staleness(overall), *_about_pushes(overall, uses), _about_bounds(overall)]
        more = [*_if_nothing_is_pushed(overall, uses), *_about_entropy(overall), *_about_size(overall)]
    headline, *others = cases
    advice = [*headline.advice, *(line for case in others for line in (case.text, *case.advice)), *more]
    return Diagnosis(dump, uses, updates, overall, findings, headline, advice[:MOST_LINES], _unknowns(dump, uses))


def _about_problems(serious: Sequence[str]) -> list[Case]:
    if not serious:
        return []
    listed, these = ", ".join(serious), "these" if len(serious) > 1 else "it"
    text = f"Something cannot be right ({listed}). First repair {these}: the other numbers rest on it."
    return [Case("wrong", text)]


def _about_staleness(numbers: Numbers) -> list[Case]:
    if (ess := numbers.ratios["ess"]) >= LOW_ESS:
        return []
    return [
        Case(
            "wrong",
            f"The data is too stale for any clip: the effective sample size is {ess:.2f} of the tokens.",
            [
                f"Reduce staleness: the KL is {numbers.ratios['kl']:.2g} per token. Take fewer updates per rollout "
                "batch, or lower the learning rate."
            ],
        )
    ]


def _about_bounds(numbers: Numbers) -> Case:
    """What BAPO's bounds can do for these updates."""
    if math.isnan(signal := numbers.shares["gradient"]["unclipped"].share):
        remedy = "Filter groups of equal rewards, and look at an update with a signal."
        return Case("wrong", "No token has an advantage, so these updates have no signal.", [remedy])
    if not numbers.pooled.log_ratio.any():
        dump = "Dump later updates of a rollout batch, with the sampler's own log-probs."
        return Case("open", "Every ratio is 1, so no clip does anything here.", [dump, *_balance(numbers)])
    best = max(SPELLED, key=lambda name: sum(bounds.reached for bounds in numbers.searched(name)))
    share, reached = (numbers.fates[name].gradient.share for name in ("grpo", best))
    target = SETTINGS[best].target_share
    start, end = (fmean(getattr(b, f"share_at_{side}") for b in numbers.searched("bapo")) for side in ("start", "end"))
    weak = numbers.searched("bapo weak-model")
    at_start = sum(bounds.stop == "START" for bounds in weak)
    if at_start >= MOST * len(weak):
        return Case(
            "decided",
            f"A fixed clip will do: positive tokens hold {share:.2f} of the gradient at (0.8, 1.2), and BAPO's bounds "
            "would stay where they start.",
            [
                f"In {at_start} of {_updates(numbers)}, its target ({SETTINGS['bapo weak-model'].target_share:.2f}) is "
                "met at (0.8, 1.2), where its search starts.",
                "Do not use the `paper` preset here: it would stay at (0.6, 1.2), which clips fewer negative tokens "
                "than (0.8, 1.2).",
            ],
        )
    if end - start < MOVES:
        return Case(
            "open",
            f"BAPO's bounds cannot repair the balance: positive tokens hold {share:.2f} of the gradient at (0.8, 1.2), "
            f"and {SPELLED[best]} gets it to {reached:.2f}, with a target of {target:.2f}.",
            [
                f"Without a clip it is {signal:.2f}. The whole path of BAPO's bounds moves it only from {start:.2f} to "
                f"{end:.2f}, because only {numbers.ratios['wide']:.1%} of ratios lie outside (0.8, 1.2).",
                *_balance(numbers),
            ],
        )
    text = f"BAPO, with {SPELLED[best]}, would move the positive share of the gradient from {share:.2f} to "
    return Case("decided", f"{text}{reached:.2f}, with a target of {target:.2f}.", _about_search(numbers, best))


def _about_search(numbers: Numbers, best: str) -> list[str]:
    """For updates whose share the bounds can move: how far the best setting gets."""
    found, settings, updates = numbers.searched(best), SETTINGS[best], _updates(numbers)
    grpo, bapo = numbers.fates["grpo"], numbers.fates[best]
    lines = [
        f"It reaches its target in {sum(b.reached for b in found)} of {updates}; the medians of its bounds are "
        f"({median(b.low for b in found):.2f}, {median(b.high for b in found):.2f}). It would block "
        f"{bapo.clipped[1]:.1%} of positive and {bapo.clipped[2]:.1%} of negative tokens; (0.8, 1.2) blocks "
        f"{grpo.clipped[1]:.1%} and {grpo.clipped[2]:.1%}."
    ]
    at_end = sum(bounds.stop == "END" for bounds in found)
    if at_end >= MOST * len(found):
        lines.append(
            f"In {at_end} of {updates} the search runs to its end, so a fixed clip of ({settings.low[1]}, "
            f"{settings.high[1]}) would do nearly the same. Compare with it, and with ({settings.low[1]}, 1.2)."
        )
    return [
        *lines,
        *_balance(numbers),
        "This is what BAPO would do to these updates, not a promise of better results. In this project's study, bounds "
        "of (0.9, 2.0) raised pass@k under many passes over the same data and kept entropy, but cost avg@k at "
        "temperature 1 elsewhere. Bounds near (0.6, 1.2) did harm.",
    ]


def _updates(numbers: Numbers) -> str:
    """The number of updates that a search is about, in words: those with a signal."""
    with_signal = len(numbers.searched("bapo"))
    return f"{with_signal} updates" + (" with a signal" if with_signal < numbers.updates else "")


def _balance(numbers: Numbers) -> list[str]:
    """Where an imbalance comes from, and what averaging per response would do about it; nothing if there is none."""
    positive, negative = numbers.lengths.get("positive"), numbers.lengths.get("negative")
    share, even = numbers.shares["gradient"]["unclipped"].share, numbers.sequence_mean
    if positive is None or negative is None or even is None or share >= 0.45:
        return []
    tokens = f"{negative:.0f} against {positive:.0f} tokens"
    text = f"Negative responses are {negative / positive:.1f} times as long as positive ones ({tokens})"
    if even.share <= share + 0.05:
        not_that = f"but that is not the cause: averaged per response, the share is {even.share:.2f}"
        return [f"{text}, {not_that}. Look at the advantages."]
    averaged = f"A loss averaged per response (sequence_mean) would have a share of {even.share:.2f}"
    return [f"{text}. {averaged}. In this project's study it gained avg@k in every setting."]


def _are_pushed(numbers: Numbers, uses: Uses) -> bool:
    """Whether push once would block a notable part of the negative gradient."""
    whole = of_uses(numbers.pushes)
    if uses.source == "unknown" or not later(numbers.pushes).gradient or not numbers.pooled.log_ratio.any():
        return False
    return whole.gradient - whole.push_once_gradient >= NOTABLE * whole.gradient


def _about_pushes(numbers: Numbers, uses: Uses) -> list[Case]:
    """Used negative tokens that go on falling, and what the brake and push once would do about it."""
    if not numbers.brakes or not _are_pushed(numbers, uses):
        return []
    fresh, used = first(numbers.pushes), later(numbers.pushes).shares
    share, braked, once = (f"{numbers.fates[name].gradient.share:.2f}" for name in ("grpo", "brake", "push_once"))
    what = "the positive share of the gradient"
    moved = f"leave {what} at {share}" if share == braked else f"move {what} from {share} to {braked}"
    drift, low = braking(numbers)
    inferred = " (uses inferred)" if uses.source == "inferred" else ""
    before = f"; in their first use, {fresh.shares['below']:.0%} are" if fresh.negative else ""
    return [
        Case(
            "decided",
            f"The brake would {moved} and keep {used['brake']:.0%} of the used negative tokens. Push once would keep "
            f"{used['push_once']:.0%} of them, and move it to {once}.",
            [
                f"Of the negative tokens in their second or later use{inferred}, {used['below']:.0%} are already less "
                f"likely than when they were sampled{before}. A fixed clip of (0.8, 1.2) pushes {used['pushed']:.0%} "
                f"down further, and these hold {used['pushed_of_gradient']:.0%} of the gradient of negative tokens in "
                "later uses.",
                f"The brake would stop that as far as they have fallen: their mean of -log r, {drift}, makes used_low "
                f"{low}. Push once (used_low = 1) is stricter: it keeps those that have become more likely. "
                "docs/results.md says where that helped.",
                HOW_TO_BRAKE,
            ],
        )
    ]


def _if_nothing_is_pushed(numbers: Numbers, uses: Uses) -> list[str]:
    """Why rules of used tokens would do nothing; silent if uses are unknown, or if nothing can be pushed."""
    whole = of_uses(numbers.pushes)
    silent = uses.source == "unknown" or not whole.negative or not numbers.pooled.log_ratio.any()
    if silent or _are_pushed(numbers, uses):
        return []
    nothing = "so the brake and push once would change nothing"
    if not any(use > 0 for use in numbers.pushes):
        if uses.source == "logged":
            return [f"Every token is used for the first time, {nothing}."]
        leaves = "If the dump leaves updates out, log uses to be sure."
        return [f"No response appears in two of these updates, {nothing} in them. {leaves}"]
    if not later(numbers.pushes).gradient:
        return [f"(0.8, 1.2) lets no negative token pass that was used before, {nothing}."]
    blocks = f"{1 - whole.shares['push_once_of_gradient']:.1%} of the negative gradient that (0.8, 1.2) lets pass"
    return [f"Push once (used_low = 1) would change little: it blocks {blocks}. The brake blocks no more than that."]


def braking(numbers: Numbers) -> list[str]:
    """The drift and used_low of the brake: each as its mean over updates, and its range if they differ."""
    words = []
    for name, digits in (("drift", ".3f"), ("used_low", ".2f")):
        values = [getattr(brake, name) for brake in numbers.brakes]
        mean, least, most = (format(value, digits) for value in (fmean(values), min(values), max(values)))
        words.append(mean if least == most else f"{mean} ({least} to {most})")
    return words


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
    blocked, retained = (sum(masses[f"{name}_{fate}"] for name in quadrants) for fate in ("blocked", "retained"))
    return blocked / (blocked + retained) if blocked + retained else 0.0


def _about_size(numbers: Numbers) -> list[str]:
    """A warning if updates are too small to know their share."""
    per_update = (numbers.sequences or 0) / numbers.updates
    if numbers.share_error is None or per_update >= FEW_RESPONSES:
        return []
    known = f"With {per_update:.0f} responses per update, the share is known to ±{numbers.share_error:.2f} only"
    return [f"{known}: solve the bounds over the whole update, never per micro-batch."]


def _unknowns(dump: Dump, uses: Uses) -> list[str]:
    update, behavior = dump.updates[0], dump.columns["behavior_logprobs"]
    missing = {
        f"The trainer recomputed {behavior}, so these ratios show neither the mismatch with the engine that sampled "
        "nor staleness from before that. Log the sampler's own log-probs.": behavior in NAMES["anchor"],
        "The Entropy-Clip quadrants, and whether tokens were sampled at this temperature: log entropies.": (
            update.entropy is None
        ),
        "How old the tokens are: log staleness, or versions and the learner's version.": update.staleness is None,
        "Which tokens were trained on before, and so what the brake and push once would do (brake_all needs no uses): "
        f"log uses. They cannot be inferred from this dump, because {uses.words}.": uses.source == "unknown",
        "Lengths of correct and wrong responses: log rewards.": update.rewards is None,
        "Lengths, gspo, topr and the error of the share: log sequence_ids with packed tokens.": (
            update.sequence_ids is None
        ),
        "Whether each file is a whole update or a part of one: without an `update` number, every part counts as an "
        "update.": "update" not in dump.columns,
    }
    return [line for line, holds in missing.items() if holds]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain data; numbers that are not finite become null."""
    result: dict[str, Any] = strict(
        {
            "columns": diagnosis.dump.columns,
            "notes": diagnosis.dump.notes,
            "uses": diagnosis.uses.source,
            "headline": diagnosis.headline.text,
            "advice": diagnosis.advice,
            "problems": [asdict(finding) for finding in diagnosis.findings],
            "unknown": diagnosis.unknown,
            "overall": None if diagnosis.overall is None else _numbers(diagnosis.overall),
            "updates": [_numbers(numbers) for numbers in diagnosis.updates],
        }
    )
    return result


def _numbers(numbers: Numbers) -> dict[str, Any]:
    plain = ("name", "updates", "tokens", "share_error", "entropy", "quadrants", "lengths", "staleness", "mismatch")
    whole, pushes = numbers.fates["grpo"].tokens, numbers.pushes
    by_use = {"all": of_uses(pushes), "first": first(pushes), "later": later(pushes)}
    by_use |= {str(use): part for use, part in pushes.items() if use != UNKNOWN}
    return {
        **{name: getattr(numbers, name) for name in plain},
        "positive_tokens": whole.positive,
        "negative_tokens": whole.negative,
        "responses": numbers.sequences,
        "share": {by: {clip: signal.share for clip, signal in clips.items()} for by, clips in numbers.shares.items()},
        "share_sequence_mean": None if numbers.sequence_mean is None else numbers.sequence_mean.share,
        "objectives": {name: fate.figures for name, fate in numbers.fates.items()},
        "bounds": {name: [asdict(bounds) for bounds in found] for name, found in numbers.bounds.items()},
        "ratio": numbers.ratios,
        "brakes": [asdict(brake) for brake in numbers.brakes],
        "uses": {use: {"negative_tokens": part.negative, **part.shares} for use, part in by_use.items()},
    }
