"""Whether Ray itself is alive: its control service (GCS), and its daemon on this machine (raylet).

Without them no process can be called, started or ended, and nothing mends that. Ray is late to say so: when its control
service has gone, it ends our process after a minute, without a word. So a thread looks at both every second:

    what                                   counts as lost
    the process of the raylet has gone     at once
    the GCS refuses a connection           after REFUSED_SECONDS: nobody listens any more
    the GCS does not answer                after CUT_SECONDS: a network may come back

Whoever waits for Ray calls `check`, which raises an error from then on. If nobody has called it after HANG_SECONDS, the
main thread hangs in Ray: the process is ended from here, with the same words and the same exit code.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from bapo.config.errors import ClusterError
from bapo.process import stops

LOOK_SECONDS = 1.0
REFUSED_SECONDS, CUT_SECONDS = 3.0, 40.0
"""Ray would end this process after 60 s."""
HANG_SECONDS = 10.0


class RayGone(ClusterError):  # noqa: N818
    """Ray itself has gone, so nobody can be replaced."""


class Pulse:
    """What is known of Ray's own processes."""

    def __init__(self, gcs: str, raylet: str, *, remedy: str) -> None:
        """`gcs`: its address. `raylet`: the name of its socket, by which its process is known. `remedy`: what to do."""
        host, _, port = gcs.rpartition(":")
        self.gcs, self._place, self.remedy = gcs, (host.strip("[]"), int(port)), remedy
        self._raylet = _process_of(raylet)
        self.lost = ""
        """What of Ray has gone, in words; empty while it is alive."""
        self._told, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def check(self) -> None:
        """Raise an error if Ray has gone."""
        if self.lost:
            self._told.set()
            stops.cut_off()  # nobody tidies up with Ray
            raise RayGone(self.lost)

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def _watch(self) -> None:
        """Until something has gone, or nobody wants to know any more."""
        self._answered, gone = time.monotonic(), ""
        while not gone:
            if self._over.wait(LOOK_SECONDS):
                return
            gone = self._gone()
        advice = stops.advice() or "Continue with `bapo resume`."
        self.lost = f"Ray is lost: {gone}. {self.remedy}{advice}"
        if not self._told.wait(HANG_SECONDS) and not self._over.is_set():
            stops.give_up(RayGone.exit_code, self.lost)

    def _gone(self) -> str:
        """What has gone, in words; empty if nothing has."""
        if self._raylet is not None and self._raylet not in stops.processes():
            return "its daemon on this machine (raylet) has ended"
        try:
            socket.create_connection(self._place, timeout=LOOK_SECONDS).close()
        except OSError as error:
            silent = time.monotonic() - self._answered
            if isinstance(error, ConnectionRefusedError):
                gone, most = "has ended", REFUSED_SECONDS
            else:
                gone, most = f"has not answered for {silent:.0f} s", CUT_SECONDS
            return f"its control service (GCS) at {self.gcs} {gone}" if silent > most else ""
        self._answered = time.monotonic()
        return ""


def _process_of(raylet: str) -> stops.Process | None:
    """The process of the raylet with this socket; None where it cannot be seen."""
    for process in stops.processes():
        with suppress(OSError):
            program, *words = Path(f"/proc/{process[0]}/cmdline").read_bytes().split(b"\0")
            if program.endswith(b"raylet") and any(word.endswith(b"=" + raylet.encode()) for word in words):
                return process
    return None
