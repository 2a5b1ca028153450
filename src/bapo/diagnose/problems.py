"""Problems: what cannot be right in a dump, or makes its numbers say less than they seem to, and what to do about it.

Each check returns its evidence in words, or None if it finds nothing. SERIOUS and REMARKS, at the end, say what to do.

Two checks rest on identities that hold token by token if, and only if, the behaviour log-probs are those of the
distribution that the tokens were really sampled from:

    E_b[ r ] = 1                          the mean ratio over sampled tokens is 1 however far the learner has moved
    E_b[ r (log pi + H) ] = 0             sampled tokens are on average as probable as the learner's entropy H says

Their terms are martingale differences, so sum / sqrt(sum of squares) is about standard normal. Reuse violates both a
little, because the learner has already trained on these very tokens: the mean ratio was off by up to 0.06 at a KL of
0.24, after 15 updates on one batch. Hence there are thresholds on the size, too, and the one on the mean ratio grows
with the KL. Neither holds where the sampler is known to have left out a part of the vocabulary (`log_kept`); whether
both policies are one is then asked of the log-probs before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bapo.core.anchor import FEWEST, Pairs, likely_cause, positions_of
from bapo.core.checks import LOGPROB_SLACK
from bapo.diagnose.dump_files import Array
from bapo.diagnose.dumps import LoggedUpdate
from bapo.diagnose.measure import mismatch, usable

MEAN_RATIO_OFF = 0.03
"""How far the mean ratio may be from 1. Truncated sampling (top-p 0.95) moves it to about 0.95."""
ENTROPY_OFF = 0.10
"""How far the mean log-prob of sampled tokens may be from minus the learner's entropy, as a share of the entropy."""
CERTAIN = 6.0  # least number of standard errors before either counts as a problem
SLOPE_OFF = 1.15  # least factor between the scales of the two log-probs that drift cannot explain
LOW_ESS = 0.5  # effective sample size, as a share of the tokens, below which importance weights are mostly noise
PADDING_RUN = 16
"""Least length of a run of identical values, in both columns at an end of a response, that looks like padding."""
MISMATCH_KL, MISMATCH_BEYOND = 1e-3, 0.01
"""Sampler against trainer on the same tokens: KL per token, and share of tokens more than 0.1 nats apart."""
NOISE = 0.02
"""The mean gap between sampler and trainer that is taken for rounding, because a dump does not say its precision."""
FEW_RESPONSES = 64
"""With fewer a share is mostly noise: its standard deviation was 0.30 over 8 responses, 0.12 over 64, 0.02 over 256."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or notable, the evidence for it, and what to do."""

    name: str
    serious: bool  # if True, the other numbers cannot be trusted until this is repaired
    evidence: str
    action: str
    updates: list[str]  # names of the updates that show it


def find_problems(updates: Sequence[LoggedUpdate]) -> list[Finding]:
    """All findings, serious ones first, each with the evidence from the first update that shows it."""
    found = []
    for check, action in (SERIOUS | REMARKS).items():
        evidence = [(update.name, text) for update in updates if (text := check(update)) is not None]
        if evidence:
            names = [name for name, _ in evidence]
            found.append(Finding(check.__name__, check in SERIOUS, evidence[0][1], action, names))
    return found


def no_tokens(update: LoggedUpdate) -> str | None:
    """The mask selects nothing."""
    return None if len(update.logprobs) else "the mask selects no token"


def not_finite(update: LoggedUpdate) -> str | None:
    """NaN or infinity under the mask."""
    for name in ("logprobs", "behavior_logprobs", "advantages", "entropy", "anchor", "log_kept"):
        values = getattr(update, name)
        bad = np.zeros(0) if values is None else ~np.isfinite(values)
        if bad.any():
            first = int(bad.argmax())
            where = f"response {update.sequence_ids[first]}" if update.sequence_ids is not None else f"token {first}"
            return f"{name} is {values[first]} in {int(bad.sum())} of {len(bad)} tokens, first in {where}"
    return None


