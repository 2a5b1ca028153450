"""Signs that a run did not go well, each as one sentence with its numbers. They are what a reader should look at first.

The limits are rules of thumb. They are set so wide that a sound run shows no sign, and they decide nothing: the figures
show what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bapo.report.arms import Arm
from bapo.report.cells import ends
from bapo.runs.read import Run
from bapo.runs.statistics import FEW_RESPONSES, MOSTLY_CUT_OFF, mean, sampled_responses, stop_shares

COLLAPSED = 0.5
"""A reward below this part of its best tenth has collapsed."""
LEAST_REWARD = 0.05
"""A best tenth below this reward cannot collapse."""
ENTROPY_LEFT = 0.25
"""Less than this part of the first entropy is left."""
ENTROPY_GROWN = 2.0
"""More than this multiple of the first entropy."""
CLIPPED = 0.25
"""The clip blocks more than this share of the tokens."""
SPIKE = 10.0
"""A gradient norm above this multiple of the median is a spike."""
FEW = 20
"""Fewer updates or steps have no trend."""
UNREWARDED = 0.9
"""So large a share of the steps without any reward means that the model hardly ever earns one."""
NO_SIGNAL = 2 / 3
"""More than this share of the groups carries no signal."""
CUT_OFF = 0.1
"""The length limit cuts off so much more of the held-out responses than before training."""


def signs(arms: Sequence[Arm]) -> list[str]:
    """The signs of every arm; with several seeds, a sign says in how many of them it was found, and shows one."""
    found = []
    for arm in arms:
        named = f"{arm.objective}, {arm.setting}: " if len(arms) > 1 else ""
        for look in SIGNS:
            said = [text for run in arm.runs if (text := look(run))]
            if said:
                where = f" ({len(said)} of {len(arm.runs)} seeds)" if len(arm.runs) > 1 else ""
                found.append(f"{named}{said[0]}{where}.")
    return found


def collapse(run: Run) -> str | None:
    """The reward at the end is far below what it was at its best."""
    rewards = _rewards(run)
    tenth = len(rewards) // 10
    if len(rewards) < FEW:
        return None
    means = [mean(rewards[at : at + tenth]) for at in range(len(rewards) - tenth + 1)]
    best, last = max(means), means[-1]
    if best < LEAST_REWARD or not last < COLLAPSED * best:
        return None
    return f"the reward collapsed from {best:.2f} at its best to {last:.2f} at the end"


def unrewarded(run: Run) -> str | None:
    """The reward was zero in nearly every step."""
    rewards, responses = _rewards(run), sampled_responses(run) or [0]
    empty = rewards.count(0.0)
    if not rewards or responses[-1] < FEW_RESPONSES or not empty >= UNREWARDED * len(rewards):
        return None
    kept, filtered = _groups(run) or (0, 0)
    if min(rewards) < 0 or kept > (1 - UNREWARDED) * (kept + filtered):  # 0 may be the best, or a mean of both signs
        return None
    where = f"in all {empty} steps" if empty == len(rewards) else f"in {empty} of {len(rewards)} steps"
    return (
        f"the reward was 0 {where}, so there was next to nothing to learn from; warm-start the model (docs/sft.md), "
        "give it easier problems, or check in its responses whether the verifier refuses correct ones"
    )


def no_signal(run: Run) -> str | None:
    """All responses of most groups have the same reward, so these groups teach nothing."""
    kept, filtered = _groups(run) or (0, 0)
    if kept + filtered < FEW or not filtered > NO_SIGNAL * (kept + filtered) or unrewarded(run):
        return None
    rewards = _rewards(run)
    what = "easier problems, or a warm start (docs/sft.md)"
    if not all(0 <= reward <= 1 for reward in rewards):  # on another scale, nobody knows which side is the good one
        what = "easier or harder problems"
    elif mean(rewards) > 0.5:
        what = "harder problems"
    return (
        f"{filtered / (kept + filtered):.0%} of the groups carried no signal, because all responses of a group earned "
        f"the same reward; take larger groups (rollout.responses), or {what}"
    )


def unfinished(run: Run) -> str | None:
    """Most responses end at the length limit, so the reward is one of fragments."""
    cut = [float(line["truncated"]) for line in run.rollouts if isinstance(line.get("truncated"), int | float)]
    responses = sampled_responses(run) or [0]
    if not cut or responses[-1] < FEW_RESPONSES or not mean(cut) > MOSTLY_CUT_OFF:
        return None
    return (
        f"the length limit cut off {mean(cut):.0%} of the responses, so the reward is mostly one of unfinished text; "
        f"raise rollout.max_tokens, which is {run.config['rollout']['max_tokens']}, or ask for shorter answers"
    )


def entropy(run: Run) -> str | None:
    """The policy has become nearly deterministic, or much more random."""
    found = ends(run, "entropy", "entropy")
    if len(run.updates) < FEW or not found.get("entropy_first", 0.0) > 0:
        return None
    before, after = found["entropy_first"], found["entropy_last"]
    numbers = f"from {before:.3f} to {after:.3f} nats per token"
    if after < ENTROPY_LEFT * before:
        return f"entropy fell {numbers}, so the policy explores little"
    if after > ENTROPY_GROWN * before:
        return f"entropy rose {numbers}, so the policy has become more random"
    return None


def clipping(run: Run) -> str | None:
    """The clip blocks much of the data."""
    last = ends(run, "clip_fraction", "clip").get("clip_last", 0.0)
    push_once = run.config.get("objective", {}).get("name") == "push_once"  # it blocks used tokens by design
    if len(run.updates) < FEW or not last > CLIPPED or push_once:
        return None
    return f"the clip blocked {last:.0%} of the tokens in the last tenth of updates"


def spikes(run: Run) -> str | None:
    """One update was much larger than the others."""
    logged = [line for line in run.updates if isinstance(line.get("grad_norm"), int | float)]
    norms = [(float(line["grad_norm"]), line["version"]) for line in logged]
    if len(norms) < FEW:
        return None
    largest, version = max(norms)
    middle = median(norm for norm, _ in norms)
    if not largest > SPIKE * middle > 0:
        return None
    return f"the gradient norm reached {largest:.3g} in update {version}, {largest / middle:.0f} times its median"


def skipped(run: Run) -> str | None:
    """Updates whose numbers were not finite."""
    count = len(run.skipped)
    if count == 1:
        return "an update was skipped, because its numbers were not finite"
    return f"{count} updates were skipped, because their numbers were not finite" if count else None


def still(run: Run) -> str | None:
    """BAPO's bounds never moved."""
    if len(run.updates) < FEW or stop_shares(run).get("stop_start") != 1.0 or not run.series("clip_high"):
        return None
    low, high = run.series("clip_low")[-1], run.series("clip_high")[-1]
    return f"the bounds never moved from ({low:g}, {high:g}), so a fixed clip would have done the same"


