"""Updates of a framework in several processes: how they are launched, and what is counted in them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """The sizes of float64 all-reduces: nobody but us sums in float64."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "allreduce" in func.__name__ and args[0][0].dtype == torch.float64:
            self.sizes.append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


def launched(module, processes, *, out, environment=None, **arguments):
    """What the `main` of a module writes into the file `out` when torchrun starts it in so many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, "-m", module, json.dumps({"out": str(out), **arguments})],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(environment or {})},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return torch.load(out, weights_only=True)
