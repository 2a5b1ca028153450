"""Long vectors in the host's memory that a GPU works on: a part at a time comes over, is changed and goes back.

    lane 0    in   work   out   in   work   out
    lane 1         in   work   out   in   work   out

Two parts are on their way at a time, each on a stream of its own, so one comes in while the other goes out. The host's
memory is page-locked, because the device's copy engines reach no other memory by themselves. We lock memory that torch
has allocated, because torch's own allocator of locked memory rounds up to the next power of two.

Work is done number by number, so where the parts are cut changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PART = 2**24
"""Numbers of a part: 64 MiB of float32."""
LANES = 2
PAGE = 4096
"""Bytes. Memory is locked in whole pages, and no page may be locked twice."""


@dataclass(frozen=True)
class _Lane:
    stream: torch.cuda.Stream | None  # None on a CPU
    buffers: list[Tensor]  # on the device, one for each vector


class Conveyor:
    """Vectors of zeros on the host, float32 and of one length, which are brought to the device and back in parts."""

    def __init__(self, count: int, length: int, device: torch.device, *, part: int = PART) -> None:
        self.length, self.part = length, part
        room = _whole_pages(4 * count * length)
        if device.type == "cuda":
            _lock(room)
            unlock = torch.cuda.cudart().cudaHostUnregister  # type: ignore[no-untyped-call]
            weakref.finalize(self, unlock, room.data_ptr())
        numbers = room.view(torch.float32)
        self.vectors = [numbers[i * length : (i + 1) * length] for i in range(count)]
        self._lanes = [
            _Lane(_stream(device), [torch.empty(min(part, length), device=device) for _ in range(count)])
            for _ in range(LANES)
        ]

    @torch.no_grad()
    def run(self, work: Callable[..., None]) -> None:
        """Call `work(begin, *parts)` for all parts, which it changes. Returns when the host has everything back.

        `work` sees what the current stream did before.
        """
        for lane in self._lanes:
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream(lane.stream.device))
        for number, begin in enumerate(range(0, self.length, self.part)):
            lane = self._lanes[number % LANES]
            homes = [vector[begin : begin + self.part] for vector in self.vectors]
            with torch.cuda.stream(lane.stream):
                places = zip(lane.buffers, homes, strict=True)
                parts = [buffer[: len(home)].copy_(home, non_blocking=True) for buffer, home in places]
                work(begin, *parts)
                for home, part in zip(homes, parts, strict=True):
                    home.copy_(part, non_blocking=True)
        for lane in self._lanes:
            if lane.stream is not None:
                lane.stream.synchronize()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _whole_pages(size: int) -> Tensor:
    """Zeros of at least so many bytes, on pages that hold nothing else."""
    pages = -(-size // PAGE) * PAGE
    room = torch.zeros(pages + PAGE, dtype=torch.uint8)
    begin = -room.data_ptr() % PAGE
    return room[begin : begin + pages]


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
