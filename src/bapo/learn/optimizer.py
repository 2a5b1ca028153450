"""AdamW for weights of any precision.

    float32     plain AdamW.
    16 bit      AdamW on a float32 copy of each weight, the master; the 16-bit weight is its rounded image.

Why masters: bfloat16 has 8 significant bits, so an update smaller than about 1/500 of a weight rounds away. The updates
of reinforcement learning (lr 1e-6 on weights of 1e-2) are nearly always smaller than that. Gradients are summed in
float32 for the same reason: each micro-batch's gradient is added to the master's as soon as it is complete, and then
dropped.

Per parameter, in bytes: weight 2, master 4, gradient 4, moments 8; together 18 (float32: 16).

`flat.py` computes the same for 16-bit weights on a GPU, in fewer passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Optimizer:
    """AdamW over masters. Matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self, parameters: Iterable[Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        trained = [p for p in parameters if p.requires_grad]
        decayed, others = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        self.weights = [*decayed, *others]
        self.masters = [p if p.dtype == torch.float32 else Parameter(p.detach().float()) for p in self.weights]
        self._rounded = [(p, m) for p, m in zip(self.weights, self.masters, strict=True) if m is not p]
        if any(weight._post_accumulate_grad_hooks for weight, _ in self._rounded):
            raise ValueError(
                "another optimizer already takes the gradients of these 16-bit weights. Load the model again, or train "
                "it with its first learner."
            )
        for weight, master in self._rounded:
            weight.register_post_accumulate_grad_hook(partial(_move_gradient, master))  # type: ignore[no-untyped-call]
        self._adamw = torch.optim.AdamW(
            [
                {"params": self.masters[: len(decayed)], "weight_decay": weight_decay},
                {"params": self.masters[len(decayed) :], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=betas,
            fused=True if self.masters and all(m.is_cuda for m in self.masters) else None,
        )

    def clip(self, norm: float) -> Tensor:
        """Scale the gradients down to at most this norm. Returns the norm they had before, on the device.

        The norm of sharded gradients is that of all shards.
        """
        total = get_total_norm([master.grad for master in self.masters if master.grad is not None])
        if isinstance(total, DTensor):
            total = total.full_tensor()
        clip_grads_with_norm_(self.masters, norm, total)
        return total

    def step(self, lr: float) -> None:
        """Take one update of masters and weights, then forget the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.round()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop all gradients, as if there had been no backward pass."""
        self._adamw.zero_grad(set_to_none=True)

    @torch.no_grad()
    def round(self) -> None:
        """Give every 16-bit weight the value of its master."""
        if self._rounded:
            weights, masters = zip(*self._rounded, strict=True)
            torch._foreach_copy_(weights, masters)

    def moments(self, master: Parameter) -> dict[str, Tensor]:
        """What AdamW remembers of one of the masters: exp_avg, exp_avg_sq and step; nothing before the first update."""
        kept: dict[str, Tensor] = self._adamw.state.get(master, {})
        return kept

    def make_moments(self, master: Parameter) -> dict[str, Tensor]:
        """The same, after a start with zeros: to be filled with what was saved."""
        on = master.device if self._adamw.defaults["fused"] else torch.device("cpu")
        zeros = {name: torch.zeros_like(master, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        self._adamw.state[master] = {"step": torch.zeros((), device=on), **zeros}
        return self.moments(master)

    def forget_moments(self) -> None:
        """Be as before the first update."""
        self._adamw.state.clear()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors needed to continue: moments are `index.key`, masters of 16-bit weights are `index.master`."""
        state = self._adamw.state_dict()["state"]
        moments = {f"{index}.{key}": value for index, values in state.items() for key, value in values.items()}
        return moments | {
            f"{index}.master": master.detach()
            for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True))
            if master is not weight
        }

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned. The weights themselves are restored with the model."""
        moments: dict[int, dict[str, Tensor]] = {}
        masters: dict[int, Tensor] = {}
        for name, value in tensors.items():
            position, key = name.split(".", 1)
            if key == "master":
                masters[int(position)] = value
            else:
                moments.setdefault(int(position), {})[key] = value
        expected = {i for i, (w, m) in enumerate(zip(self.weights, self.masters, strict=True)) if m is not w}
        if masters.keys() != expected:
            raise KeyError(f"it has master weights of {len(masters)} parameters instead of {len(expected)}")
        for index, value in masters.items():
            self.masters[index].copy_(value)
        self._adamw.load_state_dict({"state": moments, "param_groups": self._adamw.state_dict()["param_groups"]})


@torch.no_grad()
def _move_gradient(master: Parameter, weight: Tensor) -> None:
    """Add the gradient of a weight to its master's. Called when it is complete for this backward pass."""
    assert weight.grad is not None
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad += weight.grad  # in float32
    weight.grad = None
