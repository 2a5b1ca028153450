"""The processes of episodes: a keeper, which imports an environment once and forks one process for each episode.

    owner           begins, asks and ends episodes (`hosted.py`), and watches the clock
    keeper          a process of `bapo.process.limited` that never runs an episode; forks, and says how one died
    episode         makes its environment, connects to its owner's socket, and answers one question after the other

    who waits           for what                  what unblocks it
    episode             a question                the question, or the end of the connection: it is not needed any more
    episode, in a call  the user's code           its end, or the kernel: a timer whose default action ends the process
    keeper              its owner                 an order, or the owner's end, with which the kernel kills it

An episode has a memory limit, counted as data on top of what the keeper uses, a process group of its own, which ends
with it, and random numbers that depend on its problem only. So the episodes of a group begin alike, and an episode that
is played again with the same turns says the same.

What is imported must survive a fork: threads, connections and devices belong into `__init__` or `reset`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from inspect import signature
from typing import Any, NoReturn

from bapo.environments.calls import FORMATS, own
from bapo.environments.shapes import Game, Tools, is_game, named
from bapo.process.limited_worker import DATA, OUT_OF_MEMORY, describe, in_use, receive, send
from bapo.tasks.verify.finding import find_function

__all__ = ["serve"]

CHARACTERS = 32
"""Most characters of an observation for each token that it may have. What is longer is cut here first."""


class Made:
    """The environments that the names in the configuration stand for."""

    def __init__(
        self,
        environment: str | None,
        options: Mapping[str, Any],
        tools: Sequence[str],
        tool_format: str,
        graders: Sequence[tuple[str, float]],
    ) -> None:
        found = None if environment is None else find_function(environment, "task.environment", or_dict=True)
        self.factories: dict[str, Any] = found if isinstance(found, dict) else {"": found}
        self.options, self.chosen_by = options, "environment" if isinstance(found, dict) else None
        self.tools = [find_function(name, "task.tools:") for name in tools]
        self.parse = FORMATS.get(tool_format, lambda text: [])
        if ":" in tool_format:
            self.parse = own(find_function(tool_format, "task.tool_format"))
        found_graders = [(name, find_function(name), weight) for name, weight in graders]
        self.graders = [(grade, weight) for _, grade, weight in found_graders if looks_inside(grade)]
        self.grading = [name for name, grade, _ in found_graders if looks_inside(grade)]

    def of(self, row: Mapping[str, Any]) -> Tools | Game:
        """The environment of a row, before it begins."""
        name = "" if self.chosen_by is None else row.get(self.chosen_by)
        if name not in self.factories:
            known = ", ".join(self.factories)
            raise ValueError(f"the row names the environment {name!r} in its column environment; there are {known}")
        factory = self.factories[name]
        made = None if factory is None else factory(**named(factory, row) | dict(self.options))
        return Game(made) if is_game(made) else Tools(made, self.tools, self.parse, self.graders)

    def about(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What each environment is, by name: its tools as JSON schemas, and whether it gives rewards.

        `rows`: one of each, if there is one.
        """
        known = {}
        for name in self.factories:
            made = self.of(rows.get(name, {"environment": name}))
            if isinstance(made, Game):
                known[name] = {"tools": [], "rewards": True}
                continue
            if made.environment is not None and not hasattr(made.environment, "reset"):
                raise ValueError(
                    f"a {type(made.environment).__name__} has neither reset nor step. Give it one of them."
                )
            from transformers.utils.chat_template_utils import get_json_schema  # takes seconds, not for games

            schemas = []
            for tool, function in made.tools.items():
                try:
                    schemas.append(get_json_schema(function))
                except Exception as error:
                    raise ValueError(
                        f"the tool {tool!r} cannot be described to the model: {error}. Give it type hints and a "
                        "docstring that has a line for each argument under Args:"
                    ) from error
            known[name] = {"tools": schemas, "rewards": bool(made.graders) or hasattr(made.environment, "get_reward")}
        return known


def looks_inside(grade: Callable[..., Any]) -> bool:
    """Whether a reward function is written for TRL, and is given the environment and the messages of an episode."""
    return not {"environments", "prompts", "completions"}.isdisjoint(signature(grade).parameters)


def serve(
    *, address: str, seconds: float, memory_mb: int, observation_tokens: int, name: str, **made: Any
) -> tuple[dict[str, Any], Callable[..., None]]:
    """The keeper: what it says of itself, and what answers its owner's orders."""
    environments = Made(**made)
    connection, pipe = int(sys.argv[1]), int(sys.argv[5])  # of its owner
    most = CHARACTERS * observation_tokens

    def answer(orders: Sequence[tuple[str, int]], tell: Callable[[int, int], None]) -> None:
        for index, (order, number) in enumerate(orders):
            if order == "end":
                tell(index, _end(number))
            elif (child := os.fork()) == 0:
                with contextlib.suppress(OSError):
                    os.close(connection)
                    os.close(pipe)
                _live(environments, address, number, seconds, memory_mb, most)
            else:
                tell(index, child)

    return {"grading": environments.grading}, answer


def _end(process: int) -> int:
    """End an episode's process, and what it started. Returns its exit status, also if it had ended before."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(process, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    except ChildProcessError:
        return 0


def _live(environments: Made, address: str, number: int, seconds: float, memory_mb: int, most: int) -> NoReturn:
    """The process of an episode, from its first question until its owner hangs up."""
    status = 1  # the exit status of what nobody foresaw
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        at_start = in_use(DATA)
        if memory_mb and at_start:
            resource.setrlimit(resource.RLIMIT_DATA, (at_start + memory_mb * 2**20,) * 2)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        send(connection, number)
        episode: Tools | Game | None = None
        while True:
            try:
                question, *given = receive(connection)
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)  # with what the episode has started
            reply: dict[str, Any]
            signal.setitimer(signal.ITIMER_REAL, 0 if question == "about" else seconds)
            try:
                if question == "about":
                    reply = {"about": environments.about(*given)}
                elif question == "begin":
                    row, problem, state = given
                    seed = int.from_bytes(sha256(problem.encode()).digest()[:4], "big")
                    _seed(seed)
                    episode = environments.of(row)
                    row = {key: row[key] for key in row if key != environments.chosen_by}
                    reply = episode.begin(row, seed) if state is None else episode.restore(row, state)
                else:
                    reply = getattr(episode, question)(*given)
                if question != "grade" and episode is not None and episode.keeps:
                    reply |= {"state": json.loads(json.dumps(episode.state(), allow_nan=False))}
                reply = _cut(reply, most)
            except MemoryError:
                raise
            except BaseException as error:
                reply = {"failure": describe(error)}
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(connection, reply)
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def _cut(reply: dict[str, Any], most: int) -> dict[str, Any]:
    """The same, without what no limit in tokens would leave, and without halves of characters."""

    def clean(text: str) -> str:
        return text[:most].encode(errors="replace").decode()

    if isinstance(text := reply.get("text"), str):
        return reply | {"text": clean(text)}
    return reply | {"text": [{**each, "content": clean(each["content"])} for each in text]} if text else reply
