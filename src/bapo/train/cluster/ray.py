"""Ray, as far as we use it: actors in places, calls with deadlines, the end of processes. Only this file imports it.

    Cluster   the Ray instance: started here for this run alone, or joined at an address
    Place     a bundle of a placement group, in which one actor after the other may live
    Actor     an object in another process; its calls return at once
    Hello     what an actor says about itself when it has started
    Call      the answer to come; asking for it has a deadline, and an error names who was waited for

Ray places processes and tells us when one has died. It restarts and retries nothing: `max_restarts` and
`max_task_retries` are 0, because a retried call would run at least once, not exactly once. Whoever owns an actor
replaces it.

Without an address, everything that Ray opens listens on 127.0.0.1. With an address, Ray listens where that cluster was
told to. Inside a cluster Ray moves objects as pickles, so everybody who can reach its ports can run code there.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bapo.config.errors import ClusterError, ConfigError
from bapo.process import clean_environment, environment
from bapo.train.machine import code_digest

try:
    import ray
    from ray.exceptions import (
        GetTimeoutError,
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
    )
    from ray.util.placement_group import PlacementGroup, placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError:  # pragma: no cover - said by `connect`
    ray = None

REACH_SECONDS = 10.0
"""How long we try to reach a Ray cluster."""
END_SECONDS = 10.0
"""How long we wait for a process to end after it was killed."""


class Lost(ClusterError):  # noqa: N818
    """An actor has died, or its node has."""


class Silent(ClusterError):  # noqa: N818
    """An actor has not answered in time."""


class Missing(ClusterError):  # noqa: N818
    """What an actor was given is lost with the machine that kept it. The actor itself is well."""


@dataclass
class Call:
    """An answer to come."""

    ref: Any
    who: str
    what: str
    began: float = field(default_factory=time.monotonic)
    place: Place | None = None

    @property
    def seconds(self) -> float:
        """How long we have been waiting."""
        return time.monotonic() - self.began

    @property
    def parts(self) -> list[Call]:
        """The parts of an answer in several parts, each as an answer of its own."""
        return [Call(ref, self.who, self.what, self.began, self.place) for ref in self.ref]

    def answer(self, seconds: float) -> Any:
        """The answer, waiting at most this long for it. Raises one of the errors above, or what the actor raised."""
        try:
            return ray.get(self.ref, timeout=seconds)
        except GetTimeoutError:
            if self.place is not None and (told := self.place.lacks()):
                raise Silent(f"{self.who} has waited for room for {self.seconds:.0f} s: {told}") from None
            raise Silent(
                f"{self.who} has not answered for {self.seconds:.0f} s: it was asked to {self.what}. Look at its log "
                f"in {logs()}, or allow more time in the section cluster."
            ) from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, OSError):  # say which machine has a full disk
                told = f"{self.who} was asked to {self.what}: {cause.strerror or cause}"
                known = (cause.errno, told, cause.filename) if cause.errno is not None else (told,)
                raise OSError(*known) from error
            if isinstance(cause, ObjectLostError):
                raise self._missing(cause) from error
            raise cause from error
        except (RayActorError, OutOfMemoryError, NodeDiedError) as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise ClusterError(f"{self.who} cannot start on {_address_in(error)}: {_lines(error)[-1]}") from error
            raise Lost(f"{self.who} died while it was asked to {self.what}: {why_it_died(str(error))}") from error
        except ObjectLostError as error:
            raise self._missing(error) from error
        except RayError as error:
            raise Lost(f"{self.who} was asked to {self.what}, and its answer is lost: {_lines(error)[0]}") from error

    def _missing(self, error: RayError) -> Missing:
        return Missing(
            f"{self.who} was asked to {self.what}, but what it needs is lost with the machine that kept it "
            f"({type(error).__name__})"
        )


def answered(calls: Sequence[Call], seconds: float) -> list[Call]:
    """The calls that have an answer, after waiting at most this long for the first one."""
    if not calls:
        return []
    ready, _ = ray.wait([call.ref for call in calls], num_returns=1, timeout=seconds, fetch_local=False)
    more, _ = ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=0, fetch_local=False)
    found = {ref.hex() for ref in (*ready, *more)}
    return [call for call in calls if call.ref.hex() in found]


@dataclass(frozen=True)
class Place:
    """Where an actor lives: one bundle of a placement group."""

    group: PlacementGroup
    bundle: int
    resources: dict[str, float]

    def lacks(self) -> str:
        """What is missing, if Ray has no machine for this place any more; empty if nothing is."""
        with suppress(RayError):
            if ray.util.placement_group_table(self.group)["state"] != "CREATED":
                return (
                    f"it needs {_listed(self.resources)}, and Ray has {_listed(ray.available_resources())} free of "
                    f"{_listed(ray.cluster_resources())}. Start the machine that was lost again, or another one."
                )
        return ""


@dataclass(frozen=True)
class Hello:
    """What an actor says about itself when it has started."""

    process: tuple[str, int]
    """The node of Ray, and the process id there."""
    node: str
    """A name that people know the machine by."""
    code: dict[str, str | None]
    """Versions of what decides the results."""
    draws_by_position: bool = True
    gives_entropies: bool = True

    def check(self, name: str) -> None:
        """Refuse the actor of this name if it runs other code than this process."""
        ours, theirs = code_digest(), self.code
        different = [f"{what} {theirs[what]} instead of {ours[what]}" for what in ours if theirs[what] != ours[what]]
        if different:
            raise ClusterError(
                f"{name} runs {', '.join(different)}. All machines of a cluster must run the same versions: install "
                "this one's there."
            )


class Actor:
    """An object of a class in another process."""

    def __init__(self, kind: type, name: str, place: Place, *given: Any) -> None:
        """Start it; `given` are the arguments of its class. The first call waits until it has been made."""
        self.name, self.place = name, place
        self.process: tuple[str, int] | None = None
        """Its node and process id, once known."""
        strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.bundle)
        remote = ray.remote(kind).options(
            num_cpus=place.resources.get("CPU", 0),
            num_gpus=place.resources.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        self._handle = remote.remote(*given)

    def call(self, method: str, *given: Any, what: str, returns: int = 1) -> Call:
        """Begin a call. `what`: completes "it was asked to ..."."""
        refs = getattr(self._handle, method).options(num_returns=returns).remote(*given)
        return Call(refs, self.name, what, place=self.place)

    def greet(self, hello: Hello) -> None:
        """Take in what it says about itself. From now on its name says on which machine it is."""
        self.process, self.name = hello.process, f"{self.name} on {hello.node}"
        hello.check(self.name)

    def kill(self) -> Call | None:
        """Begin to end its process and everything that the process has started, even if it is stopped or hangs.

        Returns the call that is answered when it has ended. It is not answered if the machine cannot be reached.
        """
        with suppress(RayError):
            ray.kill(self._handle, no_restart=True)
        if self.process is None:
            return None
        node, pid = self.process
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        end = ray.remote(num_cpus=0, max_retries=0)(end_process).options(scheduling_strategy=here)
        return Call(end.remote(pid), self.name, "end")


def end(actors: Sequence[Actor]) -> None:
    """End all of these, and wait for them together."""
    calls = [call for actor in actors if (call := actor.kill()) is not None]
    if calls:
        with suppress(RayError):
            ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=END_SECONDS, fetch_local=False)


def end_process(pid: int) -> None:
    """Kill this process, if it is still one of Ray's."""
    with suppress(ProcessLookupError, FileNotFoundError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)


