"""Ray's own processes are seen to be gone, in words, and a main thread that hangs in Ray does not hide it."""

import socket
import subprocess
import time

import pytest

from bapo.config.errors import ClusterError
from bapo.process import stops
from bapo.train.cluster import pulse as pulse_module
from bapo.train.cluster.pulse import Pulse

SOCKET = "/tmp/bapo-test/raylet"


@pytest.fixture
def made(monkeypatch):
    """A pulse of a service that listens and a process that looks like a raylet; and what it gave up with."""
    for name, value in {"LOOK_SECONDS": 0.02, "REFUSED_SECONDS": 0.2, "HANG_SECONDS": 0.3}.items():
        monkeypatch.setattr(pulse_module, name, value)
    given_up = []
    monkeypatch.setattr(stops, "give_up", lambda *given: given_up.append(given))
    monkeypatch.setattr(stops, "cut_off", lambda: None)
    monkeypatch.setattr(stops, "advice", lambda: "Continue with: bapo resume RUN")
    service = socket.create_server(("127.0.0.1", 0))
    words = ["/opt/ray/raylet", "-c", "sleep 300; true", f"--raylet_socket_name={SOCKET}"]
    raylet = subprocess.Popen(words, executable="/bin/sh", start_new_session=True)
    pulse = Pulse(f"127.0.0.1:{service.getsockname()[1]}", SOCKET, remedy="Start it. ")
    yield pulse, service, raylet, given_up
    pulse.close()
    service.close()
    raylet.kill()
    raylet.wait()


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_nothing_is_lost_while_both_live(made):
    pulse, *_, given_up = made
    time.sleep(0.5)
    pulse.check()
    assert (pulse.lost, given_up) == ("", [])


def test_a_control_service_that_has_gone_is_said(made):
    pulse, service, _, given_up = made
    service.close()
    assert until(lambda: pulse.lost)
    with pytest.raises(ClusterError, match=r"its control service \(GCS\) at 127.0.0.1:\d+ has ended. Start it. Cont"):
        pulse.check()
    time.sleep(0.5)
    assert given_up == [], "somebody has heard it"


def test_a_raylet_that_has_gone_is_said_even_if_the_main_thread_hangs(made):
    pulse, _, raylet, given_up = made
    raylet.kill()
    raylet.wait()
    assert until(lambda: given_up)
    assert given_up == [(5, pulse.lost)]
    assert "its daemon on this machine (raylet) has ended" in pulse.lost
