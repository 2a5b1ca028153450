"""How a run ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bapo.learn.learner import Learner
from bapo.runs.write import RunDirectory
from bapo.train import checkpoint


def save(run: RunDirectory, step: int, learner: Learner, state: dict[str, Any], *, keep: int) -> None:
    """Everything to continue from after this step, the logs flushed and as long as they are now."""
    run.flush()
    checkpoint.save(run.path / "checkpoints", step, learner, state | {"logs": run.sizes()}, keep=keep)


@contextmanager
def stop_on_signal(stopping: list[str]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the step finish and be saved; the second one ends at once.

    Evaluations before and after training are not covered: they change nothing, so a signal ends them at once.
    """

    def ask(number: int, _frame: Any) -> None:
        if stopping:
            raise KeyboardInterrupt
        stopping.append(signal.Signals(number).name)
        print("\nstopping after this step; once more to stop at once", flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
