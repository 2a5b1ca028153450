"""Kills and signals: a command is disturbed up to six times, continued each time, and must end as its twin did.

When: uniformly over the time that the command takes; at its n-th operation on a file, inside the process; or a few
milliseconds after it, which is in the middle of a large write. How: SIGKILL most often; SIGTERM, SIGINT and SIGHUP,
which may save or not; SIGSTOP and SIGCONT, which must change nothing. A comparison is killed alone or with its runs.

After a disturbance the command is continued as its user would do it: with `bapo resume`, or with the same command. If
that ends in an error of ours, what it advises must work. Now and then a report is asked for before, and a second
process tries to enter a run that is only stopped.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from campaign_parts import forks
from campaign_parts.outcomes import Failed, Kind, judge
from campaign_parts.world import Setting, Twin, check_equal

SIGNALS = {signal.SIGKILL: 10, signal.SIGTERM: 3, signal.SIGINT: 3, signal.SIGHUP: 1, signal.SIGSTOP: 2}
"""How often each is sent."""
SOON = 0.03
"""The longest delay after an operation, in seconds."""
LEFT_BEHIND_SECONDS = 20
"""How long the processes of a killed command may live on."""
STEPS_TO_THE_END = 8
"""How many commands in a row may be needed to continue."""
ADVICE = re.compile(r"`(bapo [^`]+)`|[Cc]ontinue with: (bapo .+)$", re.MULTILINE)
BUSY = re.compile("another process is at work|is still at work in")


@dataclass
class Case:
    """One command on its way through disturbances."""

    setting: Setting
    twin: Twin
    path: Path
    choose: random.Random
    hit: dict[str, int] = field(default_factory=dict)
    """Signals that reached a living process, by name."""
    our_errors: int = 0
    told: list[str] = field(default_factory=list)
    """What was done, for whoever repeats it by hand."""
    commands: int = 0
    logs: Path | None = None
    """Where the output of commands goes, if not into the case."""

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.path / "run"

    @property
    def complete(self) -> bool:
        """Whether the result is there."""
        return (self.run / self.setting.result).exists()

    def log(self) -> Path:
        """A file for the output of the next command."""
        self.commands += 1
        return (self.logs or self.path) / f"log-{self.commands:02d}"


def attack(case: Case) -> None:
    """Disturb a command, continue it to its end and compare. Raises Failed."""
    words = case.setting.words
    for _ in range(case.choose.choice((1, 2, 3, 4, 5, 6))):
        if not _disturb(case, words):
            break
        words = _next_words(case)
        if case.choose.random() < 0.15 and case.setting.name != "eval":
            _report(case)
    _to_the_end(case, words)
    check_equal(case.path, case.twin.path)
    left = forks.clear_orphans(LEFT_BEHIND_SECONDS)
    if left:
        raise Failed(Kind.HANG, f"processes were left behind: {left}")


def finish_case(case: Case, before: Callable[[], None] | None = None) -> None:
    """Continue a command, as its user would, to its end. `before`: called in every new process."""
    _to_the_end(case, _next_words(case), before)


def _next_words(case: Case) -> tuple[str, ...]:
    """How its user continues it. A run that never got a directory can only be started again."""
    if not case.setting.resumes:
        return case.setting.words
    if not (case.run / "config.json").exists() and not (case.run / "checkpoints").exists():
        return case.setting.words
    return ("resume", "run")


def _disturb(case: Case, words: tuple[str, ...]) -> bool:
    """Run a command and send it one signal. False: it had ended before, and nothing was sent."""
    number = case.choose.choices(list(SIGNALS), list(SIGNALS.values()))[0]
    process, moment = _at_some_moment(case, words, number)
    case.told.append(f"{shlex.join(('bapo', *words))}: {signal.Signals(number).name} {moment}")
    if number == signal.SIGSTOP:
        sent = _stop_and_go_on(case, process)
    elif process is None:
        sent = True  # it has killed itself at the trap
    else:
        with_runs = case.setting.name == "compare" and case.choose.random() < 0.5
        below = forks.descendants(process.pid) if with_runs else []
        sent = process.signal(number)
        for pid in below:
            _send(pid, signal.SIGKILL)
    if sent:
        name = signal.Signals(number).name
        case.hit[name] = case.hit.get(name, 0) + 1
    if process is not None:
        if process.wait(case.twin.deadline) is None:
            forks.end(process)
            raise Failed(Kind.HANG, f"`{shlex.join(words)}` did not end after {signal.Signals(number).name} {moment}")
        outcome = judge(words, process.code, process.said(), sent=(number,) if sent else ())
        if outcome is Kind.OUR_ERROR:
            _check_told(case, process, number)
    return sent


def _at_some_moment(case: Case, words: tuple[str, ...], number: int) -> tuple[forks.Running | None, str]:
    """Start a command and let it come to a random place. None: it was to kill itself there, and did."""
    how = case.choose.choice(("uniform", "operation", "soon after"))
    if how == "uniform":
        seconds = case.choose.uniform(0, 1.05 * case.twin.seconds)
        process = forks.start(words, cwd=case.path, log=case.log())
        process.wait(seconds)
        return process, f"after {seconds:.3f} s"
    operation = case.choose.randint(1, max(1, case.twin.operations))
    kills = how == "operation" and number == signal.SIGKILL
    process = forks.start(words, cwd=case.path, log=case.log(), trap=forks.Trap(operation, kills=kills))
    reached = process.rings(case.twin.deadline)
    if kills and reached:
        process.wait(30)
        return None, f"at operation {operation}"
    if not reached and process.wait(case.twin.deadline) is None:
        forks.end(process)
        raise Failed(Kind.HANG, f"`{shlex.join(words)}` did not end in time")
    delay = 0.0 if how == "operation" else case.choose.uniform(0, SOON)
    time.sleep(delay)
    return process, f"{delay * 1000:.1f} ms after operation {operation}"


def _stop_and_go_on(case: Case, process: forks.Running | None) -> bool:
    """Stop a process for a while. A second one must not enter its run meanwhile."""
    assert process is not None
    if not process.signal(signal.SIGSTOP):
        return False
    if case.setting.resumes and (case.run / "lock").exists() and case.choose.random() < 0.5:
        intruder = forks.finish(("resume", "run"), cwd=case.path, log=case.log(), seconds=case.twin.deadline)
        outcome = judge(intruder.words, intruder.code, intruder.said())
        locked = outcome is Kind.OUR_ERROR and BUSY.search(intruder.said())
        complete = outcome is None and "is complete" in intruder.said()
        early = outcome is Kind.OUR_ERROR and not (case.run / "config.json").exists()
        if not (locked or complete or early):
            process.signal(signal.SIGCONT)
            raise Failed(Kind.MISMATCH, f"a second process was let into a run at work:\n{intruder.said()}")
        case.our_errors += 1
    else:
        time.sleep(case.choose.uniform(0, 1))
    return process.signal(signal.SIGCONT)


def _check_told(case: Case, process: forks.Running, number: int) -> None:
    """A stopped command says how to go on. That it works is seen when it is continued."""
    if case.setting.name == "compare" and BUSY.search(process.said()):  # runs of a killed comparison are at work
        forks.clear_orphans(case.twin.deadline)
    elif number not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        raise Failed(Kind.MISMATCH, f"`{shlex.join(process.words)}` refused without a cause:\n{process.said()}")
    if process.code == 130 and "ontinue" not in process.said() and "same command" not in process.said():
        raise Failed(Kind.SILENT, f"a stopped command does not say how to go on:\n{process.said()}")
    case.our_errors += 1


def _to_the_end(case: Case, words: tuple[str, ...], before: Callable[[], None] | None = None) -> None:
    """Continue until the result is there. An error of ours on the way counts, and what it advises is done next."""
    for _ in range(STEPS_TO_THE_END):
        process = forks.finish(words, cwd=case.path, log=case.log(), seconds=case.twin.deadline, before=before)
        said = process.said()
        outcome = judge(words, process.code, said)
        if outcome is None and process.code == 0:
            if not case.complete:
                raise Failed(Kind.SILENT, f"`{shlex.join(words)}` ended with code 0 and without a result:\n{said}")
            return
        case.our_errors += 1
        if BUSY.search(said):  # runs of a killed comparison
            forks.clear_orphans(case.twin.deadline)
            continue
        words = _advised(case, said)
    raise Failed(Kind.HANG, f"{STEPS_TO_THE_END} commands in a row did not lead to the end")


def _advised(case: Case, said: str) -> tuple[str, ...]:
    found = [shlex.split(one or other)[1:] for one, other in ADVICE.findall(said)]
    usable = [tuple(words) for words in found if "RUN" not in words]
    if usable:
        return usable[0]
    if "not a run directory" in said and not (case.run / "config.json").exists():
        return case.setting.words
    raise Failed(Kind.MISMATCH, f"the error gives no advice that can be followed:\n{said}")


def _report(case: Case) -> None:
    """A report of what is there now: a page, or an error of ours."""
    page = case.path / "report.html"
    process = forks.finish(("report", "run", "--out", str(page)), cwd=case.path, log=case.log(), seconds=120)
    if judge(process.words, process.code, process.said()) is None and not page.stat().st_size:
        raise Failed(Kind.SILENT, "`bapo report` wrote an empty page")


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
