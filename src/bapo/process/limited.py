"""A function in a process of its own, under hard limits of wall-clock time and memory for each call.

    worker = Worker("bapo.tasks.verify.math:verify", memory_mb=1024)
    worker.call(5.0, ["72", r"… \\boxed{72}"])        # {"result": …}, or {"failure": …} with the cause

    what happened                                   the failure
    out of time                                     timeout after 5 s
    out of memory                                   memory limit of 1024 MB
    the process died                                crash: signal 11
    the function raised                             ValueError: …

This is the owner's end; `limited_worker.py` is the inside. The process imports the function once and is used for as
long as it lives. One that dies while it starts is started again, up to START_TRIES times. Its module is found in the
current directory if our own process looks there, too, but only after everything that is installed.

It has limits but is not a jail: it must not run code that a model wrote.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bapo.process.limited_worker import OUT_OF_MEMORY, receive, send

__all__ = ["CannotStart", "Lost", "Worker", "call_once"]

INSIDE = "bapo.process.limited_worker"
START_SECONDS = 120.0
"""How long a worker may take to import its function."""
START_TRIES = 3
"""How often in a row a worker may die while it starts."""
GRACE_SECONDS = 2.0
"""How long after the worker's own timer we kill it, and how long it may take to exit when asked to."""
OWN_PLACE = str(Path(__file__).parents[2])
"""Where bapo itself is installed."""


class CannotStart(ValueError):  # noqa: N818
    """A worker cannot be started, or its function cannot be imported."""


class Lost(Exception):  # noqa: N818
    """A process died or was ended, with results that are missing. Says why."""


