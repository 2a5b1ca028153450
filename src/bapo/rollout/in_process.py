"""Which in-process engine samples from a model where it is. Whoever needs an engine asks here."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel

from bapo.rollout.engine import Engine
from bapo.rollout.local.engine import LocalEngine

__all__ = ["engine_for"]


def engine_for(model: PreTrainedModel, *, slots: int, parked: Literal["rebuild", "keep"] = "rebuild") -> Engine:
    """The fastest engine that can run this model on its device. `parked`: see `GraphEngine`; "keep" needs CUDA."""
    if model.device.type == "cpu" and parked == "rebuild":
        return LocalEngine(model, slots=slots)
    from bapo.rollout.cuda.graphs import in_process_engine  # needs Triton, which a machine without a GPU may not have

    return in_process_engine(model, slots=slots, parked=parked)
