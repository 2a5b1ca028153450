"""The inside of `limited.py`: a process that calls one function for its owner, at the other end of a socket.

    python -P -m bapo.process.limited_worker FD module:function MEMORY_MB PLACE
    python -P -m bapo.process.limited_worker FD module:function MEMORY_MB PLACE OWNER OPTIONS

PLACE is a directory in which to look for the module last, and for what it imports (`found_in`), or empty.

A worker of the first kind is two processes, so that recovery from a hostile call costs a fork and not an import. The
keeper imports the function once and forks a child, and the child answers calls. When a call kills the child, the keeper
reports the cause and forks the next one:

    who waits           for what                        what unblocks it
    child               a request                       the request, or the end of the socket: the owner is gone
    keeper              the child's death               a crash, the timer, the owner's SIGTERM
    owner               a reply, or a report of death   either of them; its own clock, a little later than the timer

The kernel enforces the limits. The timer is SIGALRM with its default action, which ends the child even inside a C loop.
Nobody has to watch it, so no call outlives its time even if the owner is killed. The memory limit is RLIMIT_AS, counted
on top of what the imports already use. A child that has grown past half of it replies and is then replaced, so that no
call pays for what an earlier one left behind. Ctrl-C is for the owner and is ignored here.

The second kind serves code that does not survive a fork, as CUDA, threads and HTTP clients do not: one process, for
good. The function is called once with OPTIONS (JSON) and gives what to say of itself and what answers calls, several at
a time, or for several callers beside each other. Its owner watches the clock, so that the timer stays the code's own.
Memory is limited as data (RLIMIT_DATA), because CUDA reserves addresses without measure. OWNER is the end of a pipe on
which nothing is written: when the owner is gone, the kernel kills the process, even in a C loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from bapo.process import found_in

__all__ = ["DATA", "OUT_OF_MEMORY", "describe", "in_use", "receive", "send"]

OUT_OF_MEMORY = 77
"""Exit status of a child that ran out of memory."""
ADDRESSES, DATA = 0, 5
"""Columns of /proc/self/statm: address space, and what of it can be written and is nobody else's."""
MAX_CAUSE = 200
"""How many characters of an exception's message are passed on."""


def send(connection: socket.socket, message: Any) -> None:
    """Write one JSON message, preceded by its length."""
    connection.sendall(_encoded(message))


def receive(connection: socket.socket) -> Any:
    """Read one message. Raises EOFError at the end of the stream."""
    return json.loads(_exactly(connection, int.from_bytes(_exactly(connection, 8), "big")))


def main(arguments: list[str]) -> int:
    """The keeper: imports the function, then keeps a child alive until the owner hangs up."""
    descriptor, name, memory_mb, place, *lasting = arguments
    connection = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        module, _, attribute = name.partition(":")
        with found_in(place, module) if place else contextlib.nullcontext():
            function = getattr(importlib.import_module(module), attribute)
            if lasting:
                _die_with(int(lasting[0]))
                about, function = function(**json.loads(lasting[1]))
    except BaseException as error:
        send(connection, {"refused": str(error) if lasting and isinstance(error, ValueError) else describe(error)})
        return 1
    if lasting:
        send(connection, {"ready": about})
        return _serve_for_good(connection, function, int(memory_mb), beside=bool(about.get("beside")))
    busy = mmap.mmap(-1, 1)  # shared with the child: 1 while it works on a call
    child, stopping = 0, False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send(connection, {"ready": True})
    while not stopping:
        busy[0] = 0
        child = os.fork()
        if child == 0:
            _serve(connection, function, int(memory_mb), busy)
        signal.signal(signal.SIGTERM, stop)
        _, status = os.waitpid(child, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if status == 0:
            break
        if busy[0] and not stopping:
            try:
                send(connection, {"died": os.waitstatus_to_exitcode(status)})
            except OSError:
                break
    return 0


def _serve(connection: socket.socket, function: Callable[..., Any], memory_mb: int, busy: mmap.mmap) -> NoReturn:
    """The child: answers calls until the owner hangs up (status 0) or it must be replaced (any other status)."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        _give_way()
        at_start = in_use(ADDRESSES)
        if memory_mb and at_start:
            resource.setrlimit(resource.RLIMIT_AS, (at_start + memory_mb * 2**20,) * 2)
        grown = False
        while not grown:
            try:
                seconds, arguments = receive(connection)
            except (EOFError, OSError):
                status = 0
                break
            busy[0] = 1
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                reply = _encoded({"result": function(*arguments)})
            except MemoryError:
                raise
            except BaseException as error:
                reply = _encoded({"failure": describe(error)})
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(reply)
            busy[0] = 0
            grown = bool(memory_mb) and in_use(ADDRESSES) - at_start > memory_mb * 2**19
    except MemoryError:
        status = OUT_OF_MEMORY
    except BaseException:
        status = 1
    finally:
        os._exit(status)


def _serve_for_good(connection: socket.socket, function: Callable[..., Any], memory_mb: int, *, beside: bool) -> int:
    """Answer calls in this process until the owner hangs up. Each result is sent as soon as it is known.

    `beside`: the owner sends connections, each of which is served by a thread of its own.
    """
    _give_way()
    at_start = in_use(DATA)
    if memory_mb and at_start:
        resource.setrlimit(resource.RLIMIT_DATA, (at_start + memory_mb * 2**20,) * 2)

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            while True:
                try:
                    function(receive(connection), lambda *result: send(connection, result))
                except MemoryError:
                    os._exit(OUT_OF_MEMORY)
                send(connection, {"grown": bool(memory_mb) and in_use(DATA) - at_start > memory_mb * 2**19})

    if not beside:
        serve(connection)
        return 0
    while descriptors := socket.recv_fds(connection, 1, 1)[1]:
        threading.Thread(target=serve, args=[socket.socket(fileno=descriptors[0])], daemon=True).start()
    return 0


def _die_with(pipe: int) -> None:
    """Let the kernel kill this process when nobody can write on the pipe any more, where it knows how to (Linux)."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _give_way() -> None:
    """If the machine's memory runs out, this process is killed, and not the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def describe(error: BaseException) -> str:
    """The exception in one short line."""
    try:
        message = " ".join(str(error).split())
    except KeyboardInterrupt:
        raise
    except BaseException:
        message = ""
    kind = type(error).__name__
    return f"{kind}: {message[:MAX_CAUSE]}" if message else kind


def _encoded(message: Any) -> bytes:
    body = json.dumps(message, default=_as_data).encode()  # ASCII: any text survives, even lone surrogates
    return len(body).to_bytes(8, "big") + body


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        if not (part := connection.recv(min(count - len(data), 1 << 20))):
            raise EOFError
        data += part
    return data


def in_use(column: int) -> int:
    """Bytes of this kind that are in use; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    except OSError:
        return 0


def _as_data(value: object) -> Any:
    if is_dataclass(value):
        return vars(value)
    raise TypeError(f"a {type(value).__name__} cannot leave the sandbox. Return JSON data or a Score")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
