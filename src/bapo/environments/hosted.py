"""The owner's end of the processes of episodes (`episode_process.py`): `Environments` for what users write.

    with Hosted(Recipe(environment="mine:GuessEnv"), seconds=30, memory_mb=2048) as environments:
        environments.begin("7/0", problem)
        environments.collect(1.0)           # [("7/0", Answer("Guess a number from 1 to 9."))]

Nobody waits but `collect`, which listens to all processes at once. An episode whose process hangs, exits or needs too
much memory has failed, with the cause in a line, and the others go on.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from bapo.environments.episode import Answer
from bapo.process.limited import GRACE_SECONDS, START_SECONDS, CannotStart, Lost, Worker
from bapo.process.limited_worker import OUT_OF_MEMORY, send
from bapo.types import Problem

Row = dict[str, Any]
MOST_BYTES = 1 << 26
"""The longest reply that is read. Honest ones are far shorter: observations are cut where they are made."""


@dataclass(frozen=True)
class Recipe:
    """What environments are made of."""

    environment: str | None = None
    """module:name of a class, a function, or a dict of these."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class or function."""
    tools: Sequence[str] = ()
    """Functions that the model may call, besides the methods of the environment."""
    tool_format: str = ""
    """A name in `calls.py:FORMATS` or module:function. Empty: the owner finds the calls, or there are none."""
    graders: Sequence[tuple[str, float]] = ()
    """Reward functions with their weights, of which those written for TRL are called in the episode's process."""


def row_of(problem: Problem) -> Row:
    """The columns of its data set."""
    return {"prompt": problem.prompt, "answer": problem.answer, **problem.extra}


class _Episode:
    """One process, as far as it is there."""

    _numbers = count()

    def __init__(self, key: str, question: list[Any]) -> None:
        self.key, self.question, self.number = key, question, next(self._numbers)
        self.process = 0
        self.connection: socket.socket | None = None
        self.until = math.inf
        """When an answer must be there; infinite if no question is open."""


class _Heard:
    """What has come over a connection, and from whom."""

    def __init__(self) -> None:
        self.episode: _Episode | None = None
        self.bytes = bytearray()

    def message(self, part: bytes) -> Any:
        """The message that this part completes; None if it completes none."""
        self.bytes += part
        length = int.from_bytes(self.bytes[:8], "big")
        if length > MOST_BYTES:
            raise ValueError(f"a reply of {length} bytes")
        if len(self.bytes) < 8 + length or len(self.bytes) < 8:
            return None
        message = json.loads(self.bytes[8 : 8 + length])
        del self.bytes[: 8 + length]
        return message


