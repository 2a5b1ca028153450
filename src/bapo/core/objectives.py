"""Policy objectives: one short function each, a loss per token in return.

Every objective takes `Tokens` (what the learner knows of each token) and its own options, and returns the loss per
token (to be minimised, unreduced) with `retained`: which tokens still have a gradient. Those with one pair of bounds
return a description, `Clipped`, which a kernel can evaluate and reduce in one pass. Masking and averaging happen in
`reduction.py`, choosing bounds in `bounds.py`. Those without such a pair, all of them by others, are in `peers.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds, share_of_sums
from bapo.core.checks import check_bounds
from bapo.core.peers import asymre, cispo, dcpo, dis, dppo, gspo, m2po, opsm, sapo, topr, vespo
from bapo.core.settings import BRAKES, ClipSettings
from bapo.core.tokens import TokenLoss, Tokens, clipped_surrogate


def low_of_each(
    low: Tensor | float, uses: Tensor | None, used_low: Tensor | float | None, dtype: torch.dtype
) -> Tensor | float:
    """The lower bound of each token: `used_low` where it was trained on before, else `low`.

    As the larger of the two times 1 or 0, and then at least the smaller: on CPU several times faster than a select, and
    as exact.
    """
    if used_low is None:
        return low
    assert uses is not None, "used_low needs uses"
    used = uses.bool()
    if isinstance(low, Tensor) or isinstance(used_low, Tensor):
        low = torch.as_tensor(low, dtype=dtype, device=used.device)
        takes_larger = used.view(torch.int8) ^ (low > used_low).view(torch.int8)
        return takes_larger.to(dtype).mul_(low.clamp(min=used_low)).clamp_(min=low.clamp(max=used_low))
    ones = (~used if low > used_low else used).view(torch.int8).to(dtype)
    larger = ones if max(low, used_low) == 1 else ones.mul_(max(low, used_low))
    return larger.clamp_(min=min(low, used_low))


@torch.no_grad()
def share_of(contribution: Tensor, signal: Tensor) -> Tensor:  # 0-d float64
    """P / (P + N) of what each token contributes to the signal."""
    positive = contribution.clamp(min=0).sum(dtype=torch.float64)
    negative = -contribution.clamp(max=0).sum(dtype=torch.float64)
    return share_of_sums(positive, negative, signal.count_nonzero())


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate of each token's own ratio, between one pair of bounds: a `TokenLoss` not yet computed.

    `loss`, `retained` and `bounds` compute it with torch operations when they are asked for.
    """

    tokens: Tokens
    low: Tensor | float
    high: Tensor | float
    solved: ClipBounds | None = None  # the whole result of the search that chose (low, high)
    cap: float | None = None  # on ratios of negative tokens
    used_low: Tensor | float | None = None  # in place of low, for tokens that were trained on before

    def __post_init__(self) -> None:
        number = isinstance(self.used_low, int | float) and not isinstance(self.used_low, bool)
        solved = self.used_low is None or isinstance(self.used_low, Tensor)
        if not solved and not (number and 0 <= cast(float, self.used_low) < math.inf):
            raise ValueError(
                f"used_low={self.used_low!r} must be a finite ratio >= 0: it is the lower bound for tokens that were "
                "trained on before. 1.0 pushes a negative token once; None turns the rule off."
            )
        if self.cap is not None and not self.cap > 1:
            raise ValueError(
                f"the dual clip is {self.cap}, but it caps ratios of negative tokens from above. Use a value > 1, "
                "e.g. 3.0."
            )

    @property
    def loss(self) -> Tensor:
        """-min(r A, clip(r, low, high) A), and -cap A for A < 0 where r >= cap."""
        loss = self._surrogate.loss
        return loss if self.cap is None else torch.where(self._capped, -self.cap * self.tokens.advantages, loss)

    @cached_property
    def retained(self) -> Tensor:
        """Neither clipped, nor capped, nor past the ratio limit."""
        retained = self._surrogate.retained & self.tokens.within
        return retained if self.cap is None else retained & ~self._capped

    @cached_property
    def bounds(self) -> ClipBounds:
        """Those solved, or those given with their share."""
        if self.solved is not None:
            return self.solved
        tokens, low, high = self.tokens, float(self.low), float(self.high)
        counted = (self._surrogate.retained & tokens.within).view(torch.int8)  # the cap is no bound of the share
        share = share_of(tokens.ratio.detach() * tokens.advantages * counted, tokens.advantages).to(tokens.dtype)
        return ClipBounds(torch.full_like(share, low), torch.full_like(share, high), share, used_low=self.used_low)

    @cached_property
    def _surrogate(self) -> TokenLoss:
        low = low_of_each(self.low, self.tokens.uses, self.used_low, self.tokens.dtype)
        return clipped_surrogate(self.tokens.ratio, self.tokens.advantages, low, self.high)

    @cached_property
    def _capped(self) -> Tensor:
        assert self.cap is not None
        return (self.tokens.advantages < 0) & (self.tokens.ratio >= self.cap)


