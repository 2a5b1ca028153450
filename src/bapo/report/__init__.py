"""`bapo report`: one HTML file that shows what runs did, or a page that follows them.

    write_report([Path("runs/quick")], Path("report.html"))

The page has a verdict, tables, the paper's figures from our own metrics, and responses. Nothing here computes what a
run should have logged, and nothing imports torch. The page draws from the values embedded in it, so a report can be
read without the run directories.

With --live, a page on 127.0.0.1 asks for new values every two seconds. The server only reads. When a log has grown, one
request gathers the values anew and the others wait for it. No request waits for the run, and the run never waits for
the server. Only this machine gets answers.
"""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from tyro.conf import Positional, arg

from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.report.arms import Arm, Found, find_arms, run_directories
from bapo.report.contents import contents, page
from bapo.report.verdict import verdict
from bapo.runs import files
from bapo.screen.terminal import say

__all__ = ["Arguments", "Arm", "Found", "contents", "find_arms", "run", "serve", "write_report"]

HOST = "127.0.0.1"
PORT = 8377  # the first port tried
TRIES = 20  # how many ports are tried, one after the other, if the user did not ask for one
LOGS = ("config.json", "metrics.jsonl", "timing.jsonl", "rollouts.jsonl", "history.jsonl", "summary.json")


@dataclass(frozen=True)
class Arguments:
    """Write one HTML file with the table, the figures and the responses of runs. It can be read offline.

    Directories are searched for runs. Runs that are damaged or unfinished are named.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...", help_behavior_hint="(required)")] = ()
    """Runs, or directories with runs below them."""
    out: Annotated[
        Path | None, option(default="RUN/report.html for one directory, otherwise report.html", metavar="FILE")
    ] = None
    """The file to write."""
    live: bool = False
    """Write no file. Serve the report on 127.0.0.1 and follow the runs."""
    port: Annotated[int | None, option(default="the first free one from 8377 on", metavar="N")] = None
    """The port of --live."""


def run(arguments: Arguments) -> int:
    """Carry out the command; returns its exit code."""
    if not arguments.runs:
        raise ConfigError("no RUN given. Name a run, or a directory with runs below it; see `bapo report --help`.")
    if arguments.live:
        return _follow(arguments.runs, arguments.port)
    paths = arguments.runs
    out = arguments.out or (paths[0] if len(paths) == 1 and paths[0].is_dir() else Path()) / "report.html"
    found = write_report(paths, out)
    for defect in found.defects:
        say(f"bapo: {defect}", error=True)
    if not found.arms:
        raise ConfigError("there is no run to report on, so nothing was written.")
    runs, arms = sum(len(arm.runs) for arm in found.arms), len(found.arms)
    say(f"{out}: {counted(runs, 'run')} of {counted(arms, 'configuration')}")
    shown = verdict(found.arms)["verdict"]
    for line in (*shown["lines"], *shown["notes"], *(f"Sign of trouble: {sign}" for sign in shown["warnings"])):
        say(f"  {line}")
    return 0


def write_report(paths: Sequence[Path], out: Path) -> Found:
    """Read the runs at or below the paths and write their report, whole or not at all. Without a run, write nothing."""
    found = find_arms(paths)
    if not found.arms:
        return found
    files.write(out, page(contents(found)))
    return found


def _follow(paths: Sequence[Path], port: int | None) -> int:
    with serve(paths, port) as server:
        try:
            for path in (path for path in paths if not path.exists()):
                say(f"{path} does not exist yet; waiting for it")
            say(f"following {', '.join(map(str, paths))} on {server.url} (Ctrl-C ends)")
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nno longer following; the runs go on")
    return 0


# The report of runs that are still going on


class Server(ThreadingHTTPServer):
    """Serves the current values of some runs, gathered again only when one of their files has changed."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, paths: Sequence[Path]) -> None:
        super().__init__((HOST, port), _Handler)
        self.paths = list(paths)
        self._lock = Lock()
        self._tag = ""
        self._values: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def values(self) -> tuple[str, dict[str, Any]]:
        """A tag that changes with the values, and the values."""
        with self._lock:
            tag = self._fingerprint()
            if tag != self._tag:
                self._values = contents(find_arms(self.paths))
                self._tag = tag
            return self._tag, self._values

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def _fingerprint(self) -> str:
        seen = []
        for directory in run_directories(self.paths):
            for name in LOGS:
                with suppress(OSError):
                    status = (directory / name).stat()
                    seen.append((str(directory), name, status.st_size, status.st_mtime_ns))
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):  # a foreign page whose host name resolves to this machine
            self._answer(403, "text/plain", b"Only for this machine.")
        elif self.path == "/":
            self._answer(200, "text/html", page(self.server.values()[1], live=True).encode())
        elif self.path == "/values.json":
            tag, values = self.server.values()
            if self.headers.get("If-None-Match") == f'"{tag}"':
                self._answer(304, "application/json", b"", tag)
            else:
                self._answer(200, "application/json", json.dumps(values, allow_nan=False).encode(), tag)
        else:
            self._answer(404, "text/plain", b"There is only / and /values.json.")

    def _answer(self, status: int, kind: str, body: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if tag is not None:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line every two seconds would be noise."""


def serve(paths: Sequence[Path], port: int | None = None) -> Server:
    """A server on the port asked for, or on the first free one from PORT on. The caller runs and closes it."""
    if port is not None and not 0 <= port < 2**16:
        raise OSError(errno.EINVAL, f"there is no port {port}. Choose one up to {2**16 - 1}, or leave --port out")
    ports = [port] if port is not None else [*range(PORT, PORT + TRIES), 0]
    for candidate in ports:
        try:
            return Server(candidate, paths)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"port {port} is in use. Choose another --port, or leave it out")
