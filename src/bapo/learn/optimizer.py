"""AdamW for weights of any precision, in two forms that compute the same and share their checkpoints.

    float32     plain AdamW.
    16 bit      AdamW on a float32 copy of each weight, the master; the 16-bit weight is its rounded image.

Why masters: bfloat16 has 8 significant bits, so an update smaller than about 1/500 of a weight rounds away. The updates
of reinforcement learning (lr 1e-6 on weights of 1e-2) are nearly always smaller than that. Gradients are summed in
float32 for the same reason: each micro-batch's gradient is added to the master's as soon as it is complete, and then
dropped.

On a GPU, everything that belongs to 16-bit weights lies in five long vectors (`FlatOptimizer`):

    weights     16 bit, what passes read: each parameter of the model is a view of its part
    masters     float32, of which the weights are the rounded image
    gradients   float32; the fused layers add to them directly (`main_grad`), other gradients are moved there
    moments     two of float32

So the norm of all gradients is one launch, a step is one more, and weights that a pass multiplies with together lie
together.

Per parameter, in bytes: weight 2, master 4, gradient 4, moments 8; together 18 (float32: 16). With `offload`, masters
and moments are in the host's memory, and 6 bytes are left on the GPU. A part of them at a time comes over, is changed
and goes back (`Conveyor`):

    lane 0    in   work   out   in   work   out
    lane 1         in   work   out   in   work   out
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

ALIGNMENT = 64
"""Numbers. Every weight in a long vector begins at a multiple, so that kernels load it in whole vectors."""
EPS = 1e-8
CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as torch's clip_grad_norm_ does."""
PART = 2**24
"""Numbers of an offloaded part: 64 MiB of float32."""
LANES = 2
PAGE = 4096
"""Bytes. Memory is locked in whole pages, and no page may be locked twice."""


