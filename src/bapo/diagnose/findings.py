"""Findings: what cannot be right in a dump, or makes its numbers say less than they seem to, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bapo.diagnose import checks
from bapo.diagnose.dumps import LoggedUpdate


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or notable, the evidence for it, and what to do."""

    name: str
    serious: bool
    """If True, the other numbers cannot be trusted until this is repaired."""
    evidence: str
    action: str
    updates: list[str]
    """Names of the updates that show it."""


def find(updates: Sequence[LoggedUpdate]) -> list[Finding]:
    """All findings, serious ones first, each with the evidence from the first update that shows it."""
    found = []
    for name, (check, serious, action) in CHECKS.items():
        evidence = [(update.name, text) for update in updates if (text := check(update)) is not None]
        if evidence:
            found.append(Finding(name, serious, evidence[0][1], action, [where for where, _ in evidence]))
    return sorted(found, key=lambda finding: not finding.serious)


SCALE = (
    "Compute both log-probs at the sampling temperature and over the same vocabulary (top-p and top-k off, or applied "
    "to both). With vLLM, set logprobs_mode='processed_logprobs'."
)
CHECKS: dict[str, tuple[Callable[[LoggedUpdate], str | None], bool, str]] = {
    "no_tokens": (checks.no_tokens, True, "Check the code that builds the mask. The update is left out here."),
    "not_finite": (
        checks.not_finite,
        True,
        "Find what produced it. -inf at the end of responses means that the mask covers padding. These tokens are left "
        "out of all numbers here.",
    ),
    "above_zero": (
        checks.above_zero,
        True,
        "Dump the log-softmax outputs of the sampled tokens, not logits, probabilities or negative log-likelihoods.",
    ),
    "shifted": (checks.shifted, True, "Slice both columns in the same way: position t must be the same token in both."),
    "temperature": (checks.temperature, True, SCALE),
    "mean_ratio": (
        checks.mean_ratio,
        True,
        "These behaviour log-probs cannot be the sampler's: over its samples the mean ratio is 1 for every learner. "
        + SCALE,
    ),
    "other_sampling": (
        checks.other_sampling,
        True,
        "The tokens were not sampled from the distribution whose log-probs and entropy are logged. " + SCALE,
    ),
    "unmasked_padding": (
        checks.unmasked_padding,
        True,
        "Let the mask end where the response ends, after its stop token.",
    ),
    "two_kinds": (
        checks.two_kinds,
        True,
        "Look at those tokens. Usual causes: text that the policy did not write (tool output, forced tokens), another "
        "tokenisation, or weights that the sampler had not received.",
    ),
    "engine_mismatch": (
        checks.engine_mismatch,
        True,
        "Train against the sampler's own log-probs, which the numbers here use, and find the cause.",
    ),
    "fresh_mismatch": (
        checks.fresh_mismatch,
        True,
        "No update lies between sampling and these log-probs, so both must be those of one policy. Until they are, "
        "every ratio is off by as much.",
    ),
    "future_versions": (checks.future_versions, True, "Log the learner's version when the tokens are used."),
    "one_sign": (
        checks.one_sign,
        True,
        "Dump advantages, not rewards: an advantage is a reward minus the mean reward of its group.",
    ),
    "low_ess": (
        checks.low_ess,
        False,
        "Take fewer updates per rollout batch, lower the learning rate, or bound the staleness.",
    ),
    "same_logprobs": (
        checks.same_logprobs,
        False,
        "Either this is the first update on fresh samples, or the trainer recomputed the behaviour log-probs with the "
        "weights it trains, which hides staleness. Log the sampler's own log-probs, and later updates of a batch, too.",
    ),
    "coarse": (
        checks.coarse,
        False,
        "Compute and store log-probs in float32. In bfloat16, rounding alone moves ratios by several per cent.",
    ),
    "no_signal": (
        checks.no_signal,
        False,
        "All rewards of each group are equal. Filter such groups and sample others.",
    ),
    "off_centre": (
        checks.off_centre,
        False,
        "The advantages are not centred within groups, so the share depends on the baseline as much as on lengths.",
    ),
    "idle_responses": (checks.idle_responses, False, "Filter groups whose rewards are all equal, and sample others."),
    "varying_advantages": (
        checks.varying_advantages,
        False,
        "This is right with a critic (GAE). The row for gspo uses each response's mean advantage, so it is not "
        "gspo itself.",
    ),
    "copied_anchor": (
        checks.copied_anchor,
        False,
        "So this dump cannot show the mismatch between engine and trainer.",
    ),
    "few_responses": (
        checks.few_responses,
        False,
        "Over so few responses a share is mostly noise. If these are micro-batches, log the number of the update in "
        "`update`, and its parts are put together.",
    ),
}
"""Name -> the check, whether the finding is serious, and what to do."""
