"""Verifiers in processes of their own, where no answer can stall or kill the training.

    with VerifierPool("bapo.tasks.verify.math:verify", workers=4, seconds=5, memory_mb=1024) as pool:
        pool.scores([("72", r"… \\boxed{72}"), …])          # a Score each, in order

A model under training will sooner or later write 9^{9^{9^{9}}}, and a verifier that computes with answers will try to
evaluate it. So a verifier is a pure function `verify(answer, response) -> Score`, named as module:function, and workers
(`bapo.tasks.verify.worker`) call it under hard limits of wall-clock time and memory for each answer:

    what happened                                   the Score's failure
    out of time                                     timeout after 5 s
    out of memory                                   memory limit of 1024 MB
    the process died                                crash: signal 11
    the function raised                             ValueError: …

None of these is a reward of 0: the verifier could not tell. A verifier that catches its own MemoryError decides for
itself. A worker imports its verifier once, never imports torch, and is used for as long as it lives. Equal pairs are
verified once per call. A verifier in the current directory is found if our own process looks there, too, but only
after everything that is installed. In our process, one thread per worker feeds the worker and waits for it. The pool
serves one caller at a time, and other callers wait until that call returns.

A worker that dies while it starts is started again, up to START_TRIES times. Responses are failures if no worker can be
started for them.

What it does not do: it never verifies a response twice, and it must not run code that a model wrote, because a worker
has limits but is not a jail.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bapo.tasks.verify.worker import LARGEST_REWARD, OUT_OF_MEMORY, receive, send
from bapo.types import Score

__all__ = ["VerifierPool", "call_once", "default_workers"]

WORKER = "bapo.tasks.verify.worker"
START_SECONDS = 120.0
"""How long a worker may take to import its verifier."""
START_TRIES = 3
"""How often in a row a worker may die while it starts."""
GRACE_SECONDS = 2.0
"""How long after the worker's own timer we kill it, and how long it may take to exit when asked to."""
MAX_DEFAULT_WORKERS = 16
OWN_PLACE = str(Path(__file__).parents[3])
"""Where bapo itself is installed."""


