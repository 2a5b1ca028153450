"""A reward function runs in our process. What it does to the process ends with its call.

It may change the working directory, to which relative paths refer; close or replace the standard streams, which others
write to; and switch gradients off, which the learner needs. All of that is undone, so that training goes on unharmed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STREAMS = (1, 2)


@contextmanager
def unharmed() -> Iterator[None]:
    """Afterwards, working directory, standard streams and gradients are as they were before."""
    where, streams = os.getcwd(), (sys.stdout, sys.stderr)
    kept = {descriptor: os.dup(descriptor) for descriptor in STREAMS if _is_open(descriptor)}
    gradients = _gradients()
    for stream in streams:
        with suppress(AttributeError, TypeError):
            stream.close = stream.flush  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stream in streams:
            with suppress(AttributeError, TypeError):
                del stream.close
        for descriptor, copy in kept.items():
            if not _is_open(descriptor) or not os.path.samestat(os.fstat(descriptor), os.fstat(copy)):
                os.dup2(copy, descriptor)
            os.close(copy)
        sys.stdout, sys.stderr = streams
        with suppress(OSError):
            os.chdir(where)
        if _gradients() is not gradients and (torch := sys.modules.get("torch")) is not None:
            torch.set_grad_enabled(gradients)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _gradients() -> bool:
    """Whether gradients are on in this thread. They are where torch is not loaded yet."""
    torch = sys.modules.get("torch")
    return True if torch is None else bool(torch.is_grad_enabled())
