"""Ctrl-C and SIGTERM: one rule for every phase of every command, in one place.

    while                         the first signal                            the second one
    nothing needs tidying         the process ends at once                    -
    something does                KeyboardInterrupt is raised, and it ends    the process ends within END_SECONDS
    somebody listens (steps)      they are told, and finish what they do or   KeyboardInterrupt; it ends within the same
                                  raise StopAsked where they can leave it
    the work is done              nothing: the process is about to end        the process ends within END_SECONDS

The exit code is 130 and one line says what to do next; if the work was done, it is the code of the work. "Ends" means
that every process below this one ends with it. Nobody can delay that: not a function that swallows exceptions, not a
thread that never returns, not a library that tidies up. Python runs signal handlers only when the main thread comes
back from C, so a thread of ours hears of signals through a pipe that the kernel's signal writes to.

torchrun passes a Ctrl-C on to ranks that have heard it already. What a rank hears within PASSED_ON_SECONDS of the first
signal therefore counts as the same one.

Only `bapo` itself calls `watch`. Without it, `listening` still hears signals, and everything else here does nothing.

A process below this one is known by its id and the time it began, so a later process with the same id is safe. Where
there is no /proc, nobody is found; the children of ours then end because their connections to us do.

    python -P -m bapo.process.stops PID

is a watchdog: it ends everything that a process has started when that process ends, even by SIGKILL. A Ray that we
start has some twenty processes below ours. Most of them notice when it is killed; some do not.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = 130
"""The exit code of a command that was stopped."""
END_SECONDS = 1.0
"""How long after the second signal the process may still tidy up."""
KILL_SECONDS = 0.5
"""How long we look for processes below this one before it ends."""
PASSED_ON_SECONDS = 2.0
"""How long after the first signal torchrun may pass it on."""
STOPPED_SECONDS, FAILED_SECONDS = 1.0, 10.0
"""How long a process may take to end after its command has said that it was stopped, or that it failed."""
AGAIN_SECONDS = 0.01
"""How long after a Ctrl-C was dropped it is sent again: the destructor that it met has ended by then."""

SETTLE_SECONDS = 0.02
"""How long the kernel may take to hand the children of a killed process to us."""
LOOK_SECONDS = 1.0
"""How often the watchdog looks who is below its owner."""
GRACE_SECONDS = 5.0
"""How long the processes below a lost owner may take to end by themselves."""
_PR_SET_CHILD_SUBREAPER = 36

Process = tuple[int, int]
"""An id, and when the process began, in the kernel's clock ticks."""


class StopAsked(KeyboardInterrupt):
    """A stop that was asked for acts here, where the work can be left."""


class Phase(Enum):
    """What a signal means now."""

    END = "nothing needs tidying"
    RAISE = "something does"
    LISTEN = "somebody listens"
    ENDING = "a stop is under way"
    DONE = "the work is done"


class _State:
    """Where this process stands. There is one, because signals belong to the process."""

    watched = False
    phase = Phase.RAISE
    advice = ""
    code = STOPPED
    told = False  # the line about the stop was written
    cut_off = False  # KeyboardInterrupt was raised
    listener: Callable[[int], None] | None = None
    patient = False  # who listens decides about further signals, too
    heard = 0
    listener_told = False
    ours = 0  # signals that we sent to ourselves
    first = 0.0
    terminal: list[Any] | None = None


_now = _State()