def above_zero(update: LoggedUpdate) -> str | None:
    """Log-probs above 0."""
    for name in ("logprobs", "behavior_logprobs"):
        values = getattr(update, name)
        bad = values > LOGPROB_SLACK
        if bad.any():
            like = ""
            if (values >= 0).all():
                like = "; all lie in [0, 1], as probabilities do" if values.max() <= 1 else "; none is negative"
            return f"{name} is above 0 in {int(bad.sum())} of {len(bad)} tokens, up to {values[bad].max():.3g}{like}"
    return None


def same_logprobs(update: LoggedUpdate) -> str | None:
    """Ratios exactly 1."""
    same = update.logprobs == update.behavior_logprobs
    if not len(same) or same.mean() <= 0.99:
        return None
    return f"the two log-probs are bit for bit equal in {same.mean():.1%} of {len(same)} tokens, so those ratios are 1"


def coarse(update: LoggedUpdate) -> str | None:
    """Log-probs rounded to bfloat16."""
    for name in ("logprobs", "behavior_logprobs"):
        exact = getattr(update, name).astype(np.float32)
        bits = exact.view(np.uint32)[exact != 0]
        if len(bits) >= 100 and not (bits & 0xFFFF).any():
            size = float(np.median(np.abs(exact[np.isfinite(exact)])))
            steps = f"steps of {size / 128:.1g} at its median size of {size:.2g}"
            return f"{name} has 8 bits of precision in every token: {steps}"
    return None


def shifted(update: LoggedUpdate) -> str | None:
    """One column is one token ahead of the other."""
    good = usable(update)
    x, y, ids = update.logprobs, update.behavior_logprobs, update.sequence_ids
    here = _correlation(x[good], y[good])
    later, earlier = slice(1, None), slice(None, -1)
    for word, first, second in (("behind", later, earlier), ("ahead of", earlier, later)):
        both = good[first] & good[second]
        if ids is not None:
            both &= ids[first] == ids[second]
        there = _correlation(x[second][both], y[first][both])
        if there > 0.8 and there > here + 0.2:
            correlation = f"their correlation is {there:.2f} when moved by one token, and {here:.2f} as they are"
            return f"behavior_logprobs are one token {word} logprobs: {correlation}"
    return None


def temperature(update: LoggedUpdate) -> str | None:
    """One column is the other column on another scale."""
    good = usable(update)
    x, y = update.logprobs[good].astype(np.float64), update.sampler_logprobs[good].astype(np.float64)
    correlation = _correlation(x, y)
    slope = float(y.std() / x.std()) if len(x) >= 100 and correlation >= 0.9 else 1.0
    if max(slope, 1 / slope) < SLOPE_OFF:
        return None
    return (
        f"behaviour log-probs vary {slope:.2f} times as much as the learner's (correlation {correlation:.3f}), as if "
        f"tokens were sampled at {1 / slope:.2f} times the temperature at which the learner's are computed"
    )


def mean_ratio(update: LoggedUpdate) -> str | None:
    """E_b[r] is not 1."""
    ratio = _ratio(update)
    if update.log_kept is not None or _proves_nothing(ratio):
        return None
    off, errors = _off(ratio - 1)
    drift = float((ratio - 1 - np.log(ratio)).mean())  # KL; a wrong offset c adds only c^2 / 2 to it
    if abs(off) < max(MEAN_RATIO_OFF, drift) or abs(errors) < CERTAIN:
        return None
    return f"the mean ratio is {1 + off:.3f}, {abs(errors):.0f} standard errors from 1"


def other_sampling(update: LoggedUpdate) -> str | None:
    """E_b[r (log pi + H)] is not 0."""
    good, ratio = usable(update), _ratio(update)
    if update.entropy is None or update.log_kept is not None or _proves_nothing(ratio):
        return None
    entropy = float(update.entropy[good].mean())
    off, errors = _off(ratio * (update.logprobs[good].astype(np.float64) + update.entropy[good]))
    if abs(off) < ENTROPY_OFF * entropy or abs(errors) < CERTAIN:
        return None
    more = f"sampled tokens are {'more' if off > 0 else 'less'} probable than the entropy says"
    means = f"mean log-prob {-entropy + off:.3f} against {-entropy:.3f}"
    return f"{more}: {means}, {abs(errors):.0f} standard errors"


