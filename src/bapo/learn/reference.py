"""The reference of a KL penalty: the weights with which the run began, or later ones, and what they say of tokens.

    all weights trained     a frozen copy of them, in the same precision on the same device
    low-rank additions      the model itself, with every addition multiplied by 0; nothing is copied
    low-rank additions, and a reference that moves      a copy of the additions, on the same frozen weights

A reference that moves (learn.kl_reference = "every N") becomes the present weights after every N-th update, taken or
skipped. Or it goes only a part of the way there, as in TR-DPO (arXiv:2404.09656) and TRL's sync_ref_model:

    reference = (1 - kl_mix) reference + kl_mix policy

When the learner first sees a group, the reference passes over its responses once, without gradients. The log-probs are
kept with the group, so later visits and replays cost no pass, and a resumed run has them from its checkpoint. So a
group that is visited again has them from its first visit, even if the reference has moved since; TRL keeps them, too.
They are computed as the learner computes its own, at the same temperature, packed or padded alike; only learn.compile
is left out, because one pass per group does not repay a compilation.

learn.kl_in_reward takes a penalty from rewards instead, before advantages are computed, as verl's use_kl_in_reward does
with its default estimator, k1, and group advantages, for which it adds up the rewards of all tokens:

    reward_i = R_i - kl_in_reward sum_t (log b_t - log pi_ref(t)),   b: the policies that sampled the tokens

The sum is the log-ratio of the whole response. Its mean over responses of b is KL(b || reference), and a longer
response can lose more. A response loses the same at every visit.

A resumed run makes the reference from model.path again, before its checkpoint is loaded. The fingerprint shows whether
these are still the weights with which the run began. The weights of a reference that moves are in the checkpoint.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bapo.learn.head import WholeModel
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack_alone
from bapo.learn.state import fingerprint, frozen_weights
from bapo.models.layers import without_additions
from bapo.types import Group, TokenBatch


def initial(model: Any, *, moves: bool = False) -> Any:
    """The model that stays as this one is now: a frozen copy, or itself if its weights are frozen below additions.

    `moves`: its weights will change later. Then it has additions of its own, on the frozen weights of this one.
    """
    has_additions = any(hasattr(module, "lora_A") for module in model.modules())
    if has_additions and not moves:
        return model
    shared = {id(p): p for p in model.parameters() if has_additions and not p.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False)


class Reference:
    """The weights to stay near, made ready for passes."""

    def __init__(self, kept: Any, whole: WholeModel, settings: LearnerSettings) -> None:
        """`kept`: what `initial` gave before the first update. `whole`: the learner's own model, ready for passes."""
        self.policy, self.additions = whole.model, kept is whole.model
        self.whole = WholeModel(kept, replace(settings, compile=False), packed=whole.packed)
        self.settings = settings
        self.fingerprint = fingerprint(frozen_weights(kept).values())

    @property
    def moving(self) -> dict[str, Tensor]:
        """The weights that change, by name: none if the reference stays where it is."""
        if self.settings.kl_every is None:
            return {}
        trained = {name for name, parameter in self.policy.named_parameters() if parameter.requires_grad}
        return {name: weight for name, weight in self.whole.model.named_parameters() if name in trained}

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Go to the weights of this version, if the reference moves then, or as far as learn.kl_mix says."""
        every, mix = self.settings.kl_every, self.settings.kl_mix
        if every is None or version % every:
            return
        policy = dict(self.policy.named_parameters())
        for name, weight in self.moving.items():
            weight.copy_(policy[name] if mix == 1 else torch.lerp(weight.float(), policy[name].float(), mix))

    @torch.no_grad()
    def add_logprobs(self, groups: Sequence[Group]) -> None:
        """Give the responses of these groups their log-probs under the reference, unless they have them."""
        compared = (t for group in groups for t in group.compared(self.settings.truncated))
        left = [t for t in compared if len(t.reference_logprobs) < len(t.versions)]
        left.sort(key=lambda t: -sum(map(len, t.rows)))  # the order in which they are packed
        batches = pack_alone(
            left,
            micro_tokens=self.settings.micro_tokens,
            device=self.whole.device,
            padded=not self.whole.packed,
        )
        with without_additions(self.whole.model) if self.additions else nullcontext():
            logprobs = chain.from_iterable(self._logprobs(batch) for batch in batches)
            for trajectory in left:
                found = list(islice(logprobs, len(trajectory.versions)))
                if not all(map(math.isfinite, found)):
                    raise ValueError(
                        "learn.kl: the reference gives a token of a response a log-prob that is not finite, so there "
                        "is no distance to it. Set model.dtype='float32', or learn.kl=0."
                    )
                trajectory.reference_logprobs = found

    def _logprobs(self, batch: TokenBatch) -> list[float]:
        read = partial(self.whole.head, targets=batch.targets, temperature=self.settings.temperature)
        found: list[float] = self.whole(batch, read).logprobs.tolist()
        return found


def mean_gap(groups: Sequence[Group], settings: LearnerSettings) -> float:
    """The mean over these responses of how much likelier they were when they were sampled than under the reference."""
    return fmean(t.reference_gap for group in groups for t in group.compared(settings.truncated))
