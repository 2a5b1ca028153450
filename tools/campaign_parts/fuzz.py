"""Fuzzing: random input of every kind, each of which must end in a result or in one of our errors.

A family is a hypothesis strategy for cases, and a function that does with a case what a command would do. Cases run in
forks, a chunk at a time. A case that takes too long is a hang; a fork that dies is a silent exit; an exception that is
neither a BapoError nor a ValueError that our own code raised in words is a foreign traceback. Nothing is shrunk: what
failed is kept as it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

import bapo
from bapo.config.errors import BapoError
from campaign_parts import forks
from campaign_parts.outcomes import Failed, Kind, Tally, tail

CASE_SECONDS = 20
"""How much CPU time a case may take."""
WALL_SECONDS = 240
"""How long a case may take, though it may have to wait for a CPU."""
STUCK_SECONDS = 400
"""How long a fork may be silent before it is killed: a case that hangs where Python cannot interrupt it."""
MEMORY = 6 << 30
"""How much address space a fork may use on top of what it begins with."""
OURS = str(Path(bapo.__file__).parent)
FEWEST_WORDS = 3


@dataclass(frozen=True)
class Family:
    """One kind of input."""

    share: int
    """Its part of all cases."""
    cases: SearchStrategy[Any]
    run: Callable[[Any, Path], None]
    """Returns, or raises. The second argument is the working directory, which is empty before every case."""
    chunk: int = 500
    """How many cases a fork runs."""


class TooLong(BaseException):
    """The deadline of a case."""


class Refused(BapoError):  # noqa: N818
    """An error of ours that a command showed: its exit code and its words."""


def fuzz(families: dict[str, Family], total: int, tally: Tally, root: Path, *, until: float, only: str) -> None:
    """So many cases, divided among the families, as long as there is time."""
    chosen = {name: family for name, family in families.items() if only in name}
    shares = sum(family.share for family in chosen.values())
    left = {name: max(1, total * family.share // shares) for name, family in chosen.items()}
    number = 0
    while any(left.values()) and time.monotonic() < until:
        for name, family in chosen.items():
            count = min(left[name], family.chunk)
            if count and time.monotonic() < until:
                number += 1
                left[name] -= count
                _chunk(f"fuzz {name}", family, count, tally, root, number, until)
                tally.progress(f"fuzz {name}")


def command(*words: str) -> None:
    """Call `bapo WORDS` in this process; Refused if it ends in an error of ours."""
    from bapo.cli import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(words))
    if code:
        raise Refused(err.getvalue())
    if not out.getvalue().strip():
        raise AssertionError("the command ended with code 0 and without a word")


def parsed(function: Callable[[], Any]) -> Any:
    """What a function returns that may end in the parser's own exit."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
            return function()
    except SystemExit:
        raise Refused(err.getvalue()) from None


def _chunk(name: str, family: Family, count: int, tally: Tally, root: Path, number: int, until: float) -> None:
    """Run cases in a fork and count what came of them."""
    ours, theirs = os.pipe()
    scratch = root / f"chunk-{number}"
    scratch.mkdir()
    not_ours = forks.children()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ours)
            os.setsid()
            _cases(family, count, tally.seed * 1_000_003 + number, theirs, scratch, until)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(70)
    os.close(theirs)
    place = f"seed {tally.seed}, chunk {number}"
    problem = None
    for line in _lines(ours):
        if line is None:
            problem = Failed(Kind.HANG, f"a case could not be interrupted:\n{_last(scratch)}")
            break
        match json.loads(line):
            case ["result"]:
                tally.add(name, equal=1)
            case ["ours"]:
                tally.add(name, our_errors=1)
            case [kind, what]:
                tally.fail(name, Failed(Kind(kind), what), place)
    forks_end(pid)
    status = os.waitpid(pid, 0)[1]
    if problem is None and os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
        code = os.waitstatus_to_exitcode(status)
        problem = Failed(Kind.SILENT, f"the process died with code {code} in this case:\n{_last(scratch)}")
    if problem is not None:
        tally.fail(name, problem, place)
    forks.clear_orphans(5, spared=not_ours)
    shutil.rmtree(scratch, ignore_errors=True)


def forks_end(pid: int) -> None:
    """Kill a fork with all in its session, if it has not ended by itself."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    until = time.monotonic() + 2
    while ended is None and time.monotonic() < until:
        time.sleep(0.01)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        os.killpg(pid, signal.SIGKILL)


def _lines(descriptor: int) -> Iterator[str | None]:
    """The lines that a fork writes; None if it is silent for too long."""
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        rest = b""
        while True:
            if not select.select([pipe], [], [], STUCK_SECONDS)[0]:
                yield None
                return
            data = pipe.read(65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode() for line in lines)


def _last(scratch: Path) -> str:
    try:
        return tail((scratch / "case").read_text(errors="replace")[:4000])
    except OSError:
        return "    (no case had begun)"


def _cases(family: Family, count: int, number: int, pipe: int, scratch: Path, until: float) -> None:
    """Generate cases and report the end of each. Runs in a fork."""
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGPROF, _too_long)
    inside = scratch / "files"

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(family.cases)
    def one(case: Any) -> None:
        if time.monotonic() > until:
            return
        inside.mkdir()
        told = repr(case)[:20_000]
        (scratch / "case").write_text(told, errors="replace")
        os.chdir(inside)
        outcome = _outcome(family.run, case, inside, told)
        os.chdir(scratch)
        os.write(pipe, json.dumps(outcome).encode() + b"\n")
        shutil.rmtree(inside)

    one()


def _too_long(_number: int, _frame: Any) -> None:
    raise TooLong


def _outcome(run: Callable[[Any, Path], None], case: Any, inside: Path, told: str) -> list[str]:
    """How a case ended: ["result"], ["ours"], or a kind of failure with what happened."""
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        run(case, inside)
    except TooLong:
        return [Kind.HANG, f"longer than {CASE_SECONDS} s of CPU, or {WALL_SECONDS} s:\n{told[:3000]}"]
    except BaseException as error:
        if _is_ours(error):
            return ["ours"]
        shown = "".join(traceback.format_exception(error))
        return [Kind.TRACEBACK, f"{tail(shown, 14)}\n  of the case:\n{told[:3000]}"]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ["result"]


def _is_ours(error: BaseException) -> bool:
    """Whether an error is one that a command shows as our own words."""
    if len(str(error).split()) < FEWEST_WORDS:
        return False
    if isinstance(error, BapoError):
        return True
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError) and raised.startswith(OURS)
