"""The reference of learn.kl: the weights with which the run began, and what they say about every token.

    all weights trained     a frozen copy of them, in the same precision on the same device
    low-rank additions      the model itself, with every addition multiplied by 0; nothing is copied

When the learner first sees a group, the reference passes over its responses once, without gradients. The log-probs are
kept with the group, so later visits and replays cost no pass, and a resumed run has them from its checkpoint. They are
computed as the learner computes its own, at the same temperature, packed or padded alike; only learn.compile is left
out, because one pass per group does not repay a compilation.

A resumed run makes the reference from model.path again, before its checkpoint is loaded. The fingerprint shows whether
these are still the weights with which the run began.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from bapo.learn.head import WholeModel
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack_demonstrations
from bapo.learn.state import fingerprint, frozen_weights
from bapo.models.layers import without_additions
from bapo.types import Group


def initial(model: Any) -> Any:
    """The model that stays as this one is now: a frozen copy, or itself if its weights are frozen below additions."""
    has_additions = any(hasattr(module, "lora_A") for module in model.modules())
    return model if has_additions else copy.deepcopy(model).requires_grad_(False)


class Reference:
    """The initial weights, made ready for passes."""

    def __init__(self, kept: Any, whole: WholeModel, settings: LearnerSettings) -> None:
        """`kept`: what `initial` gave before the first update. `whole`: the learner's own model, ready for passes."""
        self.additions = kept is whole.model
        self.whole = WholeModel(kept, replace(settings, compile=False), packed=whole.packed)
        self.settings = settings
        self.fingerprint = fingerprint(frozen_weights(kept).values())

    @torch.no_grad()
    def add_logprobs(self, groups: Sequence[Group]) -> None:
        """Give the responses of these groups their log-probs under the reference, unless they have them."""
        left = [t for group in groups for t in group.trajectories if len(t.reference_logprobs) < len(t.tokens)]
        left.sort(key=lambda t: -len(t.prompt) - len(t.tokens))  # the order in which they are packed
        batches = pack_demonstrations(
            ((t.prompt, t.tokens) for t in left),
            micro_tokens=self.settings.micro_tokens,
            device=self.whole.device,
            padded=not self.whole.packed,
        )
        waiting = iter(left)
        with without_additions(self.whole.model) if self.additions else nullcontext():
            for batch in batches:
                read = partial(self.whole.head, targets=batch.targets, temperature=self.settings.temperature)
                logprobs = iter(self.whole(batch, read).logprobs.tolist())
                for trajectory in islice(waiting, len(batch.offsets) - 1):
                    found = list(islice(logprobs, len(trajectory.tokens)))
                    if not all(map(math.isfinite, found)):
                        raise ValueError(
                            "learn.kl: the initial weights give a token of a response a log-prob that is not finite, "
                            "so there is no distance to them. Set model.dtype='float32', or learn.kl=0."
                        )
                    trajectory.reference_logprobs = found