def unmasked_padding(update: LoggedUpdate) -> str | None:
    """Runs of identical values at the ends of responses."""
    count = len(update.logprobs)
    if not count:
        return None
    ids = np.zeros(count, dtype=np.int64) if update.sequence_ids is None else update.sequence_ids
    new_response = np.diff(ids) != 0
    new_block = new_response.copy()
    for values in (update.logprobs, update.behavior_logprobs):
        new_block |= values[1:] != values[:-1]
    starts = np.concatenate([[0], 1 + np.flatnonzero(new_block)])
    ends = np.concatenate([starts[1:], [count]])
    edge = np.concatenate([[True], new_response, [True]])
    runs = (ends - starts >= PADDING_RUN) & (edge[starts] | edge[ends] | (update.sequence_ids is None))
    tokens = int((ends - starts)[runs].sum())
    if tokens < 0.01 * count:
        return None
    identical = f"{PADDING_RUN} or more identical values (the first: {update.logprobs[starts[runs][0]]:g})"
    return f"{int(runs.sum())} runs of {identical}, {tokens} of {count} tokens"


def two_kinds(update: LoggedUpdate) -> str | None:
    """A few tokens whose ratios look as if another policy had written them."""
    size = np.abs(np.log(np.maximum(_ratio(update), 1e-30)))
    far, between = size > 3, (size > 1) & (size <= 3)
    # A learner that has drifted gives a tail of large ratios; two kinds of tokens leave a gap.
    if len(size) < 100 or far.mean() < 1e-3 or far.sum() < 2 * between.sum() or np.median(size) > 0.1:
        return None
    words = f"{int(far.sum())} of {len(far)} tokens have ratios beyond a factor of 20, while half of all tokens stay "
    words += f"within a factor of {np.exp(np.median(size)):.2f}"
    if update.sequence_ids is not None:
        per_response = np.bincount(update.sequence_ids[usable(update)][far])
        most = np.sort(per_response)[::-1][: max(1, (update.sequences or 1) // 20)].sum() / far.sum()
        words += f"; {most:.0%} of them are in one twentieth of the responses"
    return words


def low_ess(update: LoggedUpdate) -> str | None:
    """Importance weights that are mostly noise."""
    ratio = _ratio(update)
    ess = _ess(ratio)
    return f"the effective sample size is {ess:.2f} of the tokens" if len(ratio) and ess < LOW_ESS else None


def no_signal(update: LoggedUpdate) -> str | None:
    """Every advantage is 0."""
    count = len(update.advantages)
    return f"every advantage of {count} tokens is 0" if count and not update.advantages.any() else None


def one_sign(update: LoggedUpdate) -> str | None:
    """Advantages of one sign only."""
    signs = set(np.sign(update.advantages[np.isfinite(update.advantages)]).tolist()) - {0.0}
    return f"no advantage is {'negative' if signs == {1.0} else 'positive'}" if len(signs) == 1 else None


def off_centre(update: LoggedUpdate) -> str | None:
    """Advantages that do not cancel between responses."""
    values = _response_advantages(update)
    if values is None or len(values) < 8 or len({*np.sign(values).tolist()} - {0.0}) < 2:
        return None
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    if abs(mean) < 0.1 * spread or abs(mean) * np.sqrt(len(values)) < 4 * spread:
        return None
    return f"the mean advantage of {len(values)} responses is {mean:+.3f} (standard deviation {spread:.3f})"


def idle_responses(update: LoggedUpdate) -> str | None:
    """Responses without an advantage."""
    values = _response_advantages(update)
    if values is None or not values.any() or (values == 0).mean() <= 0.25:
        return None
    return f"{(values == 0).mean():.0%} of {len(values)} responses have advantage 0 and teach nothing"


def varying_advantages(update: LoggedUpdate) -> str | None:
    """Advantages that differ within a response."""
    if update.sequence_ids is None or not len(update.advantages):
        return None
    order = np.argsort(update.sequence_ids, kind="stable")
    ids, values = update.sequence_ids[order], update.advantages[order]
    changes = (np.diff(values) != 0) & (np.diff(ids) == 0)
    return f"advantages change within {len(np.unique(ids[1:][changes]))} responses" if changes.any() else None


def engine_mismatch(update: LoggedUpdate) -> str | None:
    """Sampler and trainer disagree on the log-probs of the same tokens."""
    if update.anchor is None:
        return None
    here = usable(update) & np.isfinite(update.anchor)
    return _apart(update, update.anchor, here, "the sampler's log-probs and the recomputed ones")


def fresh_mismatch(update: LoggedUpdate) -> str | None:
    """Sampler and learner disagree on tokens that the learner's own weights sampled."""
    if update.fresh is None:
        return None
    here = usable(update) & update.fresh
    return _apart(update, update.logprobs, here, f"on {int(here.sum())} fresh tokens, both log-probs")


def _apart(update: LoggedUpdate, learners: Array, here: Array, which: str) -> str | None:
    """How far the sampler's log-probs are from these, and why, if that is too far."""
    apart = mismatch(update.sampler_logprobs[here].astype(np.float64) - learners[here])
    if apart is None or (apart["kl"] < MISMATCH_KL and apart["beyond_0.1"] < MISMATCH_BEYOND):
        return None
    words = (
        f"{which} are {apart['mean_abs']:.3f} nats apart on average (at most {apart['max_abs']:.2g}), KL "
        f"{apart['kl']:.2g} per token, {apart['beyond_0.1']:.1%} of tokens beyond 0.1"
    )
    if here.sum() < FEWEST:
        return words
    positions = None if update.sequence_ids is None else _positions(update.sequence_ids)[here]
    pairs = Pairs(
        torch.from_numpy(update.sampler_logprobs[here]),
        torch.from_numpy(learners[here]),
        None if update.entropy is None else torch.from_numpy(update.entropy[here]),
        None if positions is None else torch.from_numpy(positions),
    )
    cause = likely_cause(pairs, noise=NOISE)
    return f"{words}. Likely cause: {cause.name}; {cause.words.removesuffix('.')}"


def _positions(sequence_ids: Array) -> Array:
    """[tokens] where in its response each token stands, from 0, wherever the response's tokens are."""
    order = np.argsort(sequence_ids, kind="stable")
    found = np.empty(len(order), dtype=np.int64)
    found[order] = positions_of(torch.from_numpy(sequence_ids[order])).numpy()
    return found


def copied_anchor(update: LoggedUpdate) -> str | None:
    """The sampler's and the recomputed log-probs are the same array."""
    if update.anchor is None or not len(update.anchor) or not np.array_equal(update.anchor, update.behavior_logprobs):
        return None
    return "the sampler's log-probs and the recomputed ones are bit for bit equal: one is a copy of the other"


def future_versions(update: LoggedUpdate) -> str | None:
    """Tokens newer than the learner."""
    bad = np.zeros(0, dtype=bool) if update.staleness is None else update.staleness < 0
    return f"{int(bad.sum())} of {len(bad)} tokens come from a version newer than the learner's" if bad.any() else None


def few_responses(update: LoggedUpdate) -> str | None:
    """Too few responses for a meaningful share."""
    count = update.sequences
    return f"an update has only {count} responses" if count and count < FEW_RESPONSES else None


def _ratio(update: LoggedUpdate) -> Array:
    good = usable(update)
    log_ratio = update.logprobs[good].astype(np.float64) - update.behavior_logprobs[good]
    return np.asarray(np.exp(log_ratio.clip(-20, 20)))


def _proves_nothing(ratio: Array) -> bool:
    """Whether a mean over these ratios says nothing: they are few, or a few large ones dominate it."""
    return len(ratio) < 100 or _ess(ratio) < 0.3


def _ess(ratio: Array) -> float:
    return float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())) if len(ratio) else 1.0