class Worker:
    """Our end of one process. Starts it when it is needed, and again when it is lost.

    It serves one caller at a time, except that several may ask for `results` beside each other.
    """

    def __init__(self, function: str, memory_mb: int, options: dict[str, Any] | None = None) -> None:
        """`memory_mb`: the limit for a call, on top of what the imports use; 0 for none.

        `options`: the function is called with them once, and gives what answers calls in a process that never forks.
        """
        self.function, self.memory_mb, self.options = function, memory_mb, options
        self.name = function if options is None else options["name"]
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] | bool = False
        """Whether it answers calls; with options, what the function says of itself."""
        self.busy = False
        """Whether results are missing that nobody may wait for any more."""
        self._starting, self._callers = threading.Lock(), 0

    def start(self) -> None:
        """Start the process, without waiting for its imports."""
        self.connection, theirs = socket.socketpair()
        here, nowhere = os.getcwd(), subprocess.DEVNULL
        last = here if here in sys.path or "" in sys.path else ""
        installed = [path for path in sys.path if path not in ("", here) or path == OWN_PLACE]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(installed), "PYTHONHASHSEED": "0"}
        # -P, or the current directory would be the first place to look
        command = [sys.executable, "-P", "-m", INSIDE, str(theirs.fileno()), self.function, str(self.memory_mb), last]
        passed = [theirs.fileno()]
        with theirs, ExitStack() as kept:
            if self.options is None:
                environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            else:
                read, self.owner = os.pipe()
                kept.callback(os.close, read)
                passed.append(read)
                command += [str(read), json.dumps(self.options)]
            self.process = subprocess.Popen(  # noqa: S603
                command,
                pass_fds=passed,
                env=environment,
                start_new_session=True,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
            )

    def wait_until_ready(self) -> None:
        """Wait until the function is imported. Raises CannotStart if that fails."""
        cause = ""
        for _ in range(START_TRIES):
            if self.ready:
                return
            try:
                if self.process is None:
                    self.start()
                self.connection.settimeout(START_SECONDS)
                greeting = receive(self.connection)
            except TimeoutError:
                self.close()
                raise CannotStart(
                    f"a worker for {self.name} has not imported it after {START_SECONDS:g} s. Make the import "
                    "faster, or stop other programs."
                ) from None
            except (OSError, EOFError, ValueError) as error:
                cause = f"{type(error).__name__}, exit status {self.close()}"
                continue
            if "refused" in greeting:
                self.close()
                told = "" if self.options is not None else f"{self.function} cannot be used: "
                raise CannotStart(told + greeting["refused"])
            self.ready = greeting["ready"]
            return
        raise CannotStart(
            f"a worker for {self.name} died {START_TRIES} times while it started (the last time: {cause}). The "
            "machine may be out of memory or processes: use fewer workers, or stop other programs. Or the import of "
            "the function ends its process: try it by hand."
        )

    def call(self, seconds: float, arguments: Sequence[Any]) -> dict[str, Any]:
        """`{"result": …}` or `{"failure": …}`. Raises CannotStart if the worker was lost and cannot be started."""
        self.wait_until_ready()
        self.connection.settimeout(seconds + GRACE_SECONDS)
        try:
            send(self.connection, [seconds, arguments])
            reply: dict[str, Any] = receive(self.connection)
        except TimeoutError:
            self.close()
            return {"failure": f"timeout after {seconds:g} s"}
        except (OSError, EOFError, ValueError):
            return {"failure": self._cause(self.close(), seconds)}
        except BaseException:  # Ctrl-C: an answer that nobody waits for must not be the next one's
            self.close()
            raise
        return {"failure": self._cause(reply["died"], seconds)} if "died" in reply else reply

    def results(self, calls: Sequence[Any], seconds: float, *, beside: bool = False) -> Iterator[tuple[int, Any]]:
        """The result of each call with its index, as soon as it is known: only with options.

        `beside`: on a connection of its own, for a function that answers several callers at once. All of them are lost
        with the process. Raises Lost if it dies or no result comes for so long, and CannotStart if it cannot be started
        again.
        """
        with self._starting:
            self.wait_until_ready()
            process, connection = self.process, self._another() if beside else self.connection
            self._callers, self.busy = self._callers + 1, True
        connection.settimeout(seconds)
        reply: dict[str, Any] = {"grown": False}
        try:
            send(connection, calls)
            while isinstance(reply := receive(connection), list):
                yield reply[0], reply[1]
        except TimeoutError:
            self._close(process)
            raise Lost(f"timeout after {seconds:g} s") from None
        except (OSError, EOFError, ValueError):
            self.busy = False  # it ends by itself
            raise Lost(self._cause(self._close(process), seconds)) from None
        except BaseException:  # Ctrl-C, or nobody asks for the other results
            self._close(process)
            raise
        finally:
            if beside:
                connection.close()
            with self._starting:
                self._callers -= 1
                if not self._callers and self.process is process:
                    self.busy = False
                    if isinstance(reply, dict) and reply["grown"]:
                        self.close()

    def _another(self) -> socket.socket:
        """Another connection to the process."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.connection, [b"+"], [theirs.fileno()])
        return mine

    def _close(self, process: subprocess.Popen[bytes] | None) -> int:
        """End this process, unless it was replaced meanwhile."""
        with self._starting:
            return self.close() if self.process is process else 0

    def hang_up(self) -> None:
        """Close the connection: an idle worker then exits by itself, and a thread of ours that waits for it stops."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> int:
        """End the process, whatever it is doing; a call starts another one. Returns the exit status.

        An idle one that never forks may clean up. What it has started itself ends with it.
        """
        process, self.process, self.ready = self.process, None, False
        if process is None:
            return 0
        self.hang_up()
        self.connection.close()
        with suppress(OSError):
            if self.options is None:
                process.terminate()
        try:
            return process.wait(0 if self.busy else GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()
        finally:
            if self.options is not None:
                os.close(self.owner)
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _cause(self, status: int, seconds: float) -> str:
        """Why the process died, from its exit status as subprocess gives it: negative for a signal."""
        if status == -signal.SIGALRM and self.options is None:
            return f"timeout after {seconds:g} s"
        if status == OUT_OF_MEMORY:
            return f"memory limit of {self.memory_mb} MB"
        return f"crash: signal {-status}" if status < 0 else f"crash: exit status {status}"


def call_once(function: str, *arguments: Any, seconds: float) -> Any:
    """The result of `module:function` for JSON arguments, computed in a process that ends with the call.

    The hash seed of that process is fixed, so that code which iterates over sets gives the same result in every run.
    Raises ValueError with the cause if the call fails.
    """
    worker = Worker(function, memory_mb=0)
    try:
        reply = worker.call(seconds, arguments)
    finally:
        worker.close()
    if "result" not in reply:
        raise ValueError(f"{function}: {reply['failure']}")
    return reply["result"]