def introduced(**engine: bool) -> Hello:
    """What this actor says about itself. `engine`: what its engine can do, if it has one."""
    return Hello((ray.get_runtime_context().get_node_id(), os.getpid()), node_name(), code_digest(), **engine)


def node_name() -> str:
    """A name that people know this machine by."""
    return f"{os.uname().nodename} ({node_address()})"


def node_address() -> str:
    """Where other machines of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())


class Cluster:
    """The Ray instance of a run, with the places it holds."""

    def __init__(self, address: str | None, *, processes: int) -> None:
        """Join the cluster at this address; without one, start Ray here with room for so many processes."""
        if ray is None:
            raise ConfigError(
                "cluster.rollouts needs Ray, which is not installed. Install it with: pip install 'bapo[ray]'"
            )
        self._groups: list[PlacementGroup] = []
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        # An answer that nobody asks for any more, of a rank whose partner has died: the death itself is told.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        if address is not None:
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # of this process; it would write over the screen
        else:
            _stay_on_this_machine()
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 is for machines that serve others, too
            options |= {"num_cpus": processes, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        _leave_signals_to_us()
        try:
            _check_reachable(address)
            with clean_environment():
                job = ray.job_config.JobConfig()
                job._py_driver_sys_path = _NoPaths()
                ray.init(address=address or "local", job_config=job, **options)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise ClusterError(
                f"cluster.address={address!r}: cannot connect to Ray: {_lines(error)[0]}. Start it with `ray start "
                "--head`, give the address that it prints (and RAY_AUTH_TOKEN, if it asks for a token), or leave "
                "cluster.address out to start Ray here."
            ) from error
        ray._private.worker.print_to_stdstream = _hush
        if address is None:
            watchdog = [sys.executable, "-P", "-m", "bapo.process.stops", str(os.getpid())]
            nowhere, env = subprocess.DEVNULL, environment()
            subprocess.Popen(watchdog, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere, env=env)  # noqa: S603

    def places(self, count: int, resources: dict[str, float], *, seconds: float, what: str) -> list[Place]:
        """Reserve so many places, near each other where possible."""
        group = placement_group([resources] * count, strategy="PACK")
        self._groups.append(group)
        if not group.wait(seconds):
            raise ClusterError(
                f"there is no room for {count} {what} with {_listed(resources)} each: after {seconds:.0f} s Ray has "
                f"{_listed(ray.available_resources())} free of {_listed(ray.cluster_resources())}. Add machines, or "
                "ask for less in the section cluster."
            )
        return [Place(group, bundle, resources) for bundle in range(count)]

    def close(self) -> None:
        """Give everything back. A Ray that was started here ends with it."""
        for group in self._groups:
            with suppress(RayError):
                ray.util.remove_placement_group(group)
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raise an OSError if nobody listens at this host and port. Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()


class _NoPaths(list[str]):
    """Ray adds the current directory to this list, which its workers then search first, before what is installed."""

    def extend(self, _: Iterable[str]) -> None:
        """Add no path: what lives in workers is bapo, which is installed."""


def _stay_on_this_machine() -> None:
    """Make a Ray that is started from here listen on 127.0.0.1 only. It has no other switch for this than the one for
    desktop systems, which it reads from the environment, in this process at the time of its import.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False