def cut_off(run: Run) -> str | None:
    """Responses have grown into the length limit."""
    if run.sft or not run.summary:
        return None
    before, after = (_evaluated(run, when, "eval/truncated") for when in ("before", "after"))
    responses = run.config["eval"]["k"] * _evaluated(run, "after", "eval/problems")
    if responses < FEW_RESPONSES or not after > before + CUT_OFF:
        return None
    return f"the length limit cuts off {after:.0%} of the held-out responses, and {before:.0%} before training"


def failures(run: Run) -> str | None:
    """The verifier failed on held-out responses."""
    count = 0.0 if run.sft or not run.summary else _evaluated(run, "after", "eval/failures")
    return f"the verifier failed on {count:.0f} held-out responses, which count as wrong" if count else None


def _rewards(run: Run) -> list[float]:
    """The mean reward of each step in which a response finished."""
    return [float(line["reward"]) for line in run.rollouts if isinstance(line.get("reward"), int | float)]


def _groups(run: Run) -> tuple[int, int] | None:
    """How many groups the buffer has kept, and how many it has refused because their rewards did not differ."""
    last = run.rollouts[-1] if run.rollouts else {}
    kept, filtered = (last.get(f"buffer/{name}") for name in ("added", "filtered"))
    return (kept, filtered) if isinstance(kept, int) and isinstance(filtered, int) else None


def _evaluated(run: Run, when: str, key: str) -> float:
    """A number of the evaluation before or after training; 0 if it is missing."""
    value = run.summary[when].get(key)
    return float(value) if isinstance(value, int | float) else 0.0


SIGNS: tuple[Callable[[Run], str | None], ...] = (
    *(unrewarded, no_signal, unfinished, collapse, entropy, clipping, spikes, skipped, still, cut_off, failures),
)
