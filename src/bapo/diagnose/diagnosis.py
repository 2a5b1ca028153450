"""The whole diagnosis: from a dump to numbers, findings and words; and what to do about the clip.

Group-normalised advantages cancel between responses. On-policy, the positive share is therefore the positive responses'
share of the length, so an imbalance is one of *length*. The clip can repair it only if ratios spread so far that moving
a bound lets tokens pass. The headline and the advice follow from these cases, in this order:

    a serious finding                            repair it first
    every ratio is 1, or there is no signal      no clip does anything here
    the effective sample size is low             reduce staleness; no clip makes up for it
    the share meets the target at the start      adaptive bounds stay at their start, so a fixed clip will do
    it is below, and no bound moves it           ratios are near 1: look at lengths and at the averaging of the loss
    it is below, and the bounds move it          BAPO, with the setting that reaches the target most often

Beside it stands what the brake and push once would do, if the dump says which tokens were trained on before (uses.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from bapo.diagnose.dumps import NAMES, Dump
from bapo.diagnose.measure import SETTINGS, Fate, Numbers, measure, total
from bapo.diagnose.problems import FEW_RESPONSES, LOW_ESS, Finding, find_problems
from bapo.diagnose.uses import UNKNOWN, Pushes, Uses, first, later, of_uses, with_uses
from bapo.runs.files import strict

RAISES_ENTROPY = ("low_prob_high_adv", "high_prob_low_adv")
LOWERS_ENTROPY = ("high_prob_high_adv", "low_prob_low_adv")
SPELLED = {"bapo weak-model": 'ClipSettings.preset("weak-model")', "bapo": "ClipSettings()"}
"""The settings that may be advised, and how they are written. If both reach their target equally often, the first is
advised: it starts at (0.8, 1.2)."""
NAMED = {"bapo weak-model": "BAPO with the preset weak-model", "bapo": "BAPO with its default settings"}
"""What a headline calls them."""
MOST = 2 / 3  # a case applies if at least this share of the updates with a signal agree
MOVES = 0.02  # adaptive bounds are worth it only if the whole path raises the share by at least this much
NOTABLE = 0.01  # blocking is mentioned only if it affects at least this share of the gradient
NOTHING_USABLE = "No token is usable, so nothing can be said about the clip."
HOW_TO_BRAKE = (
    "To set the brake: in `bapo train`, objective.name = 'brake' (the default); in policy_loss, objective='brake' with "
    "uses=; in TRL, bapo_objective='brake'; in verl, policy_loss.objective=brake (docs/adapters). For push once, "
    "write 'push_once'."
)
MOST_LINES = 10  # a recommendation is read only if it is short


class Headline(NamedTuple):
    """One sentence or two, and how a page shows them."""

    text: str
    tone: Literal["decided", "open", "wrong"]
    """Something can be done or nothing needs doing; no clip helps; look at this first."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `bapo diagnose` has to say about a dump."""

    dump: Dump  # with uses in every update or in none, and with a note if they were inferred
    uses: Uses
    updates: list[Numbers]  # one entry per update that has a usable token
    overall: Numbers | None  # the numbers over all of these updates; None if there is none
    findings: list[Finding]
    headline: Headline
    advice: list[str]  # at most MOST_LINES sentences, each with its numbers
    unknown: list[str]  # what the dump cannot tell, and what to log to find out


def diagnose(dump: Dump) -> Diagnosis:
    """Measure every update, look for problems, and put the results into words."""
    dump, uses = with_uses(dump)
    updates = [numbers for update in dump.updates if (numbers := measure(update)) is not None]
    overall = total(updates) if updates else None
    findings = find_problems(dump.updates)
    headline, advice = Headline(NOTHING_USABLE, "wrong"), [NOTHING_USABLE]
    if overall is not None:
        headline, about_the_clip = _about_the_clip(overall, uses)
        advice = [*_about_uses(overall, uses), *about_the_clip, *_about_entropy(overall), *_about_size(overall)]
    if serious := [finding.name for finding in findings if finding.serious]:
        listed, these = ", ".join(serious), "these" if len(serious) > 1 else "it"
        text = f"Something cannot be right ({listed}). Repair {these} first: the other numbers rest on it."
        headline = Headline(text, "wrong")
        advice = [f"First repair what cannot be right: {listed}. Until then, read the rest with care.", *advice]
    return Diagnosis(dump, uses, updates, overall, findings, headline, advice[:MOST_LINES], _unknowns(dump, uses))