def optimizer_for(
    parameters: Iterable[Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    offload: bool = False,  # keep masters and moments on the host
) -> Optimizer:
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


class Optimizer:
    """AdamW over masters. Matrices decay, vectors (norms, biases) do not."""

    masters: list[Parameter]
    """In the order of `weights`; a float32 weight is its own master."""

    def __init__(
        self, parameters: Iterable[Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        decayed = self._take(parameters)
        self.masters = [p if p.dtype == torch.float32 else Parameter(p.detach().float()) for p in self.weights]
        self._rounded = [(p, m) for p, m in zip(self.weights, self.masters, strict=True) if m is not p]
        for weight, master in self._rounded:
            weight.register_post_accumulate_grad_hook(partial(_move_gradient, master))  # type: ignore[no-untyped-call]
        self._adamw = torch.optim.AdamW(
            [
                {"params": self.masters[:decayed], "weight_decay": weight_decay},
                {"params": self.masters[decayed:], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=betas,
            fused=True if self.masters and all(m.is_cuda for m in self.masters) else None,
        )

    def _take(self, parameters: Iterable[Parameter]) -> int:
        """Keep the trained ones as `weights`, those that decay first. Returns how many decay."""
        trained = [p for p in parameters if p.requires_grad]
        decayed = [p for p in trained if p.dim() >= 2]
        self.weights = [*decayed, *(p for p in trained if p.dim() < 2)]
        taken = any(weight._post_accumulate_grad_hooks for weight in self.weights if weight.dtype != torch.float32)
        assert not taken, "another optimizer already takes the gradients of these 16-bit weights"
        return len(decayed)

    def clip(self, norm: float) -> Tensor:
        """Let the step scale the gradients down to at most this norm. Returns the norm they have now, on the device.

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


@torch.no_grad()
def _move_gradient(master: Parameter, weight: Tensor) -> None:
    """Add the gradient of a weight to its master's. Called when it is complete for this backward pass."""
    assert weight.grad is not None
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad += weight.grad  # in float32
    weight.grad = None


class FlatOptimizer(Optimizer):
    """The same for 16-bit weights on a GPU, in long vectors."""

    def __init__(
        self, parameters: Iterable[Parameter], *, betas: tuple[float, float], weight_decay: float, offload: bool = False
    ) -> None:
        decayed = self._take(parameters)
        self.betas, self.weight_decay = betas, weight_decay
        rooms = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in self.weights]
        self._begins = [sum(rooms[:i]) for i in range(len(rooms))]
        self._decayed = sum(rooms[:decayed])
        device, total = self.weights[0].device, sum(rooms)
        self._weights = torch.zeros(total, dtype=self.weights[0].dtype, device=device)
        self._gradients = torch.zeros(total, dtype=torch.float32, device=device)
        self._conveyor = Conveyor(3, total, device) if offload else None
        states = self._conveyor.vectors if self._conveyor else [torch.zeros_like(self._gradients) for _ in range(3)]
        self._masters, self._means, self._squares = states
        self._steps = torch.zeros(())  # on the host
        self._has_moments = False
        self._shrink = torch.ones((), device=device)
        self.masters = []
        self._moments: dict[Parameter, dict[str, Tensor]] = {}
        places = zip(*map(self._views, (self._weights, self._gradients, *states)), strict=True)
        for parameter, (weight, gradient, master, mean, square) in zip(self.weights, places, strict=True):
            weight.copy_(parameter.detach())
            master.copy_(weight)
            parameter.data = weight
            parameter.main_grad = gradient  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(partial(_add_gradient, gradient))  # type: ignore[no-untyped-call]
            self.masters.append(Parameter(master))
            self._moments[self.masters[-1]] = {"step": self._steps, "exp_avg": mean, "exp_avg_sq": square}

    def _views(self, vector: Tensor) -> list[Tensor]:
        """The part of each weight."""
        return [vector[b : b + p.numel()].view(p.shape) for b, p in zip(self._begins, self.weights, strict=True)]

    @torch.no_grad()
    def clip(self, norm: float) -> Tensor:
        """Let the step scale the gradients down to at most this norm. Returns the norm they have now, on the device."""
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
        self._weights.copy_(self._masters)

    def moments(self, master: Parameter) -> dict[str, Tensor]:
        """What AdamW remembers of one of the masters: exp_avg, exp_avg_sq and step; nothing before the first update."""
        return self._moments[master] if self._has_moments else {}

    def make_moments(self, master: Parameter) -> dict[str, Tensor]:
        """The same, zeros before the first update: to be filled with what was saved."""
        self._has_moments = True
        return self._moments[master]

    def forget_moments(self) -> None:
        """Be as before the first update."""
        for vector in (self._means, self._squares, self._steps):
            vector.zero_()
        self._has_moments = False


@torch.no_grad()
def _add_gradient(gradient: Tensor, weight: Tensor) -> None:
    """Add the gradient that torch made for a weight, if it made one, to its part. Called at the end of a pass."""
    if weight.grad is not None:
        gradient += weight.grad  # in float32
        weight.grad = None


class Conveyor:
    """Vectors of zeros on the host, float32 and of one length, which are brought to the device and back in parts.

    Two parts are on their way at a time, each on a stream of its own, so one comes in while the other goes out. The
    host's memory is page-locked, because the device's copy engines reach no other memory by themselves. We lock memory
    that torch has allocated, because torch's own allocator of locked memory rounds up to the next power of two.

    Work is done number by number, so where the parts are cut changes nothing.
    """

    def __init__(self, count: int, length: int, device: torch.device, *, part: int = PART) -> None:
        self.length, self.part = length, part
        pages = -(-4 * count * length // PAGE) * PAGE
        room = torch.zeros(pages + PAGE, dtype=torch.uint8)
        begin = -room.data_ptr() % PAGE
        room = room[begin : begin + pages]  # whole pages, which hold nothing else
        if device.type == "cuda":
            _lock(room)
            unlock = torch.cuda.cudart().cudaHostUnregister  # type: ignore[no-untyped-call]
            weakref.finalize(self, unlock, room.data_ptr())
        numbers = room.view(torch.float32)
        self.vectors = [numbers[i * length : (i + 1) * length] for i in range(count)]
        on_gpu = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(LANES)]  # type: ignore[no-untyped-call]
        self._buffers = torch.empty(LANES, count, min(part, length), device=device)

    @torch.no_grad()
    def run(self, work: Callable[..., None]) -> None:
        """Call `work(begin, *parts)` for all parts, which it changes. Returns when the host has everything back.

        `work` sees what the current stream did before.
        """
        streams = [stream for stream in self._streams if stream is not None]  # none on a CPU
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        for number, begin in enumerate(range(0, self.length, self.part)):
            lane = number % LANES
            homes = [vector[begin : begin + self.part] for vector in self.vectors]
            with torch.cuda.stream(self._streams[lane]):
                places = zip(self._buffers[lane], homes, strict=True)
                parts = [buffer[: len(home)].copy_(home, non_blocking=True) for buffer, home in places]
                work(begin, *parts)
                for home, part in zip(homes, parts, strict=True):
                    home.copy_(part, non_blocking=True)
        for stream in streams:
            stream.synchronize()


def _lock(room: Tensor) -> None:
    """Keep these pages where they are. Whoever calls this must unlock them."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(room.data_ptr(), len(room), 0)
    if int(error) != 0:
        raise MemoryError(
            f"learn.offload_optimizer=True needs {len(room) / 2**30:.1f} GiB of the host's memory that stays in place, "
            f"and CUDA cannot lock that much (error {int(error)}). Use a machine with more memory, raise the limit of "
            "locked memory (ulimit -l), or set learn.offload_optimizer=False."
        )