def _leave_signals_to_us() -> None:
    """Keep Ray from handling SIGTERM in this process: its handlers in Python and in C++ would replace ours."""
    ray._private.utils.set_sigterm_handler = lambda handler: None
    ray._private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True


def _hush(*_: object, **__: object) -> None:
    """In place of the lines that Ray prints about every worker that dies: whoever replaces it says so."""


def logs() -> str:
    """Where Ray keeps what actors print."""
    node = ray._private.worker._global_node
    return str(node.get_logs_dir_path()) if node is not None else "the session directory of Ray"


def _listed(resources: dict[str, float]) -> str:
    shown = {name: value for name, value in resources.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{value:g} {name}" for name, value in shown.items()) or "nothing"


DEATHS = {
    r"running low on memory": "its machine ran out of memory, and Ray killed it",
    r"node was preempted": "its machine was taken away",
    r"node has died|running on is dead|node was terminated": "its machine was lost",
    r"exits with an exit code (-?\d+)": "its process ended with exit code {0}",
    r"exits (?:unexpectedly )?by a signal": "a signal ended its process",
    r"killed by `ray\.kill`": "it was ended with ray.kill",
    r"owner has died": "the process that started it has died",
    r"is unavailable": "it cannot be reached",
    r"worker process has died": "its process was killed (signal 9, as the kernel sends it when memory runs out) "
    "or crashed",
}
"""What Ray writes about a death, and what it means. The first that is found counts."""


def why_it_died(text: str) -> str:
    """What Ray's message about a death says, in a few words. Ray does not know which signal ended a process."""
    for pattern, meaning in DEATHS.items():
        if found := re.search(pattern, text):
            return meaning.format(*found.groups())
    fields = r"(class_name|actor_id|pid|name|namespace|ip): |The actor died unexpectedly before|$"
    said = [line.strip() for line in text.splitlines() if not re.match(fields, line.strip())]
    return (said or ["Ray does not say why"])[0].partition(". ")[0].rstrip(".")


def _address_in(error: RayActorError) -> str:
    found = re.search(r"\bip=([^,)\s]+)", str(error))
    return f"the machine {found[1]}" if found else "the machine where it was placed"


def _lines(error: BaseException) -> list[str]:
    """The lines that an error has written, without full stops; its name if it says nothing."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
