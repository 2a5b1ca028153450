"""A judge: a model behind an OpenAI-compatible endpoint scores responses by a rubric. vLLM's own server is one.

The rubric is the system's message. The user's message holds the problem, its reference answer if there is one, and the
response, and asks for a last line `Score: N`. The reward is the last such N, divided by the best one. Everything else
is a failure of the response and never a reward of 0: no score, one out of range, a refusal, a server that stays away.
A server that is busy or gone is asked again, after waits that double.

A response is known by its content: by what the judge is sent. What was judged is recorded before anybody sees it, so
that a run that is continued asks nothing twice, and no response gets two scores. Failures are not recorded.

The key comes from an environment variable and goes into one header of a request. No text of the server's is repeated in
a message, because a server may say back what it was sent; redirects are not followed, and no proxy is asked. Addresses
other than this machine's get a key over https only.
"""

import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bapo.process.stops import StopAsked, may_leave
from bapo.tasks.task import STOP_SECONDS, followed
from bapo.types import Problem, Score

JUDGE = "judge"
"""The name in task.reward."""
SYSTEM_END = "End your reply with a line of the form\nScore: N\nwhere N is a number from 0 to {best:g}."
STOPPED = "stopped"
"""In place of a verdict, where nobody waits for it any more."""
_SCORE = re.compile(r"score[\s:=*_`]{1,8}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
BUSY = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
"""Refusals that may be another answer later, besides those of a server that fails (500 and above)."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a server is asked again, the first time and at most."""
LARGEST = 1 << 20
"""Bytes of a reply."""
LOOK_SECONDS = 0.1
"""How often the thread that waits looks at stops and at requests that take too long."""


class Verdict(NamedTuple):
    """What the judge said of a response."""

    reward: float
    read: int
    """Tokens that the judge read."""
    written: int
    """Tokens that it wrote."""


def key_in(variable: str, url: str) -> str:
    """The key in an environment variable; empty if none is named. A ValueError about a bad key does not repeat it."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"task.judge.key_variable names the environment variable {variable}, which holds no key. Set it before "
            "the run starts."
        )
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(
            f"task.judge.url={url!r} would get the key in {variable} unencrypted. Use https, or leave "
            "task.judge.key_variable empty."
        )
    return key


class Judge:
    """Asks for scores. Several requests are under way at a time, for all callers together."""

    def __init__(
        self,
        url: str,  # the endpoint, up to /v1
        model: str,
        rubric: str,
        *,
        best: float = 10.0,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seconds: float = 60.0,  # for one request
        retries: int = 8,
        key_variable: str = "",  # the environment variable that holds the key; empty if there is none
        concurrency: int = 32,
    ) -> None:
        self.place, self.best, self.seconds, self.retries = urlsplit(url), best, seconds, retries
        self._system = f"{rubric.strip()}\n\n{SYSTEM_END.format(best=best)}"
        self._settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._key = key_in(key_variable, url)
        self._tls = ssl.create_default_context() if self.place.scheme == "https" else None
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        self._ended = threading.Event()
        self._lock, self._keeping = threading.Lock(), threading.Lock()
        self._callers = 0
        self._asked: dict[str, Future[Verdict | str]] = {}
        """What is being asked about, maybe for several callers."""
        self._open: dict[socket.socket, float] = {}
        """Connections, and when each has taken too long."""
        self._known: dict[str, Verdict] = {}
        self._record: Callable[[Sequence[Mapping[str, Any]]], None] = lambda lines: None
        self._calls: list[float] = []
        """Seconds of each request since `take`."""

    @property
    def identity(self) -> str:
        """A digest of all that decides a score besides the response."""
        return _digest(self._body("", ""))

    def remember(
        self, lines: Iterable[Mapping[str, Any]], record: Callable[[Sequence[Mapping[str, Any]]], None]
    ) -> None:
        """Know what was judged before, and record what will be. It must be on the disk when `record` returns."""
        for line in lines:
            with suppress(KeyError, TypeError, ValueError):
                verdict = Verdict(float(line["reward"]), int(line["read"]), int(line["written"]))
                self._known.setdefault(str(line["content"]), verdict)
        self._record = record

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score of each response, in order. No response text makes it raise."""
        with self._lock:
            if not self._callers:
                self._ended.clear()
            self._callers += 1
        try:
            return self._scores(responses)
        finally:
            with self._lock:
                self._callers -= 1

    def take(self) -> dict[str, float]:
        """How many requests there were since the last time, and how long they took. Forgets them."""
        with self._lock:
            calls, self._calls = self._calls, []
        if not calls:
            return {"judge_requests": 0}
        return {"judge_requests": len(calls), "judge_seconds": sum(calls) / len(calls), "judge_slowest": max(calls)}

    def close(self) -> None:
        """End requests that are under way. Does nothing the second time."""
        self._end()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        follower = followed(len(responses))
        bodies = [self._body(_told(problem), text) for problem, text in responses]
        places: dict[str, list[int]] = {}
        for index, body in enumerate(bodies):
            places.setdefault(_digest(body), []).append(index)
        found: dict[int, Score] = {}

        def settle(content: str, verdict: Verdict | str) -> None:
            if verdict == STOPPED:
                raise StopAsked
            for index in places[content]:
                if isinstance(verdict, str):
                    score = Score(None, verdict)
                else:
                    score = Score(verdict.reward, read=verdict.read, written=verdict.written)
                found[index] = follower.known(score)

        waiting: dict[Future[Verdict | str], str] = {}
        try:
            for content, indices in places.items():
                with self._lock:
                    known = self._known.get(content)
                    if known is None:
                        if content not in self._asked:
                            self._asked[content] = self._pool.submit(self._ask, bodies[indices[0]])
                        waiting[self._asked[content]] = content
                if known is not None:
                    settle(content, known)
            for content, verdict in self._arriving(waiting):
                settle(content, verdict)
        except BaseException:
            self._end()  # whoever stops one stops all
            self._keep(waiting)
            raise
        return [found[index] for index in range(len(responses))]

    def _arriving(self, waiting: dict[Future[Verdict | str], str]) -> Iterator[tuple[str, Verdict | str]]:
        """Verdicts as they come, each recorded already. A stop waits for them a moment, and no longer."""
        asked_to_stop = None
        while waiting:
            done, _ = wait(waiting, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
            now = time.monotonic()
            with self._lock:
                overdue = [connection for connection, until in self._open.items() if now > until]
            for connection in overdue:
                _shut(connection)
            arrived = {waiting.pop(future): STOPPED if future.cancelled() else future.result() for future in done}
            self._keep_all(arrived)
            yield from arrived.items()
            asked_to_stop = (asked_to_stop or now) if may_leave() else None
            if asked_to_stop is not None and now - asked_to_stop > STOP_SECONDS:
                raise StopAsked

    def _keep(self, waiting: dict[Future[Verdict | str], str]) -> None:
        """Record what arrived after nobody waited any more."""
        for future in waiting:
            future.cancel()
        left = {content: future for future, content in waiting.items() if not future.cancelled()}
        wait(left.values(), timeout=STOP_SECONDS)
        self._keep_all({content: one.result() for content, one in left.items() if one.done() and not one.exception()})

    def _keep_all(self, arrived: Mapping[str, Verdict | str]) -> None:
        """Record the verdicts that are new, before anybody sees them."""
        with self._keeping:
            new = {c: one for c, one in arrived.items() if isinstance(one, Verdict) and c not in self._known}
            if new:
                self._record([{"content": content, **verdict._asdict()} for content, verdict in new.items()])
            with self._lock:
                self._known |= new
                for content in arrived:
                    self._asked.pop(content, None)

    def _end(self) -> None:
        self._ended.set()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _shut(connection)

    def _body(self, told: str, response: str) -> bytes:
        """What the judge is sent."""
        user = f"{told}\n\nResponse:\n{response}"
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": user}]
        return json.dumps({**self._settings, "messages": messages}).encode()

    def _ask(self, body: bytes) -> Verdict | str:
        """What the judge says, or why it says nothing. Works in a thread of its own."""
        pause, cause = FIRST_WAIT, ""
        for attempt in range(self.retries + 1):
            if attempt:
                self._ended.wait(pause)
                pause = min(2 * pause, LONGEST_WAIT)
            if self._ended.is_set():
                return STOPPED
            began = time.monotonic()
            try:
                status, later, data = self._request(body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                cause = f"the judge cannot be reached: {type(error).__name__}"
                continue
            finally:
                with self._lock:
                    self._calls.append(time.monotonic() - began)
            if status == HTTPStatus.OK and (reply := _whole(data)) is not None:
                return self._verdict(reply)
            cut_off = status == HTTPStatus.OK  # by a server that ended
            cause = "the judge's reply is no JSON" if cut_off else f"the judge answered with status {status}"
            if not cut_off and status not in BUSY and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                return cause
            pause = max(pause, min(later, LONGEST_WAIT))
        return f"{cause}, {self.retries + 1} times"

    def _request(self, body: bytes) -> tuple[int, float, bytes]:
        """One request: status, the seconds to wait that the server asks for, and what it sent."""
        host, port, seconds = self.place.hostname or "", self.place.port, self.seconds
        headers = {"Content-Type": "application/json", "Connection": "close"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if self._tls is None:
            opened = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            opened = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        opened.connect()
        with self._watched(opened.sock):
            try:
                opened.request("POST", f"{self.place.path.rstrip('/')}/chat/completions", body, headers)
                reply = opened.getresponse()
                data = reply.read(LARGEST + 1)
            finally:
                opened.close()
        if len(data) > LARGEST:
            raise ValueError("too long")
        later = reply.getheader("Retry-After") or ""
        return reply.status, float(later) if later.isascii() and later.isdigit() else 0.0, data

    @contextmanager
    def _watched(self, connection: socket.socket) -> Iterator[None]:
        """Inside, the connection is shut when its time is over: a server that sends a byte now and then has no more."""
        with self._lock:
            self._open[connection] = time.monotonic() + self.seconds
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(connection, None)

    def _verdict(self, reply: dict[str, Any]) -> Verdict | str:
        """The score in a reply."""
        try:
            said, usage = reply["choices"][0]["message"]["content"], reply.get("usage") or {}
            marks = _SCORE.findall(said)
            read, written = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        except (KeyError, IndexError, TypeError, AttributeError):
            return "the judge's reply has no text"
        if not marks:
            return "the judge's reply has no line with a score"
        if not 0 <= (mark := float(marks[-1])) <= self.best:
            return f"the judge's score is not from 0 to {self.best:g}"
        return Verdict(mark / self.best, *(one if isinstance(one, int) else 0 for one in (read, written)))


def _told(problem: Problem) -> str:
    """A problem in words: its prompt, and its reference answer if there is one."""
    prompt = problem.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    answer = problem.answer
    if isinstance(answer, dict | list):
        answer = json.dumps(answer, ensure_ascii=False, default=str)
    return f"Problem:\n{prompt}" + ("" if answer in (None, "") else f"\n\nReference answer:\n{answer}")


def _whole(data: bytes) -> dict[str, Any] | None:
    """The object in a reply; None if it is none, or not all of it came."""
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) else None


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _shut(connection: socket.socket) -> None:
    """End a connection, so that whoever reads from it goes on."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
