"""AdamW for 16-bit weights on a GPU, with everything that belongs to a weight in one of five long vectors.

    weights     16 bit, what passes read: each parameter of the model is a view of its part
    masters     float32, of which the weights are the rounded image
    gradients   float32; the fused layers add to them directly (`main_grad`), other gradients are moved there
    moments     two of float32

So the norm of all gradients is one launch, a step is one more, and weights that a pass multiplies with together lie
together. It computes the same as `optimizer.py` does for these weights, and its checkpoints are the same.

Per parameter, in bytes: weight 2, master 4, gradient 4, moments 8; together 18. With `offload`, masters and moments are
in the host's memory, and 6 bytes are left on the GPU (`offload.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from bapo.learn.offload import Conveyor
from bapo.learn.optimizer import Optimizer

ALIGNMENT = 64
"""Numbers. Every weight begins at a multiple, so that kernels load it in whole vectors."""
EPS = 1e-8
CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as torch's clip_grad_norm_ does."""


def optimizer_for(
    parameters: Iterable[Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    offload: bool = False,  # keep masters and moments on the host
) -> Optimizer | FlatOptimizer:
    """The fastest optimizer for these parameters."""
    every = list(parameters)
    trained = [p for p in every if p.requires_grad]
    if _can_be_flat(trained):
        return FlatOptimizer(every, betas=betas, weight_decay=weight_decay, offload=offload)
    if offload:
        kinds = ", ".join(sorted({f"{p.dtype} on {p.device.type}" for p in trained}))
        raise ValueError(
            "learn.offload_optimizer=True keeps the optimizer of 16-bit weights on one GPU in the host's memory, but "
            f"the trained weights are {kinds}. Set device='cuda' and model.dtype='bfloat16', or set "
            "learn.offload_optimizer=False. Low-rank additions are always float32, and need little memory."
        )
    return Optimizer(every, lr=lr, betas=betas, weight_decay=weight_decay)


def _can_be_flat(trained: Sequence[Parameter]) -> bool:
    """Whether all of them are plain, of one 16-bit type and on one GPU."""
    kinds = {(p.dtype, p.device) for p in trained}
    if len(kinds) != 1 or any(isinstance(p, DTensor) for p in trained):
        return False
    dtype, device = kinds.pop()
    return dtype in (torch.bfloat16, torch.float16) and device.type == "cuda"


class FlatOptimizer:
    """AdamW over masters. Matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        offload: bool = False,
    ) -> None:
        trained = [p for p in parameters if p.requires_grad]
        decayed, others = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        self.weights = [*decayed, *others]
        if any(weight._post_accumulate_grad_hooks for weight in self.weights):
            raise ValueError(
                "another optimizer already takes the gradients of these 16-bit weights. Load the model again, or train "
                "it with its first learner."
            )
        self.betas, self.weight_decay = betas, weight_decay
        rooms = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in self.weights]
        self._begins = [sum(rooms[:i]) for i in range(len(rooms))]
        self._decayed = sum(rooms[: len(decayed)])
        device, total = self.weights[0].device, sum(rooms)
        self._weights = torch.zeros(total, dtype=self.weights[0].dtype, device=device)
        self._gradients = torch.zeros(total, dtype=torch.float32, device=device)
        self._conveyor = Conveyor(3, total, device) if offload else None
        states = self._conveyor.vectors if self._conveyor else [torch.zeros_like(self._gradients) for _ in range(3)]
        self._masters, self._means, self._squares = states
        self._steps = torch.zeros(())  # on the host
        self._has_moments = False
        self._shrink = torch.ones((), device=device)
        places = zip(*(self._views(x) for x in (self._weights, self._masters, self._gradients)), strict=True)
        self.masters = []
        for parameter, (weight, master, gradient) in zip(self.weights, places, strict=True):
            weight.copy_(parameter.detach())
            master.copy_(weight)
            parameter.data = weight
            parameter.main_grad = gradient  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, gradient))  # type: ignore[no-untyped-call]
            self.masters.append(Parameter(master))

    def _views(self, vector: Tensor) -> list[Tensor]:
        """The part of each weight."""
        return [vector[b : b + p.numel()].view(p.shape) for b, p in zip(self._begins, self.weights, strict=True)]

    @torch.no_grad()
    def clip(self, norm: float) -> Tensor:
        """The norm of all gradients, on the device. The step will scale them down to at most `norm`."""
        total: Tensor = torch.linalg.vector_norm(self._gradients)
        self._shrink = (norm / (total + CLIP_EPS)).clamp(max=1.0)
        return total

    def step(self, lr: float) -> None:
        """Take one update of masters and weights, then forget the gradients."""
        self._steps += 1
        self._has_moments = True
        update = partial(self._update, lr)
        if self._conveyor is None:
            update(0, self._masters, self._means, self._squares)
        else:
            self._conveyor.run(update)
        self._shrink = torch.ones_like(self._shrink)

    def _update(self, lr: float, begin: int, masters: Tensor, means: Tensor, squares: Tensor) -> None:
        """Take the step of the numbers from `begin` on, of which these are masters and moments, on the device."""
        from bapo.learn.fused.kernels.adamw import adamw  # needs Triton

        here = slice(begin, begin + len(masters))
        adamw(
            *(masters, self._gradients[here], means, squares, self._weights[here], self._shrink),
            lr=lr,
            betas=self.betas,
            eps=EPS,
            decay=self.weight_decay,
            decayed=self._decayed - begin,
            step=int(self._steps),
        )

    def forget_gradients(self) -> None:
        """Drop all gradients, as if there had been no backward pass."""
        self._gradients.zero_()
        self._shrink = torch.ones_like(self._shrink)

    @torch.no_grad()
    def round(self) -> None:
        """Give every 16-bit weight the value of its master."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def moments(self, master: Parameter) -> dict[str, Tensor]:
        """What AdamW remembers of one of the masters: exp_avg, exp_avg_sq and step; nothing before the first update."""
        return self.make_moments(master) if self._has_moments else {}

    def make_moments(self, master: Parameter) -> dict[str, Tensor]:
        """The same, zeros before the first update: to be filled with what was saved."""
        self._has_moments = True
        index = next(i for i, other in enumerate(self.masters) if other is master)
        mean, square = (self._views(x)[index] for x in (self._means, self._squares))
        return {"step": self._steps, "exp_avg": mean, "exp_avg_sq": square}

    def forget_moments(self) -> None:
        """Be as before the first update."""
        for vector in (self._means, self._squares, self._steps):
            vector.zero_()
        self._has_moments = False

    def tensors(self) -> dict[str, Tensor]:
        """All tensors needed to continue: moments are `index.key`, masters are `index.master`."""
        kinds: dict[str, Sequence[Tensor]] = {"master": self._views(self._masters)}
        if self._has_moments:
            kinds["step"] = [self._steps.clone() for _ in self.weights]
            kinds |= {"exp_avg": self._views(self._means), "exp_avg_sq": self._views(self._squares)}
        return {f"{index}.{key}": value for key, values in kinds.items() for index, value in enumerate(values)}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned. The weights themselves are restored with the model."""
        indices = {int(name.split(".", 1)[0]) for name in tensors if name.endswith(".master")}
        if indices != set(range(len(self.weights))):
            raise KeyError(f"it has master weights of {len(indices)} parameters instead of {len(self.weights)}")
        self.forget_moments()
        kinds = {"master": self._masters}
        if any(name.endswith(".exp_avg") for name in tensors):
            kinds |= {"exp_avg": self._means, "exp_avg_sq": self._squares}
            self._steps.copy_(tensors["0.step"])
            self._has_moments = True
        for key, vector in kinds.items():
            for index, place in enumerate(self._views(vector)):
                place.copy_(tensors[f"{index}.{key}"])


@torch.no_grad()
def _move_gradient(gradient: Tensor, weight: Tensor) -> None:
    """Add the gradient that torch made for a weight, if it made one, to its part. Called at the end of a pass."""
    if weight.grad is not None:
        gradient += weight.grad  # in float32
        weight.grad = None