def default_workers() -> int:
    """One worker per core that this process may use, up to 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_DEFAULT_WORKERS))


class VerifierPool:
    """Workers that all call one verifier. They end with `close`, with the `with` block, or with the process."""

    def __init__(
        self, verifier: str, *, workers: int | None = None, seconds: float = 5.0, memory_mb: int = 1024
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers} is too few. Give at least 1, or leave it out for one per core.")
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"seconds={seconds} cannot limit the time of an answer. Give a positive, finite number.")
        if memory_mb < 64:
            raise ValueError(f"memory_mb={memory_mb} is too little for any verifier. Allow at least 64.")
        self.verifier, self.seconds, self.memory_mb = verifier, seconds, memory_mb
        self._lock = threading.Lock()  # a worker serves one caller at a time
        self._workers = [_Worker(verifier, memory_mb) for _ in range(workers or default_workers())]
        self._finalizer = weakref.finalize(self, _close_all, self._workers, os.getpid())
        try:
            self._workers[0].wait_until_ready()
        except BaseException:
            self.close()
            raise

    def scores(self, responses: Sequence[tuple[Any, str]]) -> list[Score]:
        """The score that the verifier gives each (answer, response), in order. No response text makes it raise."""
        with self._lock:
            return self._scores(responses)

    def _scores(self, responses: Sequence[tuple[Any, str]]) -> list[Score]:
        if not self._finalizer.alive:
            raise ValueError(f"the pool of {self.verifier} was closed and cannot score any more. Make a new one.")
        keys = [json.dumps(pair) for pair in responses]
        work: queue.SimpleQueue[tuple[str, tuple[Any, str]]] = queue.SimpleQueue()
        for item in dict(zip(keys, responses, strict=True)).items():
            work.put(item)
        found: dict[str, Score] = {}
        unable = ""

        def drain(worker: _Worker) -> None:
            nonlocal unable
            with contextlib.suppress(queue.Empty):
                while True:
                    key, pair = work.get_nowait()
                    try:
                        found[key] = self._score(worker.call(self.seconds, pair))
                    except CannotStart as error:
                        unable = str(error)
                        work.put((key, pair))  # for another worker, if one is left
                        return

        busy = self._workers[: min(len(self._workers), work.qsize())]
        with ThreadPoolExecutor(max(1, len(busy))) as threads:
            try:
                for finished in [threads.submit(drain, worker) for worker in busy]:
                    finished.result()
            except BaseException:  # Ctrl-C: no thread may keep waiting
                with contextlib.suppress(queue.Empty):
                    while True:
                        work.get_nowait()
                _close_all(busy, os.getpid())
                raise
        return [found.get(key) or Score(None, failure=unable) for key in keys]

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._finalizer()

    def _score(self, reply: dict[str, Any]) -> Score:
        if "result" not in reply:
            return Score(None, failure=reply["failure"])
        try:
            score = Score(**reply["result"])
            if score.reward is None:
                return score
            if abs(score.reward) <= LARGEST_REWARD:
                return replace(score, reward=float(score.reward))
        except (TypeError, OverflowError):
            pass
        return Score(None, failure=f"{self.verifier} returned {json.dumps(reply['result'])[:100]}; it must be a Score")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def call_once(function: str, *arguments: Any, seconds: float) -> Any:
    """The result of `module:function` for JSON arguments, computed in a process that ends with the call.

    The hash seed of that process is fixed, so that code which iterates over sets gives the same result in every run.
    Raises ValueError with the cause if the call fails.
    """
    worker = _Worker(function, 0)
    try:
        worker.wait_until_ready()
        reply = worker.call(seconds, arguments)
    finally:
        worker.close()
    if "result" not in reply:
        raise ValueError(f"{function}: {reply['failure']}")
    return reply["result"]


class CannotStart(ValueError):  # noqa: N818
    """A worker cannot be started, or its verifier cannot be imported."""


class _Worker:
    """Our end of one worker process. Starts it, and starts it again when it is lost."""

    def __init__(self, function: str, memory_mb: int) -> None:
        self.function, self.memory_mb = function, memory_mb
        self.ready = False
        self._start()

    def wait_until_ready(self) -> None:
        """Wait until the worker has imported the function; start it again if it dies before. CannotStart: it cannot."""
        cause = ""
        for _ in range(START_TRIES):
            if self.ready:
                return
            try:
                if self.process is None:
                    self._start()
                self.connection.settimeout(START_SECONDS)
                greeting = receive(self.connection)
            except TimeoutError:
                self._end()
                raise CannotStart(
                    f"a worker for {self.function} has not imported it after {START_SECONDS:g} s. Make the import "
                    "faster, or stop other programs."
                ) from None
            except (OSError, EOFError, ValueError) as error:
                cause = f"{type(error).__name__}, exit status {self._end()}"
                continue
            if "refused" in greeting:
                self._end()
                raise CannotStart(f"the verifier {self.function} cannot be used: {greeting['refused']}")
            self.ready = True
            return
        raise CannotStart(
            f"a worker for {self.function} died {START_TRIES} times while it started (the last time: {cause}). The "
            "machine may be out of memory or processes: use fewer workers, or stop other programs. Or the import of "
            "the verifier ends its process: try it by hand."
        )

    def call(self, seconds: float, arguments: Sequence[Any]) -> dict[str, Any]:
        """`{"result": …}` or `{"failure": …}`. CannotStart: the worker was lost and cannot be started again."""
        self.wait_until_ready()
        self.connection.settimeout(seconds + GRACE_SECONDS)
        try:
            send(self.connection, [seconds, arguments])
            reply: dict[str, Any] = receive(self.connection)
        except TimeoutError:
            self._end()
            return {"failure": f"timeout after {seconds:g} s"}
        except (OSError, EOFError, ValueError):
            return {"failure": _cause(self._end(), seconds, self.memory_mb)}
        if "died" in reply:
            return {"failure": _cause(reply["died"], seconds, self.memory_mb)}
        return reply

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._end()

    def hang_up(self) -> None:
        """Close the connection: an idle worker then exits by itself, and a thread of ours that waits for it stops."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _start(self) -> None:
        self.connection, theirs = socket.socketpair()
        here = os.getcwd()
        found_here = here in sys.path or "" in sys.path
        installed = [path for path in sys.path if path not in ("", here) or path == OWN_PLACE]
        environment = {
            **os.environ,
            **{"PYTHONPATH": os.pathsep.join(installed), "PYTHONHASHSEED": "0"},
            **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        }
        with theirs:
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(  # noqa: S603
                [
                    sys.executable,
                    "-P",  # or the current directory would be the first place to look
                    "-m",
                    WORKER,
                    str(theirs.fileno()),
                    self.function,
                    str(self.memory_mb),
                    here if found_here else "",
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def _end(self) -> int:
        """Hang up, wait for the worker to exit, and kill it if it does not. Returns its exit status."""
        process, self.process, self.ready = self.process, None, False
        self.hang_up()
        self.connection.close()
        if process is None:
            return 0
        with contextlib.suppress(OSError):
            process.terminate()
        try:
            return process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def _cause(status: int, seconds: float, memory_mb: int) -> str:
    """Why a worker died, from its exit status as subprocess gives it: negative for a signal."""
    if status == -signal.SIGALRM:
        return f"timeout after {seconds:g} s"
    if status == OUT_OF_MEMORY:
        return f"memory limit of {memory_mb} MB"
    return f"crash: signal {-status}" if status < 0 else f"crash: exit status {status}"


def _close_all(workers: Sequence[_Worker], owner: int) -> None:
    """End all workers. A process forked from their owner leaves them alone."""
    if os.getpid() == owner:
        for worker in workers:
            worker.hang_up()  # so that all of them exit at the same time
        for worker in workers:
            worker.close()
