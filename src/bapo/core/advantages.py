"""Rewards to advantages.

Group estimators compare the responses to one prompt with each other; `gae` serves those who train a critic. Groups may
have any size and lie in any order: `groups[i]` is the index of response i's prompt. A group whose rewards are all equal
carries no signal; it gets advantage 0 and is reported, so that the caller can filter it and sample another.

Advantages are per token everywhere else; `to_tokens` spreads one value per response over its tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GroupAdvantages(NamedTuple):
    """One advantage per response, and which groups carry no signal."""

    advantages: Tensor  # [responses] float32 (float64 stays)
    zero_variance: Tensor  # [groups] bool: all rewards of that group are equal, or it has one response only


def grpo(rewards: Tensor, groups: Tensor, *, eps: float = 1e-6) -> GroupAdvantages:
    """A_i = (R_i - mean) / (std + eps) within the group (GRPO, arXiv:2402.03300).

    std is the unbiased one (n - 1), as in TRL and verl.
    """
    stats = _group_statistics(rewards, groups)
    centred = stats.rewards - stats.mean[groups]
    variance = _sum_by_group(centred**2, groups, stats.size) / (stats.size - 1).clamp(min=1)
    return _without_signal(centred / (variance.sqrt()[groups] + eps), groups, stats)


def dr_grpo(rewards: Tensor, groups: Tensor) -> GroupAdvantages:
    """A_i = R_i - mean: no division by the standard deviation (Dr. GRPO, arXiv:2503.20783)."""
    stats = _group_statistics(rewards, groups)
    return _without_signal(stats.rewards - stats.mean[groups], groups, stats)


def rloo(rewards: Tensor, groups: Tensor) -> GroupAdvantages:
    """A_i = R_i - mean of the *other* responses = (R_i - mean) n / (n - 1) (RLOO, arXiv:2402.14740)."""
    stats = _group_statistics(rewards, groups)
    others = stats.size / (stats.size - 1).clamp(min=1)
    return _without_signal((stats.rewards - stats.mean[groups]) * others[groups], groups, stats)


def gdpo(
    rewards: Tensor,  # [responses, rewards], NaN where one does not apply; or [responses]
    groups: Tensor,
    *,
    weights: Sequence[float] = (),  # of each reward; 1 if there are none
    eps: float = 1e-6,
) -> GroupAdvantages:
    """Each reward is normalised by itself before they are added (GDPO, arXiv:2601.05242, eq. 4 to 6).

        A_ik = (R_ik - mean) / (std + eps) within the group        S_i = sum_k w_k A_ik
        A_i  = (S_i - mean S) / (std S + eps) over all responses that are given

    Of a sum, GRPO sees only the total: a reward that varies little weighs little, and other parts that add up to the
    same are the same. As in TRL, a reward that does not apply to a response counts 0 there and is in no mean.
    """
    columns = (rewards[:, None] if rewards.dim() == 1 else rewards).unbind(1)
    total, silent = torch.zeros_like(columns[0]), torch.ones(int(groups.max()) + 1, dtype=torch.bool)
    for column, weight in zip(columns, weights or [1.0] * len(columns), strict=True):
        known = ~column.isnan()
        if weight and bool(known.any()):
            part = grpo(column[known], groups[known], eps=eps)
            total[known] += weight * part.advantages
            silent[: len(part.zero_variance)] &= part.zero_variance
    spread = total.std() if len(total) > 1 else total.new_zeros(())
    advantages = (total - total.mean()) / (spread + eps)
    return GroupAdvantages(torch.where(silent[groups], 0.0, advantages), silent)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], GroupAdvantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "gdpo": gdpo,
}


def to_tokens(advantages: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """One advantage per response -> one per token, [sequences, tokens] or packed; 0 where masked out."""
    if advantages.dim() != 1 or (sequence_ids is None and advantages.shape != mask.shape[:1]):
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)} but mask has {tuple(mask.shape)}; expected one advantage "
            "per row of the mask, or sequence_ids= for packed tokens. For a GroupAdvantages, pass its .advantages."
        )
    mask = mask != 0
    spread = advantages[:, None].expand(mask.shape) if sequence_ids is None else advantages[sequence_ids]
    return torch.where(mask, spread, 0.0)


@torch.no_grad()
def gae(
    rewards: Tensor,  # [sequences, tokens] reward after each token
    values: Tensor,  # [sequences, tokens] the critic's value of the state before each token
    mask: Tensor,  # [sequences, tokens] bool: tokens the policy chose
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:  # advantages and returns (targets of the critic), [sequences, tokens], 0 where masked out
    """Generalised advantage estimation (arXiv:1506.02438), for users with a critic.

        delta_t = R_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    The state after the last token has value 0. Masked tokens (padding, tool output) are skipped: the step goes from one
    chosen token to the next, over anything between them.
    """
    if not (rewards.shape == values.shape == mask.shape) or mask.dim() != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must share one "
            "shape [sequences, tokens]. A reward for the whole response goes on its last token."
        )
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} must lie in [0, 1]; usual values are gamma=1.0 and lam=0.95.")
    advantages = torch.zeros_like(values)
    next_advantage = values.new_zeros(values.shape[0])
    next_value = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


class _GroupStatistics(NamedTuple):
    rewards: Tensor  # [responses] in working precision
    size: Tensor  # [groups]
    mean: Tensor  # [groups]
    equal: Tensor  # [groups] bool


def _group_statistics(rewards: Tensor, groups: Tensor) -> _GroupStatistics:
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)} and groups {tuple(groups.shape)}; both must be [responses], "
            "with groups[i] the prompt that response i answers. Flatten [prompts, responses] rewards first."
        )
    if groups.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"groups has dtype {groups.dtype}; expected integers that number the prompts from 0.")
    if rewards.numel() == 0:
        raise ValueError("rewards is empty: there is no response to compare. Skip this update.")
    if int(groups.min()) < 0:
        raise ValueError(f"groups holds {int(groups.min())}; number the prompts of the batch from 0.")
    rewards = rewards.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)
    if not bool(torch.isfinite(rewards).all()):
        index = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(
            f"rewards is {float(rewards[index])} for response {index}. A verifier that failed gives no reward: drop "
            "the response, or its group, and record the failure."
        )
    empty = rewards.new_zeros(int(groups.max()) + 1)
    size = _sum_by_group(torch.ones_like(rewards), groups, empty)
    lowest = empty.scatter_reduce(0, groups.long(), rewards, "amin", include_self=False)
    highest = empty.scatter_reduce(0, groups.long(), rewards, "amax", include_self=False)
    mean = _sum_by_group(rewards, groups, empty) / size.clamp(min=1)
    return _GroupStatistics(rewards, size, mean, lowest == highest)


def _sum_by_group(values: Tensor, groups: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_add(0, groups.long(), values)


def _without_signal(advantages: Tensor, groups: Tensor, stats: _GroupStatistics) -> GroupAdvantages:
    """Exactly 0 where the group's rewards are equal, whatever rounding left."""
    return GroupAdvantages(torch.where(stats.equal[groups], 0.0, advantages), stats.equal)