def _off(terms: Array) -> tuple[float, float]:
    """Mean of martingale differences, and how many standard errors that is from 0."""
    square = float((terms**2).sum())
    return float(terms.mean()), float(terms.sum()) / square**0.5 if square else 0.0


def _correlation(x: Array, y: Array) -> float:
    if len(x) < 100 or not x.std() or not y.std():
        return 1.0 if np.array_equal(x, y) else 0.0
    return float(np.corrcoef(x.astype(np.float64), y.astype(np.float64))[0, 1])


def _response_advantages(update: LoggedUpdate) -> Array | None:
    if update.sequence_ids is None or not np.isfinite(update.advantages).all():
        return None
    return np.asarray(np.bincount(update.sequence_ids, update.advantages) / np.bincount(update.sequence_ids))


Check = Callable[[LoggedUpdate], str | None]
SCALE = (
    "Compute both log-probs at the sampling temperature and over the same vocabulary (top-p and top-k off, or applied "
    "to both). With vLLM, set logprobs_mode='processed_logprobs'."
)
SERIOUS: dict[Check, str] = {
    no_tokens: "Check the code that builds the mask. The update is left out here.",
    not_finite: "Find what produced it. -inf at the end of responses means that the mask covers padding. These tokens "
    "are left out of all numbers here.",
    above_zero: "Dump the log-softmax of the sampled tokens, not logits, probabilities or negative log-likelihoods.",
    shifted: "Slice both columns in the same way: position t must be the same token in both.",
    temperature: SCALE,
    mean_ratio: "These behaviour log-probs cannot be the sampler's: over its samples the mean ratio is 1 for every "
    f"learner. {SCALE}",
    other_sampling: "The tokens were not sampled from the distribution whose log-probs and entropy are "
    f"logged. {SCALE}",
    unmasked_padding: "Let the mask end where the response ends, after its stop token.",
    two_kinds: "Look at those tokens. Usual causes: text that the policy did not write (tool output, forced tokens), "
    "another tokenisation, or weights that the sampler had not received.",
    engine_mismatch: "Train against the sampler's own log-probs, which the numbers here use, and find the cause.",
    fresh_mismatch: "No update lies between sampling and these log-probs, so both must be those of one policy. Until "
    "they are, every ratio is off by as much.",
    future_versions: "Log the learner's version when the tokens are used.",
    one_sign: "Dump advantages, not rewards: an advantage is a reward minus the mean reward of its group.",
}
"""Check -> what to do. The other numbers cannot be trusted until it is done."""
REMARKS: dict[Check, str] = {
    low_ess: "Take fewer updates per rollout batch, lower the learning rate, or bound the staleness.",
    same_logprobs: "Either this is the first update on fresh samples, or the trainer recomputed the behaviour "
    "log-probs with the weights it trains, which hides staleness. Log the sampler's own log-probs, and later updates "
    "of a batch, too.",
    coarse: "Compute and store log-probs in float32. In bfloat16, rounding alone moves ratios by several per cent.",
    no_signal: "All rewards of each group are equal. Filter such groups and sample others.",
    off_centre: "Advantages are not centred within groups, so the share depends on the baseline as much as on lengths.",
    idle_responses: "Filter groups whose rewards are all equal, and sample others.",
    varying_advantages: "This is right with a critic (GAE). The row for gspo uses each response's mean advantage, so "
    "it is not gspo itself.",
    copied_anchor: "So this dump cannot show the mismatch between engine and trainer.",
    few_responses: "Over so few responses a share is mostly noise. If these are micro-batches, log the number of the "
    "update in `update`, and its parts are put together.",
}
"""Check -> what to do about something that only limits what the numbers say."""
