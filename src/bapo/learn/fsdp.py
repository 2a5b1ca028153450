"""A learner whose weights are spread over several ranks: torch's fully sharded data parallel (FSDP2).

    shards      every rank keeps 1 / N of every weight, its gradient and its moments, in float32. Frozen weights, below
                low-rank additions, are kept in the precision of the passes
    a pass      gathers the weights of one layer at a time, in the precision of the passes, and forgets them after the
                layer; in the backward pass once more. The rest (embedding, last norm, head) is gathered while
                the whole model runs (`head.py`)
    gradients   are summed over ranks in float32, not averaged: the loss of every rank has the denominator of the whole
                update
    work        all ranks are handed the same groups and take parts with about equally many tokens (`packing.py`)

So an update is that of one process, up to the order of summation. Per parameter and rank, in bytes: 16 / N (weight 4,
gradient 4, moments 8), and what a pass gathers: 2 per parameter of one layer and of the rest, in bfloat16.

All ranks must call `step`, `weights`, `fingerprint`, `next_logprobs`, `save` and `load` together, because each gathers.

Compiled layers are refused: torch would compile the gathering with them, and nobody has checked the result here.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module

from bapo.learn.forward import can_pack, layers_of
from bapo.learn.head import WholeModel
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings


class ShardedLearner(Learner):
    """One rank's part of a learner that several ranks are together."""

    ranks: dist.ProcessGroup

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        *,
        ranks: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`model`: the whole model, the same on every rank, on the CPU; its layers move to the device one by one.
        `dtype`: the precision of passes.
        """
        if settings.compile:
            raise ValueError(
                f"learn.compile=True, but {ranks.size()} ranks share this model, and compiled layers cannot gather "
                "their weights. Set learn.compile=False."
            )
        if settings.offload_optimizer:
            raise ValueError(
                f"learn.offload_optimizer=True, but this model is spread over {ranks.size()} ranks, which keep their "
                "parts of the optimizer on their devices. Set learn.offload_optimizer=False, or train on one GPU."
            )
        self.ranks = ranks
        self.part = ranks.rank(), ranks.size()
        self.dtype = dtype
        whole = WholeModel(model, settings, packed=can_pack(model, device=device, dtype=dtype))
        shard(whole, DeviceMesh.from_group(ranks, device.type), dtype)
        super().__init__(model, settings, whole=whole)

    @property
    def precision(self) -> torch.dtype:
        """What passes compute in. Weights are kept in float32."""
        return self.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its usual name, whole and in the precision of passes, gathered one after the other."""
        for name, parameter in self.model.named_parameters():
            yield name, gathered(parameter.detach().to(self.dtype))


def shard(whole: WholeModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Spread a model over the mesh, in place, each layer by itself and the rest with the root."""
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    for module in (*layers_of(whole.model), whole):
        _widen(module)
        unit = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum


def _widen(module: Module) -> None:
    """Make the weights that are trained, and are still whole, float32."""
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