def _about_the_clip(numbers: Numbers, uses: Uses) -> tuple[Headline, list[str]]:
    """What BAPO's bounds can do for these updates: in a sentence or two, and as advice."""
    signal = numbers.shares["gradient"]["unclipped"].share
    if math.isnan(signal):
        return Headline("No token has an advantage, so these updates have no signal.", "wrong"), [
            "No token has an advantage. Filter groups of equal rewards, and look at an update with a signal."
        ]
    if not numbers.pooled.log_ratio.any():
        ones = "Every ratio is 1, so no clip does anything here."
        later_updates = "Dump later updates of a rollout batch, with the sampler's own log-probs."
        return Headline(ones, "open"), [f"{ones} {later_updates} {_balance(numbers)}".rstrip()]
    best = max(SPELLED, key=lambda name: sum(bounds.reached for bounds in numbers.searched(name)))
    share, reached = (numbers.fates[name].gradient.share for name in ("grpo", best))
    start, end = (fmean(getattr(b, f"share_at_{side}") for b in numbers.searched("bapo")) for side in ("start", "end"))
    weak = numbers.searched("bapo weak-model")
    at_start = sum(bounds.stop == "START" for bounds in weak)
    headline, lines, bapo = Headline("", "decided"), [], f"{NAMED[best]} to {reached:.2f}"
    if at_start >= MOST * len(weak):
        hold = f"positive tokens hold {share:.2f} of the gradient at (0.8, 1.2)"
        bapo = "BAPO's bounds would stay where they start"
        text = f"A fixed clip will do: {hold}, and {bapo}."
        lines = [
            f"A fixed clip will do. The positive share is {signal:.2f}, and in {at_start} of {_updates(numbers)} "
            f"BAPO's target of {SETTINGS['bapo weak-model'].target_share:.2f} is met at (0.8, 1.2), where its search "
            "starts, so adaptive bounds would stay there.",
            "Do not use the `paper` preset here: it would stay at (0.6, 1.2), which clips fewer negative tokens than "
            "(0.8, 1.2).",
        ]
    elif end - start < MOVES:
        text = (
            f"BAPO's bounds cannot repair the balance: positive tokens hold {share:.2f} of the gradient at (0.8, 1.2), "
            f"and {NAMED[best]} gets it to {reached:.2f}, with a target of {SETTINGS[best].target_share:.2f}."
        )
        lines = [
            f"BAPO's bounds cannot repair the balance. The positive share is {signal:.2f}, and their whole path moves "
            f"it only from {start:.2f} to {end:.2f}, because only {numbers.ratios['wide']:.1%} of ratios lie outside "
            "(0.8, 1.2).",
            _balance(numbers),
        ]
        headline = Headline("", "open")
    else:
        moved = f"from {share:.2f} to {reached:.2f}, with a target of {SETTINGS[best].target_share:.2f}"
        text = f"{NAMED[best]} would move the positive share of the gradient {moved}."
        lines = _about_bapo(numbers, best)
    headline = headline._replace(text=text)
    if (ess := numbers.ratios["ess"]) < LOW_ESS:
        of_tokens = f"the effective sample size is {ess:.2f} of the tokens"
        headline = Headline(f"The data is too stale for any clip: {of_tokens}.", "wrong")
        reduce = (
            f"Reduce staleness first: {of_tokens}, and the KL is {numbers.ratios['kl']:.2g} per token. Take fewer "
            "updates per rollout batch, or lower the learning rate. No clip makes up for it."
        )
        lines = [reduce, *lines]
    elif _push_once_matters(numbers, uses):
        headline = Headline(f"{_of_used(numbers)}, and {bapo}.", "decided")
    return headline, [line for line in lines if line]


def _of_used(numbers: Numbers) -> str:
    """What the brake, the default of this library, would make of the share, and push once, which is stricter."""
    share, brake = (of_uses(numbers.braked).shares[key] for key in ("share", "share_kept"))
    kept, once = later(numbers.braked).shares["kept"], of_uses(numbers.pushes).shares["share_kept"]
    what = "the positive share of the gradient"
    if f"{share:.2f}" == f"{brake:.2f}":
        moved = f"The brake would leave {what} at {share:.2f}"
    else:
        moved = f"The brake would move {what} from {share:.2f} to {brake:.2f}"
    return f"{moved} and keep {kept:.0%} of the used negative tokens. Push once would move it to {once:.2f}"


def _about_bapo(numbers: Numbers, best: str) -> list[str]:
    """For updates whose share the bounds can move: how far the best setting gets."""
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
    return [
        *lines,
        _balance(numbers),
        "This is what BAPO would do to these updates, not a promise of better results. In this project's study, bounds "
        "of (0.9, 2.0) raised pass@k under many passes over the same data and kept entropy, but cost avg@k at "
        "temperature 1 elsewhere. Bounds near (0.6, 1.2) did harm.",
    ]


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
    tokens = f"{negative:.0f} against {positive:.0f} tokens"
    text = f"Negative responses are {negative / positive:.1f} times as long as positive ones ({tokens})"
    if even.share <= share + 0.05:
        not_that = f"but that is not the cause: averaged per response, the share is {even.share:.2f}"
        return f"{text}, {not_that}. Look at the advantages."
    averaged = f"A loss averaged per response (sequence_mean) would have a share of {even.share:.2f}"
    return f"{text}. {averaged}. In this project's study it gained avg@k in every setting."


