"""Verifiers that misbehave as the text tells them to, for the sandbox to survive."""

import os
import signal
import sys
import time

from bapo.types import Score

_calls = 0


def verify(answer, response):
    """Do what the response says; otherwise 1.0 if it is the answer."""
    global _calls
    _calls += 1
    command, _, rest = response.partition(" ")
    match command:
        case "spin":
            while True:
                pass
        case "power":
            return Score(float(len(str(9**9**9))))  # one call into C that no Python signal handler interrupts
        case "sleep":
            time.sleep(float(rest))
        case "deaf":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        case "memory":
            return Score(float(len(bytearray(8 << 30))))
        case "leak":
            _leaked.append(bytearray(120 << 20))
            return Score(float(len(_leaked)))
        case "kill":
            os.kill(os.getpid(), getattr(signal, rest))
        case "exit":
            os._exit(int(rest))
        case "leave":
            sys.exit(int(rest))
        case "raise":
            raise ValueError(rest)
        case "huge":
            return Score(1e39)
        case "nan":
            return Score(float("nan"))
        case "number":
            return 1.0
        case "object":
            return object()
        case "pid":
            return Score(float(os.getpid()))
        case "calls":
            return Score(float(_calls))
        case "torch":
            return Score(float("torch" in sys.modules))
        case "print":
            print("noise")
            print("noise", file=sys.stderr)
        case "whoami":
            return Score(1.0, answer=response)
        case _:
            pass
    return Score(float(response == answer), answer=response[-100:])


_leaked = []