class Hosted(AbstractContextManager["Hosted"]):
    """All episodes of a run, each in a process of its own."""

    at_once = False
    turn_ends: tuple[str, ...] = ()

    def __init__(
        self,
        recipe: Recipe,
        *,
        seconds: float = 30.0,
        memory_mb: int = 2048,
        observation_tokens: int = 1024,
        shown: Callable[[str], str] = str,  # what an environment sees of a turn
        calls: Callable[[str], Any] | None = None,  # the calls in a turn or what is wrong with them, if found here
        rows: Mapping[str, Row] | None = None,  # a row for each name of an environment, to look at one of each
    ) -> None:
        self.name = recipe.environment or ", ".join(recipe.tools)
        self.seconds, self.memory_mb, self.shown, self.calls = seconds, memory_mb, shown, calls
        self._episodes: dict[str, _Episode] = {}
        self._begun: list[_Episode] = []
        self._awaited: dict[int, _Episode] = {}
        """Those whose process has not introduced itself, by the number that it will say."""
        self._known: list[tuple[str, Row]] = []
        folder = tempfile.TemporaryDirectory(prefix="bapo-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address := f"{folder.name}/episodes")
        self._listener.listen(4096)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        options = {"address": address, "seconds": seconds, "memory_mb": memory_mb, "name": self.name}
        options |= {"observation_tokens": observation_tokens, **vars(recipe)}
        self._keeper = Worker("bapo.environments.episode_process:serve", 0, options)
        self._finalizer = weakref.finalize(
            self, _end_all, os.getpid(), self._episodes, self._keeper, self._listener, folder
        )
        try:
            self._keeper.wait_until_ready()
            ready: Any = self._keeper.ready
            self.grading: list[str] = ready["grading"]
            """The reward functions that are called there."""
            self.about = self._describe(rows or {})
        except BaseException:
            self.close()
            raise

    def begin(self, key: str, problem: Problem, state: Any = None) -> None:
        """Start an episode. Its process is forked when answers are collected."""
        self._start(_Episode(key, ["begin", row_of(problem), problem.id, state]))

    def act(self, key: str, turn: str) -> None:
        """Give the episode a turn."""
        shown = self.shown(turn)
        self._ask(self._episodes[key], ["act", shown, None if self.calls is None else self.calls(turn)])

    def grade(self, key: str) -> None:
        """Ask the episode for its reward."""
        self._ask(self._episodes[key], ["grade"])

    def collect(self, timeout: float) -> list[tuple[str, Answer]]:
        """The answers since the last call. Returns as soon as there is one, or if no question is open."""
        return [(key, _answer(reply)) for key, reply in self._replies(timeout)]

    def end(self, key: str) -> None:
        """End the episode's process."""
        if (episode := self._episodes.pop(key, None)) is not None:
            self._known = [known for known in self._known if known[0] != key]
            self._leave(episode)

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, rows: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
        """What each environment is, by name: `episode_process.py:Made.about`."""
        self._start(_Episode("", ["about", rows]))
        ((_, reply),) = self._replies(START_SECONDS)
        self.end("")
        if "failure" in reply:
            raise ValueError(f"{self.name} cannot be used: {reply['failure']}")
        return dict(reply["about"])

    def _start(self, episode: _Episode) -> None:
        self._begun.append(episode)
        self._episodes[episode.key] = episode

    def _fork(self) -> None:
        """Have a process forked for each episode that was begun and not ended."""
        begun, self._begun = [each for each in self._begun if self._episodes.get(each.key) is each], []
        self._awaited |= {each.number: each for each in begun}
        until = time.monotonic() + START_SECONDS
        forked, unable = self._order([("fork", each.number) for each in begun])
        for episode, process in zip(begun, [*forked, *[0] * len(begun)], strict=False):
            episode.process, episode.until = process, until
            if not process:
                self._fail(episode, unable)

    def _replies(self, timeout: float) -> list[tuple[str, Row]]:
        self._fork()
        end = time.monotonic() + timeout
        while not self._known:
            now, limit = time.monotonic(), min((each.until for each in self._episodes.values()), default=math.inf)
            if limit == math.inf or now > end:
                break
            for ready, _ in self._selector.select(max(0.0, min(end, limit) - now)):
                self._hear(ready)
            for late in [each for each in self._episodes.values() if each.until <= time.monotonic()]:
                self._fail(late, f"timeout after {self.seconds:g} s")
        known, self._known = self._known, []
        return known

    def _hear(self, ready: selectors.SelectorKey) -> None:
        """Take in what has come: a process that connects, introduces itself, answers, or has ended."""
        if ready.fileobj is self._listener:
            connection, _ = self._listener.accept()
            connection.settimeout(GRACE_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, _Heard())
            return
        connection, heard = cast(socket.socket, ready.fileobj), cast(_Heard, ready.data)
        try:
            part = connection.recv(1 << 20)
            message = heard.message(part)
        except (OSError, ValueError):
            part = b""
        if not part:
            self._hang_up(connection)
            if (episode := heard.episode) is not None and episode.connection is connection:
                self._fail(episode, "")
        elif message is not None and heard.episode is None:
            heard.episode = self._awaited.pop(message, None)
            if heard.episode is None:  # it was ended meanwhile
                self._hang_up(connection)
                return
            heard.episode.connection = connection
            self._ask(heard.episode, heard.episode.question)
        elif message is not None and heard.episode is not None:
            heard.episode.until = math.inf
            self._known.append((heard.episode.key, message))

    def _ask(self, episode: _Episode, question: list[Any]) -> None:
        if episode.connection is None:  # it has failed, and its owner may not know yet
            return
        patience = START_SECONDS if question[0] == "about" else self.seconds + GRACE_SECONDS
        episode.until = time.monotonic() + patience
        with suppress(OSError):  # then it has ended, and its connection says so
            send(episode.connection, question)

    def _fail(self, episode: _Episode, cause: str) -> None:
        """The episode has failed: of this cause, or of what its process died of."""
        status = self._leave(episode)
        if status == -signal.SIGALRM:
            cause = f"timeout after {self.seconds:g} s"
        elif status == OUT_OF_MEMORY:
            cause = f"memory limit of {self.memory_mb} MB"
        died = f"crash: signal {-status}" if status < 0 else f"crash: exit status {status}"
        self._known.append((episode.key, {"failure": cause or died}))

    def _leave(self, episode: _Episode) -> int:
        """End an episode's process. Returns its exit status, also if it had ended before."""
        episode.until = math.inf
        self._awaited.pop(episode.number, None)
        if episode.connection is not None:
            self._hang_up(episode.connection)
            episode.connection = None
        process, episode.process = episode.process, 0
        statuses, _ = self._order([("end", process)] if process else [])
        return statuses[0] if statuses else 0

    def _hang_up(self, connection: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _order(self, orders: Sequence[tuple[str, int]]) -> tuple[list[int], str]:
        """What the keeper says to each order, and why answers are missing, if they are."""
        said: list[int] = []
        try:
            if orders:
                said += [number for _, number in self._keeper.results(orders, START_SECONDS)]
        except (Lost, CannotStart) as error:
            return said, f"the process that forks episodes has died: {error}"
        return said, ""


def _answer(reply: Row) -> Answer:
    """What a process said; code of the user's may have written on its connection."""
    try:
        return Answer(**reply)
    except TypeError:
        return Answer(failure="crash: what it said cannot be read")


def _end_all(
    owner: int,
    episodes: dict[str, _Episode],
    keeper: Worker,
    listener: socket.socket,
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    """End all processes. One that was forked from their owner leaves them alone."""
    if os.getpid() != owner:
        return
    for episode in episodes.values():
        if episode.process:  # a child of the keeper's, which has not taken note of its end: nobody else has its number
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(episode.process, signal.SIGKILL)
        if episode.connection is not None:
            episode.connection.close()
    keeper.close()
    listener.close()
    folder.cleanup()
