"""The tables of a diagnosis as plain cells, and the diagnosis as text.

A `Part` is a title, a sentence that says how to read it, headings and rows. The tables decide which numbers are shown
and with how many digits, in the text and on the page (diagnosis_page.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from textwrap import TextWrapper

from bapo.config.numerals import counted
from bapo.core.entropy_rule import QUADRANTS
from bapo.diagnose.diagnosis import Diagnosis, braking
from bapo.diagnose.measure import SETTINGS, Numbers
from bapo.diagnose.problems import Finding
from bapo.diagnose.uses import RULES, UNKNOWN, later, of_uses
from bapo.screen.terminal import aligned, say

EFFECT = {
    "high_prob_high_adv": "probable, high A: lowers entropy",
    "high_prob_low_adv": "probable, low A: raises entropy",
    "low_prob_high_adv": "improbable, high A: raises entropy",
    "low_prob_low_adv": "improbable, low A: lowers entropy",
}
WIDTH = 110  # characters in a line
STOPS = {
    "START": "at start",
    "RAISING_HIGH": "raising high",
    "RAISING_LOW": "raising low",
    "END": "not met",
    "NO_SIGNAL": "no signal",
}


@dataclass(frozen=True)
class Part:
    """One table."""

    title: str
    reading: str
    headings: list[str]
    rows: list[list[str]]
    bars: list[float] = field(default_factory=list)  # one number in [0, 1] per row, drawn as a bar beside it; or empty


def parts(diagnosis: Diagnosis) -> list[Part]:
    """Every table that the dump has numbers for, in reading order."""
    overall = diagnosis.overall
    if overall is None:
        return []
    tables: list[Callable[[Numbers], Part | None]] = [
        shares,
        objectives,
        bounds,
        uses,
        quadrants,
        distance,
        lengths,
        staleness,
        engine,
    ]
    found = [*(table(overall) for table in tables), by_update(diagnosis.updates)]
    return [part for part in found if part is not None]


def read_as(diagnosis: Diagnosis) -> str:
    """What was read, and under which names."""
    dump = diagnosis.dump
    named = [f"{role} = {column}" for role, column in dump.columns.items() if column != role]
    tokens = sum(len(update.logprobs) for update in dump.updates)
    text = f"{counted(len(dump.updates), 'update')}, {tokens} tokens under the mask"
    return f"{text}; read as {', '.join(named)}" if named else text


def shares(numbers: Numbers) -> Part:
    """Positive share by both measures."""
    bars = {label: signal.share for label, signal in numbers.shares["gradient"].items()}
    rows = [[label, _share(bar), _share(numbers.shares["surrogate"][label].share)] for label, bar in bars.items()]
    if numbers.sequence_mean is not None:
        bars["averaged"] = numbers.sequence_mean.share
        rows.append(["unclipped, averaged per response", _share(bars["averaged"]), ""])
    reading = (
        "Share of the signal that tokens of positive advantage hold. gradient: only tokens that the clip lets pass "
        "count; surrogate: a clipped token counts at its bound (Eq. 8 of the paper)."
    )
    if numbers.share_error is not None:
        reading += f" The unclipped share of one update is known to ±{numbers.share_error:.3f}."
    return Part("Positive share", reading, ["clip", "gradient", "surrogate"], rows, list(bars.values()))


def objectives(numbers: Numbers) -> Part:
    """What every objective would have clipped."""
    rows = []
    for name, fate in numbers.fates.items():
        blocked = f"{fate.blocked.positive:.0f}", f"{fate.blocked.negative:.0f}"
        rows.append([name, *map(_percent, fate.clipped), *blocked, _share(fate.gradient.share)])
    whole = numbers.fates["grpo"].tokens
    return Part(
        "What each objective would have clipped",
        f"Which of the {int(whole.positive)} positive and {int(whole.negative)} negative tokens lose their gradient, "
        f"and the positive share of the gradient that is left. Every objective has its default options.",
        ["objective", "clipped", "positive", "negative", "tokens +", "tokens -", "share left"],
        rows,
        [fate.gradient.share for fate in numbers.fates.values()],
    )


def bounds(numbers: Numbers) -> Part:
    """The bounds BAPO would have chosen."""
    rows = []
    for name in numbers.bounds:
        found = numbers.searched(name)
        low, high = (_range(sorted(getattr(one, side) for one in found)) for side in ("low", "high"))
        shares = ([getattr(one, f"share_at_{side}") for one in found] for side in ("start", "end"))
        start, end = (f"{median(values):.3f}" if values else "no signal" for values in shares)
        stops = ", ".join(f"{count} {STOPS[stop]}" for stop, count in numbers.stops(name).items())
        target = f"{SETTINGS[name].target_share:.2f} {SETTINGS[name].measure}"
        rows.append([name, target, low, high, start, end, stops])
    many = "Median over updates with a signal, and range. " if numbers.updates > 1 else ""
    return Part(
        "The bounds BAPO would have chosen",
        f"{many}The share at the first and the last candidate, by each setting's own measure, and how many updates "
        "ended their search in which way.",
        ["setting", "target", "low", "high", "share at start", "at end", "target met"],
        rows,
    )


def uses(numbers: Numbers, most: int = 8) -> Part | None:
    """Negative tokens that are pushed below the probability they were sampled with, by use."""
    pushes, whole = numbers.pushes, of_uses(numbers.pushes)
    if not whole.negative:
        return None
    known = {use: part for use, part in pushes.items() if use != UNKNOWN}
    chosen = {str(use + 1): part for use, part in list(known.items())[:most]}
    if sum(use > 0 for use in known) > 1:
        chosen["2 or more"] = later(pushes)
    chosen |= {"not known": pushes[UNKNOWN]} if UNKNOWN in pushes else {}
    chosen |= {"all": whole} if len(pushes) > 1 else {}
    reading = (
        "Use 1 is the first time that a token is trained on. log r: its mean over negative tokens; r < 1: those that "
        "are less likely than when they were sampled (about half, if only noise moves them); pushed: those of them "
        "that (0.8, 1.2) lets pass, so that the update pushes them down further. of gradient: the part of the negative "
        "gradient r|A| that (0.8, 1.2) lets pass."
    )
    headings = ["use", "tokens -", "log r", "r < 1", "pushed", "of gradient"]
    columns = ["below", "pushed", "pushed_of_gradient"]
    if known:
        reading += " brake, push once: so many of the negative tokens, and so much of that gradient, they keep."
        headings += ["brake", "of gradient", "push once", "of gradient"]
        columns += [name for rule in RULES for name in (rule, f"{rule}_of_gradient")]
    if numbers.brakes:
        drift, low = braking(numbers)
        reading += f" The brake's drift, the mean of -log r of used tokens, is {drift}, and its used_low {low}."
    rows = []
    for label, part in chosen.items():
        moved = f"{part.shares['log_ratio']:+.3f}" if part.negative else ""
        rows.append([label, f"{part.negative:.0f}", moved, *(_percent(part.shares[name]) for name in columns)])
    return Part("Negative tokens by use", reading, headings, rows)


def quadrants(numbers: Numbers) -> Part | None:
    """The Entropy-Clip Rule."""
    if numbers.quadrants is None:
        return None
    names = ["grpo", "clip_higher", "bapo", "bapo weak-model"]
    rows = []
    for quadrant in QUADRANTS:
        blocked = [numbers.quadrants[name][f"{quadrant}_blocked"] for name in names]
        whole = numbers.quadrants["grpo"][f"{quadrant}_retained"] + blocked[0]
        rows.append([EFFECT[quadrant], *(f"{mass:.1%}" for mass in (whole, *blocked))])
    return Part(
        "Entropy-Clip quadrants",
        "Share of the whole gradient mass r|A| that lies in each quadrant, and how much of the whole each clip blocks "
        f"there. The mean entropy is {numbers.entropy:.3f} nats per token.",
        ["quadrant", "mass", *names],
        rows,
    )


def distance(numbers: Numbers) -> Part:
    """How far the learner is from the policy that sampled."""
    values = numbers.ratios
    quantiles = "  ".join(f"{values[f'ratio_p{q}']:.3f}" for q in ("01", "10", "50", "90", "99"))
    rows = [
        ["ratio: 1%, 10%, 50%, 90%, 99%", quantiles],
        ["ratio: largest, mean", f"{values['ratio_max']:.3g}  {values['ratio_mean']:.4f}"],
        ["signed tokens outside (0.8, 1.2)", f"{values['wide']:.2%}"],
        ["KL per token", f"{values['kl']:.3g}"],
        ["effective sample size", f"{values['ess']:.3f} of the tokens"],
    ]
    return Part("Distance from the sampler", "Over all tokens under the mask.", ["", ""], rows)


def lengths(numbers: Numbers) -> Part | None:
    """Response lengths."""
    if not numbers.lengths:
        return None
    words = {"positive": "positive advantage", "negative": "negative advantage"}
    rows = [[words.get(name, name), f"{value:.1f}"] for name, value in numbers.lengths.items()]
    longest = max(numbers.lengths.values())
    return Part(
        "Response length",
        "Mean number of tokens under the mask per response. If negative responses are longer, negative tokens dominate "
        "a mean over tokens. A response is correct if its reward is above one half.",
        ["responses", "tokens"],
        rows,
        [value / longest for value in numbers.lengths.values()],
    )


def staleness(numbers: Numbers, bins: int = 12) -> Part | None:
    """Staleness histogram. The oldest tokens share one row."""
    if numbers.staleness is None:
        return None
    ages = sorted(numbers.staleness.items())
    counts = {str(age): count for age, count in ages[:bins]}
    if len(ages) > bins:
        counts[f"more, up to {ages[-1][0]}"] = sum(count for _, count in ages[bins:])
    return Part(
        "Staleness",
        "Tokens by the number of updates between sampling and use.",
        ["updates", "tokens", "share"],
        [[label, str(count), f"{count / numbers.tokens:.1%}"] for label, count in counts.items()],
        [count / numbers.tokens for count in counts.values()],
    )


def engine(numbers: Numbers) -> Part | None:
    """The mismatch between engine and trainer."""
    if (apart := numbers.mismatch) is None:
        return None
    rows = [
        ["mean |difference|", f"{apart['mean_abs']:.4f} nats"],
        ["largest", f"{apart['max_abs']:.3g} nats"],
        ["KL per token", f"{apart['kl']:.2g}"],
        ["tokens more than 0.1 apart", f"{apart['beyond_0.1']:.2%}"],
    ]
    return Part(
        "Engine against trainer",
        "The sampler's own log-probs against those that the trainer recomputed for the same tokens. The ratios above "
        "use the sampler's.",
        ["", ""],
        rows,
    )


def by_update(updates: list[Numbers], most: int = 40) -> Part | None:
    """One row per update; of very many updates, evenly spaced ones."""
    if len(updates) == 1:
        return None
    step = math.ceil(len(updates) / most)
    rows = []
    for numbers in updates[::step]:
        chosen, grpo = numbers.bounds["bapo"][0], numbers.fates["grpo"]
        signals = numbers.shares["gradient"]["unclipped"], grpo.gradient, numbers.fates["bapo"].gradient
        searched = f"({chosen.low:.2f}, {chosen.high:.2f})", STOPS[chosen.stop], f"{grpo.clipped[0]:.1%}"
        ratios = f"{numbers.ratios['kl']:.2g}", f"{numbers.ratios['ess']:.2f}"
        rows.append([numbers.name, str(numbers.tokens), *(_share(one.share) for one in signals), *searched, *ratios])
    every = f" Every {step}th update is shown." if step > 1 else ""
    return Part(
        "By update",
        "Positive share of the gradient without a clip, at (0.8, 1.2) and at BAPO's bounds (ClipSettings()); share of "
        f"tokens that (0.8, 1.2) clips; KL per token; effective sample size.{every}",
        ["update", "tokens", "share", "at (0.8, 1.2)", "at bapo", "bounds", "target met", "clipped", "KL", "ESS"],
        rows,
    )


def sentence(finding: Finding, total: int) -> str:
    """What was found, in which of the `total` updates, and what to do about it."""
    found = finding.updates
    where = " (in every update)" if total > 1 else ""
    if len(found) < total:
        named = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
        where = f" (in {len(found)} of {counted(total, 'update')}: {named})"
    return f"{finding.evidence}{where}. {finding.action}"


def _share(value: float) -> str:
    return "none left" if math.isnan(value) else f"{value:.3f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1%}"


def _range(ordered: list[float]) -> str:
    if not ordered:
        return "no signal"
    middle = f"{median(ordered):.2f}"
    return middle if ordered[0] == ordered[-1] else f"{middle} ({ordered[0]:.2f}-{ordered[-1]:.2f})"


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the headline and advice first, then findings, numbers, and what the dump cannot tell."""
    total = len(diagnosis.dump.updates)
    kinds = {True: "serious: ", False: ""}
    found = [f"{kinds[one.serious]}{one.name}. {sentence(one, total)}" for one in diagnosis.findings]
    lines = [*_wrapped(diagnosis.headline.text), "", *_wrapped(read_as(diagnosis)), *_items(diagnosis.dump.notes)]
    lines += ["", "Recommendation", *_items(diagnosis.advice)]
    lines += ["", "Problems" if found else "Problems: none found", *_items(found)]
    for part in parts(diagnosis):
        table = aligned([part.headings, *part.rows] if any(part.headings) else part.rows)
        lines += ["", part.title, *_wrapped(part.reading, "  "), *(f"  {line}" for line in table)]
    if diagnosis.unknown:
        lines += ["", "What this dump cannot tell", *_items(diagnosis.unknown)]
    say("\n".join(lines))


def _items(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from _wrapped(text, "  - ")


def _wrapped(text: str, first: str = "") -> list[str]:
    """The lines of a paragraph."""
    wrapper = TextWrapper(WIDTH, first, " " * len(first), break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)