def grpo(tokens: Tokens, *, low: float = 0.8, high: float = 1.2, used_low: float | None = None) -> Clipped:
    """Fixed symmetric clip (GRPO, arXiv:2402.03300, without its KL term): low, high = 0.8, 1.2.

    `used_low` is the lower bound of tokens that were trained on before. It is ours; see docs/algorithm.md.
    """
    check_bounds(low, high)
    return Clipped(tokens, low, high, used_low=used_low)


def clip_higher(tokens: Tokens, *, low: float = 0.8, high: float = 1.28, used_low: float | None = None) -> Clipped:
    """Fixed asymmetric clip (DAPO, arXiv:2503.14476): low, high = 0.8, 1.28."""
    return grpo(tokens, low=low, high=high, used_low=used_low)


def dual_clip(
    tokens: Tokens, *, low: float = 0.8, high: float = 1.2, cap: float = 3.0, used_low: float | None = None
) -> Clipped:
    """Dual-clip PPO (arXiv:1912.09729): negative tokens are also clipped above, at ratio `cap`.

    L_t = -max( min(r A, clip(r, low, high) A), cap A )   for A < 0;  the plain clip for A >= 0
    """
    check_bounds(low, high)
    return Clipped(tokens, low, high, cap=cap, used_low=used_low)


def push_once(tokens: Tokens, *, low: float = 0.8, high: float = 1.2, used_low: float = 1.0) -> Clipped:
    """GRPO's clip, with a lower bound of 1 for tokens that were trained on before (ours; docs/algorithm.md).

    A negative token is pushed down once. After that it is pushed down only while it is more likely than when it was
    sampled.
    """
    return grpo(tokens, low=low, high=high, used_low=used_low)


def bapo(tokens: Tokens, *, bounds: ClipBounds, dual_clip: float | None = None) -> Clipped:
    """The clipped surrogate at bounds solved from this update's own tokens (BAPO, arXiv:2510.18927).

    `dual_clip` caps negative tokens as the authors' script does (at 3.0); the paper has no such cap.
    """
    return Clipped(tokens, bounds.low, bounds.high, solved=bounds, cap=dual_clip, used_low=bounds.used_low)


@dataclass(frozen=True)
class Objective:
    """An objective and what a trainer has to know to call it. Its options stand in OBJECTIVE_OPTIONS."""

    compute: Callable[..., TokenLoss | Clipped]
    """Tokens and the objective's own options in, the loss of each token out."""
    solves_bounds: bool = False
    """Takes `bounds`, which are solved from the tokens of the update."""
    whole_update: bool = False
    """Looks at all tokens of the update in one call, so an update cannot be cut into micro-batches."""
    needs_sequences: bool = False
    """Has to know which response each token belongs to."""
    settings: Callable[..., ClipSettings] | None = None
    """Makes the clip settings of its own options, where an objective solves bounds but does not take settings."""


OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(grpo),
    "clip_higher": Objective(clip_higher),
    "dual_clip": Objective(dual_clip),
    "push_once": Objective(push_once),
    "brake": Objective(bapo, solves_bounds=True, settings=BRAKES["brake"]),
    "brake_all": Objective(bapo, solves_bounds=True, settings=BRAKES["brake_all"]),
    "bapo": Objective(bapo, solves_bounds=True),
    "dcpo": Objective(dcpo),
    "cispo": Objective(cispo),
    "gspo": Objective(gspo, needs_sequences=True),
    "sapo": Objective(sapo),
    "topr": Objective(topr, needs_sequences=True),
    "asymre": Objective(asymre),
    "m2po": Objective(m2po, whole_update=True),
    "dppo": Objective(dppo),
    "opsm": Objective(opsm, needs_sequences=True),
    "dis": Objective(dis),
    "vespo": Objective(vespo, needs_sequences=True),
}
