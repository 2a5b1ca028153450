"""Whether sampler and learner mean the same policy, and what is likely wrong if they do not.

A token is fresh if the learner has the very weights that sampled it. The log-prob that the sampler recorded and the
learner's own are then two computations of one number. Of all fresh tokens,

    gap = log b - log pi        b: the sampler's distribution, pi: the learner's

is what rounding leaves: small, and as often above 0 as below. Larger gaps have a cause, and each cause has a signature:

    truncation     top-p and top-k divide by the probability m that is left, so gap = -log m, and never below 0
    temperature    gap = d (log pi + H) + O(d^2) if b is pi at 1 / (1 + d) times its temperature: tokens that are more
                   likely than average gain in proportion, the others lose
    head           an output head of other weights: a part of the gap belongs to the token, wherever it stands
    prompt         another chat template or other prompt tokens: the first tokens of a response suffer most, because
                   later ones also follow from the response itself
    rounding       as small as 16 bits make it, and without direction
    weights        none of these. If the gap has grown from nothing, the sampler's weights are behind the learner's

They are looked for in this order, the sharpest first. A prompt and a precision do not change in a run, so they do not
explain a gap that has grown. All this is evidence, not proof: whoever reads it is told the numbers, too. The limits are
from trials with a trained model and with tiny random ones. Everything here is a function of tensors on the CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST = 64
"""With fewer fresh tokens, nothing is said: a mean over them is mostly chance."""
NEGATIVE, ONE_SIDED = 0.02, 0.8
"""Truncation: the share of clear gaps that may be below 0, and how much of the mean size of gaps their mean must be."""
STRAIGHT, ALIKE = 0.6, 0.85
"""Temperature: the share of the squared gaps that it must explain, and the correlation of both log-probs. Trials: above
0.64 and 0.88. Other causes that reach the share, because the policies have little in common, correlate below 0.4."""
OWN, AKIN = 0.4, 0.8
"""Head: the share of the variance of the gaps that must belong to tokens wherever they stand, and the correlation of
both log-probs. Trials: a trained model 0.45 to 0.47, other causes up to 0.37. Tiny random models do not show it."""
COMMON = 4
"""Head: how often a token must stand in an update to count."""
FIRST, STEEP, LARGE = 4, 2.0, 0.3
"""Prompt: so many tokens at the beginning of responses must have so many times the gap of the others, and so many nats.
Trials: 7 times for a prompt without its last token, 1.7 for another problem's prompt, at most 1.5 for other weights."""
SIXTEEN_BITS = 0.1
"""Rounding: the mean gap that computing in 16 bits explains; measured up to 0.09."""


@dataclass(frozen=True)
class Pairs:
    """Fresh tokens with both log-probs, [tokens] each. Order within a response is that of its tokens."""

    behavior_logprobs: Tensor
    logprobs: Tensor
    entropy: Tensor | None = None
    """Of the learner's distribution."""
    positions: Tensor | None = None
    """Where in its response each token stands, from 0."""
    targets: Tensor | None = None
    """The tokens themselves."""

    @property
    def gaps(self) -> Tensor:
        """[tokens] float64"""
        return self.behavior_logprobs.double() - self.logprobs.double()


@dataclass(frozen=True)
class Cause:
    """What is likely wrong."""

    name: str
    words: str
    """The evidence, and what to look at."""


def likely_cause(pairs: Pairs, *, noise: float, before: float | None = None) -> Cause:
    """The likely cause of gaps that are larger than rounding leaves.

    `noise`: the mean gap that rounding explains here. `before`: the mean gap of the first comparison of the run, if
    this is a later one.
    """
    grown = before is not None and before <= noise
    for name, sign in SIGNS.items():
        if (words := sign(pairs, noise)) is not None and not (grown and name in LASTING):
            return Cause(name, words)
    return Cause("weights", _other_weights(before if grown else None))


def positions_of(sequence_ids: Tensor) -> Tensor:
    """Where in its response each token stands, from 0, if all tokens of a response stand together, [tokens]."""
    index = torch.arange(len(sequence_ids))
    begins = torch.ones_like(index, dtype=torch.bool)
    begins[1:] = sequence_ids[1:] != sequence_ids[:-1]
    return index - torch.where(begins, index, 0).cummax(0).values


def _temperature(pairs: Pairs, noise: float) -> str | None:
    """Gaps in proportion to log pi + H. A second term, in proportion to H, takes up most of the second order."""
    if pairs.entropy is None or not _correlation(pairs) >= ALIKE:
        return None
    entropy, gaps = pairs.entropy.double(), pairs.gaps
    terms = torch.stack([pairs.logprobs.double() + entropy, entropy], dim=1)
    found = torch.linalg.lstsq(terms, gaps[:, None]).solution
    explained = 1 - float(((gaps - (terms @ found)[:, 0]) ** 2).sum() / (gaps**2).sum())
    slope = float(found[0, 0])
    if not explained > STRAIGHT or slope <= -1:
        return None
    return (
        f"{explained:.0%} of the gaps follow from how much more likely than average a token is, as if tokens had been "
        f"sampled at about {1 / (1 + slope):.2g} times the learner's temperature. Give sampler and learner the same "
        "temperature, and record the log-probs after it is applied (in vLLM: logprobs_mode='processed_logprobs')."
    )