def watch() -> None:
    """From now on, this process follows the rule above. Called once, in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # whoever started us wants it ignored
            signal.signal(number, _handle)
    os.register_at_fork(after_in_child=_forget)
    with suppress(Exception):  # no terminal
        import termios

        _now.terminal = termios.tcgetattr(0)
    _now.watched, _now.phase = True, Phase.END
    threading.Thread(target=_count, args=(reader,), name="stops", daemon=True).start()


def begin(phase: Phase, line: str) -> None:
    """A command begins: what a signal means, and what a person can do next if it is stopped."""
    _now.phase, _now.advice, _now.code, _now.told, _now.cut_off = phase, line, STOPPED, False, False


def enter(phase: Phase) -> None:
    """Say what a signal means from now on. A stop that is under way goes on."""
    if _now.phase is not Phase.ENDING:
        _now.phase = phase


def advise(line: str) -> None:
    """Say what a person can do next if the command is stopped from now on."""
    _now.advice = line


def advice() -> str:
    """What a person can do next; empty if nobody has said it."""
    return _now.advice


def asked() -> bool:
    """Whether a signal has asked this process to stop."""
    return _now.heard > 0 or _now.listener_told


def may_leave() -> bool:
    """Whether a signal has asked this process to stop while somebody listens, so that the work may be left."""
    return asked() and _now.phase is Phase.LISTEN


def stopping() -> bool:
    """Whether a stop is under way, so that an error may be its consequence."""
    return _now.phase is Phase.ENDING


def told() -> None:
    """The line about the stop is written."""
    _now.told = True


def done(code: int = 0) -> None:
    """The work is done, with this exit code: a signal cannot change it any more."""
    _now.phase, _now.code, _now.told = Phase.DONE, code, True


@contextmanager
def listening(listener: Callable[[int], None], *, patient: bool = False) -> Iterator[None]:
    """Inside, signals are told to the listener. `patient`: it also decides about the second one and those after it."""
    before = _now.phase, _now.listener, _now.patient
    handlers = {} if _now.watched else {number: signal.signal(number, _handle) for number in SIGNALS}
    _now.phase, _now.listener, _now.patient, _now.listener_told = Phase.LISTEN, listener, patient, False
    try:
        yield
    finally:
        if _now.phase is Phase.LISTEN:
            _now.phase = before[0]
        _now.listener, _now.patient = before[1:]
        _now.listener_told = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if handlers:
            _now.phase = before[0]


def at_once() -> NoReturn:
    """Raise KeyboardInterrupt, as the listener of a signal."""
    _now.phase, _now.cut_off = Phase.ENDING, True
    raise KeyboardInterrupt


def cut_off() -> None:
    """Who would tidy up at the end of this process would hang: when the command has ended, it ends at once."""
    _now.cut_off = True


def give_up(code: int, line: str) -> None:
    """The main thread hangs: end this process with this line and code, or with its own code if its work is done."""
    if not _now.watched:
        return
    if _now.phase is not Phase.DONE:
        _now.code, _now.told = code, True
        _write(f"bapo: {line}\n")
    end(_now.code)


@contextmanager
def none_lost() -> Iterator[None]:
    """A KeyboardInterrupt that is raised in a destructor is dropped by Python. Inside, it is sent again."""
    before = sys.unraisablehook

    def again() -> None:
        _now.ours += 1
        if _now.phase is Phase.ENDING:
            _now.phase = Phase.RAISE
        _thread.interrupt_main()

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            if not stopping():  # what breaks while we stop is no news
                before(dropped)
            return
        _after(AGAIN_SECONDS, again)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def leave(code: int) -> None:
    """The command has ended and said so. The process ends soon, whoever still works in it; now if it was cut off."""
    if not _now.watched:
        return
    done(code)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # libraries that tidy up need not report a Ctrl-C
    if _now.cut_off:
        end(code)
    if code:
        _after(STOPPED_SECONDS if code == STOPPED else FAILED_SECONDS, lambda: end(code))


def _after(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # there is no memory for a thread
        work()


def end(code: int) -> NoReturn:
    """End this process now, and every process below it. Restores the terminal."""
    _restore_terminal()
    if not _now.told:
        _now.told = True
        _write(f"bapo: stopped. {_now.advice}".rstrip() + "\n")
    with suppress(Exception):
        end_all_below(seconds=KILL_SECONDS)
    os._exit(code)


def _handle(number: int, _frame: object) -> None:
    """Runs in the main thread, between two instructions of Python."""
    if _now.phase is Phase.END:
        end(STOPPED)
    if _now.phase is Phase.RAISE:
        at_once()
    if _now.phase is Phase.LISTEN and _now.listener is not None:
        _now.listener_told = True
        _now.listener(number)


def _count(reader: int) -> None:
    """Runs in a thread of its own: ends the process after the second signal."""
    while True:
        for number in os.read(reader, 64):
            if number not in SIGNALS:
                continue
            if _now.ours:
                _now.ours -= 1
                continue
            if _now.heard and _passed_on():
                continue
            _now.heard += 1
            _now.first = _now.first or time.monotonic()
            if _now.heard > 1 and not (_now.patient and _now.phase is Phase.LISTEN):
                time.sleep(END_SECONDS)
                end(_now.code)


def _passed_on() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and time.monotonic() - _now.first < PASSED_ON_SECONDS


def _forget() -> None:
    """A process that is forked from ours has signals of its own."""
    if _now.watched:
        _now.watched = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _restore_terminal() -> None:
    """Undo what a live view has changed, unless another job has the terminal now."""
    with suppress(Exception):
        if _now.terminal is not None and os.tcgetpgrp(0) == os.getpgrp():
            import termios

            termios.tcsetattr(0, termios.TCSANOW, _now.terminal)
    with suppress(Exception):
        if os.isatty(1):
            _write("\x1b[?25h\n", 1)  # the cursor


def _write(text: str, descriptor: int = 2) -> None:
    """Write, but never wait for whoever reads."""
    with suppress(OSError):
        if select.select([], [descriptor], [], 0)[1]:
            os.write(descriptor, text.encode(errors="replace"))


# The processes below this one.


def processes() -> dict[Process, int]:
    """Every process of this machine, with the id of its parent."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(entry.name), int(fields[19])] = int(fields[1])
    return found


def below(owner: int) -> set[Process]:
    """All processes below this one, except the process that asks."""
    parents = processes()
    found: set[Process] = set()
    edge = {owner}
    while edge := {process[0] for process, parent in parents.items() if parent in edge and process not in found}:
        found |= {process for process in parents if process[0] in edge}
    return {process for process in found if process[0] != os.getpid()}


def end_all_below(*, seconds: float) -> None:
    """Kill every process below this one, and those that they start meanwhile; gives up after so many seconds."""
    with suppress(OSError, AttributeError):  # not on Linux
        import ctypes  # here: it imports struct, and the current directory may still be on the path when bapo begins

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # children of the killed become ours
    until = time.monotonic() + seconds
    while (left := below(os.getpid())) and time.monotonic() < until:
        _kill(left)
        time.sleep(SETTLE_SECONDS)


def _kill(found: Iterable[Process]) -> None:
    for pid, _ in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def guard(owner: int) -> None:
    """Wait for the end of this process, then end everybody that it had started, and whom these start meanwhile."""
    itself = [process for process in processes() if process[0] == owner]
    known: set[Process] = set()
    while itself and itself[0] in (now := processes()):
        known = (known | below(owner)) & now.keys()
        _wait_for_end(owner, LOOK_SECONDS)
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until:
        now, ids = processes(), {pid for pid, _ in known}
        known = {process for process, parent in now.items() if process in known or parent in ids}
        time.sleep(10 * SETTLE_SECONDS)
    _kill(known & processes().keys())


def _wait_for_end(owner: int, seconds: float) -> None:
    """Sleep so long, or until this process has ended: then its children's children can still be found."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and Path(f"/proc/{owner}").exists():
        time.sleep(SETTLE_SECONDS)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its owner hears them, too, and ends first
    guard(int(sys.argv[1]))
