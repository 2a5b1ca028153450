"""Sends the metrics of a run to the trackers that people already use, besides the run's own files.

    log.to = ["tensorboard", "wandb", "trackio", "mlflow"]

Every tracker gets the same points: finite numbers with a name and a place on one of two axes. What happens once per
update stands at the version that the update made; everything else stands at the step. Nothing leaves this machine
unless the tracker's own environment variables say so (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID).

The files of the run are the record. So a tracker that fails on the way is named once and gets nothing more, and the run
goes on. A resumed run continues its curves under the same identity. The steps after its checkpoint are repeated, so
their points are sent again, with the same values.

Each tracker has a thread that sends, and a queue before it, so a run never waits for a server. What finds the queue
full is not sent. At the end, the threads have END_SECONDS for what is left, or STOP_SECONDS if the run was cut short,
and a note says how many lines were not sent.
"""

import contextlib
import contextvars
import fcntl
import io
import logging
import math
import os
import queue
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.config.words import flat
from bapo.runs import files

OF_UPDATES = ("update", "skipped")
"""Kinds of lines that stand at a version."""
PLACE = ("kind", "step", "version", "eval/temperature")
"""Keys that say where a line belongs, and not what was measured."""
MLFLOW_TAG = "bapo.run"
SECRET = ("PASSWORD", "TOKEN", "SECRET", "API_KEY", "ACCESS_KEY")
"""How the names of environment variables end whose values nobody should see."""
MOST_WAITING = 4096
"""Lines that may wait to be sent to one tracker."""
END_SECONDS, STOP_SECONDS = 60.0, 5.0
"""How long all of them may take to send what is left at the end of a run, and of one that was cut short."""
QUIET_SECONDS = 2.0
"""How long a run waits at its end before it says so."""
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""How long a server may keep a thread waiting, unless the environment says otherwise."""


class Points(NamedTuple):
    """What one line of a log measured."""

    axis: str
    """"step" or "update"."""
    at: int
    values: dict[str, float]


@dataclass(frozen=True)
class Tracked:
    """What a tracker is told about a run."""

    path: Path
    id: str
    """The identity of the run. A resumed run has the same one."""
    project: str
    config: dict[str, Any]
    step: int
    """How many steps are completed."""
    version: int
    """How many updates are completed."""

    @property
    def name(self) -> str:
        """What people call the run: its path, as far as it is not the same for all."""
        return "/".join(part for part in self.path.parts[-3:] if part not in ("/", "runs"))


class Tracker(Protocol):
    """One of them, for one run."""

    def send(self, points: Points) -> None:
        """Take the points of one line."""

    def close(self, ok: bool) -> None:
        """Write what is left. `ok`: whether the run came to its end."""


def points(line: Mapping[str, Any]) -> Points:
    """The points in a line of metrics.jsonl, or of timing.jsonl with the kind "timing"."""
    kind = line["kind"]
    axis, at = ("update", line["version"]) if kind in OF_UPDATES else ("step", line["step"])
    numbers = {
        _name(key, kind, line): float(value)
        for key, value in line.items()
        if key not in PLACE and isinstance(value, int | float) and math.isfinite(value)
    }
    return Points(axis, at, numbers)


def _name(key: str, kind: str, line: Mapping[str, Any]) -> str:
    """A name that no other kind of line has. Evaluations at different temperatures are different curves."""
    if kind == "eval":
        return f"eval/{line['eval/temperature']:g}/{key.removeprefix('eval/')}"
    return key if "/" in key else f"{kind}/{key}"


class _TensorBoard:
    """Event files in the run directory, one directory per axis: what a resumed run repeats is hidden per axis."""

    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder, done = files.folder(run.path / "tensorboard"), {"step": run.step, "update": run.version}
        self._writers = {
            axis: SummaryWriter(str(files.folder(folder / axis)), purge_step=count + 1 if run.step else 0)
            for axis, count in done.items()
        }

    def send(self, points: Points) -> None:
        writer = self._writers[points.axis]
        for name, value in points.values.items():
            writer.add_scalar(name, value, points.at)
        writer.flush()

    def close(self, ok: bool) -> None:
        for writer in self._writers.values():
            writer.close()


class _WeightsAndBiases:
    """Offline in the run directory, unless WANDB_MODE says otherwise."""

    def __init__(self, run: Tracked) -> None:
        import wandb

        files.folder(run.path / "wandb")
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        place: dict[str, Any] = {"project": run.project, "id": run.id, "name": run.name, "dir": str(run.path)}
        settings = wandb.Settings(silent=True, disable_git=True, save_code=False)  # git runs what a repository names
        place |= {"resume": "allow", "reinit": "create_new", "settings": settings}
        self._run = wandb.init(**place, config=run.config, mode=mode)
        for name, axis in (("*", "step"), ("update/*", "update"), ("skipped/*", "update")):
            self._run.define_metric(name, step_metric=axis)

    def send(self, points: Points) -> None:
        self._run.log({**points.values, points.axis: points.at})

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


class _Trackio:
    """The local store of trackio, which its own environment variables move.

    trackio keeps its run in the context of whoever opens it, and would end it once more at exit. So it has its own.
    """

    def __init__(self, run: Tracked) -> None:
        import trackio

        self._context, self._end = contextvars.copy_context(), trackio.finish
        place: dict[str, Any] = {"project": run.project, "name": f"{run.name} {run.id}", "resume": "allow"}
        with _silent():
            self._run = self._context.run(trackio.init, **place, config=run.config, auto_log_gpu=False)

    def send(self, points: Points) -> None:
        self._run.log(points.values, step=points.at)

    def close(self, ok: bool) -> None:
        with _silent():
            self._context.run(self._end)


class _MLflow:
    """The store that MLflow itself would choose. A run is found again by a tag with its identity."""

    def __init__(self, run: Tracked) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        for limit, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(limit, value)
        with _one_at_a_time("mlflow"):  # two processes cannot make its tables at the same time
            self._client = MlflowClient()
            self._id = self._found_or_made(run)

    def _found_or_made(self, run: Tracked) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        found = self._client.search_runs([place], filter_string=f"tags.`{MLFLOW_TAG}` = '{run.id}'", max_results=1)
        if found:
            known: str = found[0].info.run_id
            self._client.update_run(known, status="RUNNING")
            return known
        made: str = self._client.create_run(place, run_name=run.name, tags={MLFLOW_TAG: run.id}).info.run_id
        for key, value in flat(run.config):
            self._client.log_param(made, key, str(value)[:500])
        return made

    def send(self, points: Points) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now, points.at) for name, value in points.values.items()])

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")


MAKERS: dict[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "trackio": _Trackio,
    "mlflow": _MLflow,
}


class Sender:
    """Sends to one tracker, in a thread of its own."""

    def __init__(self, name: str, tracker: Tracker, tell: Callable[[str], None]) -> None:
        self.name, self.tracker, self.tell = name, tracker, tell
        self._waiting: queue.SimpleQueue[Points | bool] = queue.SimpleQueue()
        self._put = self._sent = 0
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"log.to {name}", daemon=True)
        self._thread.start()

    def put(self, points: Points) -> None:
        """Let the thread send these points, unless too much is waiting already. Returns at once."""
        self._put += 1
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(points)

    def end(self, ok: bool) -> None:
        """Let the thread close the tracker after all that is waiting. `ok`: whether the run came to its end."""
        self._waiting.put(ok)

    def join(self, until: float) -> None:
        """Wait until it is closed, but not longer than this, and say what was not sent."""
        self._thread.join(min(QUIET_SECONDS, max(0.0, until - time.monotonic())))
        if self._thread.is_alive() and (left := until - time.monotonic()) > 0:
            self.tell(f"log.to: waiting for {self.name}, at most {left:.0f} s")
            self._thread.join(left)
        unsent = self._put - self._sent
        if not self._failed and (unsent or self._thread.is_alive()):
            told = f"{counted(unsent, 'line')} did not reach it" if unsent else "its end may be missing there"
            self.tell(f"log.to: {self.name} is too slow, so {told}. The run's own files have everything.")
        self._failed = True  # whatever happens to the thread from now on is no news

    def _work(self) -> None:
        try:
            while not isinstance(points := self._waiting.get(), bool):
                self.tracker.send(points)
                self._sent += 1
            self.tracker.close(points)
        except BaseException as error:  # whatever another library raises must not end the run
            known, self._failed = self._failed, True
            if not known:
                self.tell(
                    f"log.to: {self.name} failed, so it gets nothing more: {_told(error)}. The run goes on, "
                    "and its own files have everything."
                )


@dataclass
class Trackers:
    """All trackers of a run."""

    senders: list[Sender] = field(default_factory=list)

    def send(self, *lines: Mapping[str, Any]) -> None:
        """Send the points of these lines, without waiting for it."""
        if self.senders:
            for found in map(points, lines):
                for sender in self.senders:
                    sender.put(found)

    def close(self, ok: bool, seconds: float) -> None:
        """Close all of them within this time. `ok`: whether the run came to its end."""
        until = time.monotonic() + seconds
        for sender in self.senders:
            sender.end(ok)
        for sender in self.senders:
            sender.join(until)


@contextlib.contextmanager
def tracking(names: Iterable[str], run: Tracked, tell: Callable[[str], None]) -> Iterator[Trackers]:
    """Open the trackers with these names, and close them at the end, whatever happens. `tell`: shows a sentence."""
    trackers, ok = Trackers(), False
    try:
        for name in names:
            try:
                trackers.senders.append(Sender(name, MAKERS[name](run), tell))
            except Exception as error:
                raise ConfigError(
                    f"log.to: {name} cannot start: {_told(error)}. Correct its settings, or leave it out of log.to; "
                    f"then `bapo resume {run.path}` goes on."
                ) from error
        yield trackers
        ok = True
    finally:
        trackers.close(ok, END_SECONDS if ok else STOP_SECONDS)


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Wait until no other process of this user is in the same place.

    The lock is in a directory that belongs to this user alone: anybody may write into the one around it.
    """
    place = Path(tempfile.gettempdir()) / f"bapo-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{place} is not a directory of this user alone; remove it, or set TMPDIR")
    with files.appended(place / f"{name}.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _told(error: BaseException) -> str:
    """An error of a tracker in words, without the passwords that addresses and the environment hold."""
    told = f"{type(error).__name__}: {error}"
    secrets = {value for key, value in os.environ.items() if key.endswith(SECRET) and len(value) > 3}
    for address in (value for key, value in os.environ.items() if key.endswith(("_URI", "_URL"))):
        with contextlib.suppress(ValueError):
            if password := urlsplit(address).password:
                secrets |= {password, unquote(password)}
    for secret in sorted(secrets, key=len, reverse=True):
        told = told.replace(secret, "***")
    return re.sub(r"(://[^\s/:@]*):\S*@", r"\1:***@", told)  # a password may hold any sign


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What trackio prints in this thread would tear the live view. What other threads print is shown."""
    shown, thread = sys.stdout, threading.get_ident()

    class Others(io.TextIOBase):
        encoding = getattr(shown, "encoding", "utf-8")

        def write(self, text: str) -> int:
            return len(text) if threading.get_ident() == thread else shown.write(text)

        def flush(self) -> None:
            shown.flush()

        def isatty(self) -> bool:
            return shown.isatty()

    with contextlib.redirect_stdout(Others()):
        yield