def _truncation(pairs: Pairs, noise: float) -> str | None:
    """Gaps of one sign."""
    gaps = pairs.gaps
    mean, size = float(gaps.mean()), float(gaps.abs().mean())
    if mean < ONE_SIDED * size or (gaps < -2 * noise).sum() > NEGATIVE * (gaps.abs() > 2 * noise).sum():
        return None
    kept = math.exp(-float(gaps.kthvalue(math.ceil(0.99 * len(gaps))).values))
    return (
        f"the sampler's log-probs are never lower than the learner's, but for rounding, and {mean:.2g} higher in the "
        f"mean: it left out a part of the vocabulary and kept as little as {kept:.2f} of the probability, as top-p, "
        "top-k or min-p do. Turn them off in the sampler: the learner's log-probs are those of the whole vocabulary."
    )


def _prompt(pairs: Pairs, noise: float) -> str | None:
    """Gaps at the beginning of responses."""
    if pairs.positions is None:
        return None
    size, begin = pairs.gaps.abs(), pairs.positions < FIRST
    if int(begin.sum()) < FEWEST // 4 or int((~begin).sum()) < FEWEST // 4:
        return None
    first, rest = float(size[begin].mean()), float(size[~begin].mean())
    if first < max(STEEP * rest, LARGE):
        return None
    return (
        f"the first {FIRST} tokens of the responses have a gap of {first:.2g} in the mean, and the others {rest:.2g}: "
        "sampler and learner do not continue the same prompt. Compare the token ids of a prompt on both sides: the "
        "chat template, special tokens, truncation, padding."
    )


def _head(pairs: Pairs, noise: float) -> str | None:
    """Gaps that belong to tokens."""
    if pairs.targets is None or not _correlation(pairs) >= AKIN:
        return None
    _, kinds, counts = torch.unique(pairs.targets, return_inverse=True, return_counts=True)
    common = counts[kinds] >= COMMON  # a rare token has a mean near its own gap, whatever the cause is
    if int(common.sum()) < FEWEST:
        return None
    _, kinds = torch.unique(pairs.targets[common], return_inverse=True)
    gaps, count = pairs.gaps[common], int(kinds.max()) + 1
    means = torch.zeros(count, dtype=gaps.dtype).index_add(0, kinds, gaps) / torch.bincount(kinds)
    within = float(((gaps - means[kinds]) ** 2).sum()) / (len(gaps) - count)
    own = 1 - within / max(float(gaps.var()), 1e-300)
    if own < OWN:
        return None
    return (
        f"{own:.0%} of the variance of the gaps belongs to the tokens themselves, wherever they stand: the sampler's "
        "output head has other weights than the learner's. Where the head is the embedding (tied weights), look "
        "whether the sampler keeps a copy of it that new weights do not reach."
    )


def _rounding(pairs: Pairs, noise: float) -> str | None:
    """Gaps as small as 16 bits make them, and without direction."""
    gaps = pairs.gaps
    mean, size = float(gaps.mean()), float(gaps.abs().mean())
    error = float(gaps.std()) / math.sqrt(len(gaps))
    if size > SIXTEEN_BITS or noise >= SIXTEEN_BITS or abs(mean) > 0.1 * size + 3 * error:
        return None
    return (
        "the gaps are small and without direction, as those of 16-bit weights or kernels are: look whether the sampler "
        "computes in a lower precision than the learner. Weights that are a few small updates old look the same."
    )


def _other_weights(before: float | None) -> str:
    """What is left. `before`: the gap from which it has grown."""
    told = "the gaps follow neither from a temperature nor from truncation"
    if before is not None:
        return (
            f"{told}. They have grown from {before:.2g} at the first comparison: the sampler's weights are behind the "
            "learner's. Look whether new weights reach the sampler, and whether it drops the keys and values that it "
            "computed with older ones."
        )
    return (
        f"{told}: the sampler has other weights than the learner, continues other prompt tokens, or computes the model "
        "differently. Compare the model and its revision, the token ids of a prompt, precision and kernels of both."
    )


def _correlation(pairs: Pairs) -> float:
    """Of both log-probs; NaN if one of them never varies."""
    return float(torch.corrcoef(torch.stack([pairs.behavior_logprobs.double(), pairs.logprobs.double()]))[0, 1])


SIGNS: dict[str, Callable[[Pairs, float], str | None]] = {
    "truncation": _truncation,
    "temperature": _temperature,
    "head": _head,
    "prompt": _prompt,
    "rounding": _rounding,
}
"""What may be the cause -> how it shows, in the order in which they are looked for."""
SHARP, MANY = ("truncation", "temperature"), 1000
"""Causes whose signature rounding does not have over so many tokens, however small the gaps are."""
LASTING = ("prompt", "rounding")
"""Causes that are there from the beginning or not at all."""