def _push_once_matters(numbers: Numbers, uses: Uses) -> bool:
    """Whether push once would block a notable part of the negative gradient."""
    whole = of_uses(numbers.pushes)
    known = uses.source != "unknown" and later(numbers.pushes).gradient > 0
    return known and whole.gradient - whole.kept_gradient >= NOTABLE * whole.gradient


def _about_uses(numbers: Numbers, uses: Uses) -> list[str]:
    """What rules of used tokens would do; nothing if uses are unknown, no token is negative, or every ratio is 1."""
    fresh, used, whole = first(numbers.pushes), later(numbers.pushes), of_uses(numbers.pushes)
    if uses.source == "unknown" or not whole.negative or not numbers.pooled.log_ratio.any():
        return []
    if not any(use > 0 for use in numbers.pushes):
        if uses.source == "logged":
            return ["Every token is used for the first time, so the brake and push once would change nothing."]
        return [
            "No response appears in two of these updates, so the brake and push once would change nothing in them. If "
            "the dump leaves updates out, log uses to be sure."
        ]
    if not used.gradient:
        none = "(0.8, 1.2) lets no negative token pass that was used before"
        return [f"{none}, so the brake and push once would change nothing."]
    shares, kept = used.shares, whole.shares["kept_of_gradient"]
    if not _push_once_matters(numbers, uses):
        blocks = f"it blocks {1 - kept:.1%} of the negative gradient that (0.8, 1.2) lets pass"
        return [f"Push once (used_low = 1) would change little: {blocks}. The brake blocks no more than that."]
    inferred = " (uses inferred)" if uses.source == "inferred" else ""
    braked, braked_share = later(numbers.braked).shares, of_uses(numbers.braked).shares["share_kept"]
    drift, low = braking(numbers)
    before = f"; in their first use, {fresh.shares['below']:.0%} are" if fresh.negative else ""
    return [
        f"Of the negative tokens in their second or later use{inferred}, {shares['below']:.0%} are already less likely "
        f"than when they were sampled{before}. A fixed clip of (0.8, 1.2) pushes {shares['pushed']:.0%} down further, "
        f"and these hold {shares['pushed_of_gradient']:.0%} of the gradient of negative tokens in later uses.",
        f"The brake would stop that as far as they have fallen: their mean of -log r, {drift}, makes used_low {low}. "
        f"It would keep {braked['kept']:.0%} of the negative tokens in later uses, and the positive share would go "
        f"from {whole.shares['share']:.2f} to {braked_share:.2f}. Push once (used_low = 1) is stricter: it would keep "
        f"{shares['kept']:.0%}, those that have become more likely, and the share would be "
        f"{whole.shares['share_kept']:.2f}. docs/results.md says where that helped.",
        HOW_TO_BRAKE,
    ]


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
    whole = numbers.fates["grpo"].tokens
    return {
        **{name: getattr(numbers, name) for name in plain},
        "positive_tokens": int(whole.positive),
        "negative_tokens": int(whole.negative),
        "responses": numbers.sequences,
        "share": {by: {clip: signal.share for clip, signal in clips.items()} for by, clips in numbers.shares.items()},
        "share_sequence_mean": None if numbers.sequence_mean is None else numbers.sequence_mean.share,
        "objectives": {name: _fate(fate) for name, fate in numbers.fates.items()},
        "bounds": {name: [asdict(bounds) for bounds in found] for name, found in numbers.bounds.items()},
        "ratio": numbers.ratios,
        "push_once": _rule_of_used(numbers.pushes, "push_once"),
        "brake": {"updates": list(map(asdict, numbers.brakes)), **_rule_of_used(numbers.braked, "brake")},
    }


def _fate(fate: Fate) -> dict[str, float]:
    clipped = zip(("", "_positive", "_negative"), fate.clipped, strict=True)
    return {
        **{f"clip_fraction{side}": value for side, value in clipped},
        "blocked_positive": int(fate.blocked.positive),
        "blocked_negative": int(fate.blocked.negative),
        "share": fate.gradient.share,
    }


def _rule_of_used(pushes: Mapping[int, Pushes], rule: str) -> dict[str, Any]:
    """Shares over all tokens and by use, and the sums they are made of. What the rule does is null without uses."""
    known = set(pushes) != {UNKNOWN}
    chosen = {"all": of_uses(pushes)} | ({"first": first(pushes), "later": later(pushes)} if known else {})
    unknown = {} if known else dict.fromkeys(("kept", "kept_of_gradient", "share_kept"))
    parts = {name: {"negative_tokens": part.negative, **part.shares, **unknown} for name, part in chosen.items()}
    share, then = ({name: part.pop(key) for name, part in parts.items()} for key in ("share", "share_kept"))
    return {
        "share": share["all"],
        f"share_{rule}": then["all"],
        **parts,
        "by_use": {str(use): asdict(part) for use, part in pushes.items() if use != UNKNOWN},
    }
