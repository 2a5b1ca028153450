"""Trunk and head in one module: everything that reads a model's weights in a pass happens inside its `forward`.

A sharded model has its weights only while a module is called (`parallel.py`): those of a layer while the layer runs,
and the rest, embedding, last norm and head, while this module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from bapo.learn.determinism import deterministic
from bapo.learn.forward import can_fuse, compiled_layers, hidden_states, layers_of
from bapo.learn.head import head_of
from bapo.learn.settings import LearnerSettings
from bapo.types import TokenBatch

Read = TypeVar("Read")


class WholeModel(Module):
    """A model as the learner runs it."""

    def __init__(self, model: Any, settings: LearnerSettings, *, packed: bool) -> None:
        """`packed`: see forward.py."""
        super().__init__()
        _check_layers(model, settings)
        self.model = model.eval()
        self.head = head_of(model, float32=settings.float32_head)
        self.packed = packed
        self.recompute = settings.activation_checkpointing
        self.compiled = compiled_layers(model) if settings.compile else None
        self.fused = packed and not settings.compile and can_fuse(model)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    def forward(self, batch: TokenBatch, read: Callable[[Tensor], Read]) -> Read:
        """What `read` makes of the states that predict the response tokens, [tokens, width]."""
        with deterministic(self.device):  # compiled layers must see the same switch as in the backward pass
            states = hidden_states(
                self.model, batch, packed=self.packed, recompute=self.recompute, forwards=self._forwards(batch)
            )
        return read(states.index_select(0, batch.predicts))

    def _forwards(self, batch: TokenBatch) -> Sequence[Callable[..., Any]] | None:
        """The forward passes of the layers, where they are not transformers' own."""
        if self.fused:
            from bapo.learn.fused.layer import fused_forwards  # needs Triton

            return fused_forwards(self.model, batch)
        return self.compiled


def _check_layers(model: Any, settings: LearnerSettings) -> None:
    """Refuse settings that need layers of transformers if the model has none."""
    if layers_of(model):
        return
    name = type(model).__name__
    if settings.activation_checkpointing:
        raise ValueError(
            f"learn.activation_checkpointing=True, but {name} has no layers that transformers can checkpoint. Set it "
            "to False and lower learn.micro_tokens to save memory."
        )
    if settings.compile:
        raise ValueError(f"learn.compile=True, but {name} has no layers to compile. Set it to False.")
