"""Commands and scripts in processes of their own, without the seven seconds that each would take to import torch.

`bapo`, `script` and `started` fork a server that has imported everything already. What they give is a whole process: it
has its own signals, limits, working directory and exit code, and it can be killed. All forks of one server hash strings
alike, so a test of runs that must not depend on that compares them with a run of `bapo_anew`, which starts the
interpreter.
"""

import atexit
import multiprocessing
import os
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from bapo.cli import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("__main__", "bapo.train.run", "bapo.train.sft", "bapo.evaluate.evaluation", "bapo.report", "bapo.learn.fsdp"),
        "tests.forked",
    ]
)
PATIENCE = 300  # seconds


def bapo_anew(*arguments, **options):
    """`python -m bapo.cli` until its end."""
    command = [sys.executable, "-m", "bapo.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, **options)


def torchrun(ranks, *arguments):
    """`torchrun --nproc-per-node RANKS -m bapo` until its end."""
    how = ["--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *how, "-m", "bapo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bapo(*arguments, **options):
    """The same in a fork."""
    return _ended(None, arguments, **options)


def script(path, *arguments, **options):
    """`python PATH` in a fork."""
    return _ended(str(path), arguments, **options)


def started(*arguments, log, errors=None, **options):
    """`bapo` in the background. It writes all it says into one file, or its errors into another."""
    return _fork(None, arguments, log, errors or log, **options)


def started_together(ranks, *arguments, log, largest_file=None):
    """`torchrun --nproc-per-node RANKS -m bapo`, without torchrun: the ranks in the background, each in a fork.

    `largest_file`: for some ranks, how large their files may be, in bytes.
    """
    largest = largest_file or {}
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(ranks):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        env = {**os.environ, **{name: str(value) for name, value in own.items()}}
        processes.append(
            _fork(None, arguments, f"{log}.{rank}", f"{log}.{rank}", env=env, largest_file=largest.get(rank))
        )
    return processes


def in_ranks(work, ranks, *arguments):
    """Call `work(rank, *arguments)` in so many forks at once. An error in one of them is raised here."""
    how = "spawn" if "cuda" in os.environ.get("BAPO_RANKS_ON", "") else "forkserver"  # CUDA does not survive a fork
    torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method=how)


def opens_no_pickle(monkeypatch):
    """From here on, torch.distributed can neither make nor open the pickle of an object."""

    def refuse(*_, **__):
        raise AssertionError("a rank exchanges a pickle")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        assert hasattr(distributed_c10d, name)
        monkeypatch.setattr(distributed_c10d, name, refuse)


def _ended(path, arguments, **options):
    """A fork that has come to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        process = _fork(path, arguments, out, err, **options)
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{arguments} took longer than {PATIENCE} seconds:\n{out.read_text()}")
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _fork(path, arguments, out, err, **options):
    arguments = [str(argument) for argument in arguments]
    options = {"env": dict(os.environ), **options}
    process = FORKS.Process(target=_program, args=(path, arguments, str(out), str(err)), kwargs=options, daemon=True)
    process.start()
    return process


def _program(path, arguments, out, err, *, env, cwd=".", largest_file=None, most_memory=None):
    """What the interpreter would do around the script at `path`, or around `bapo.cli.main`."""
    for file, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if largest_file is not None:  # in bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if most_memory is not None:  # in bytes, beyond what the imports use
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most_memory,) * 2)
    sys.path.insert(0, os.path.dirname(path) if path else os.getcwd())
    sys.argv = [path or "bapo", *arguments]
    try:
        if path:
            runpy.run_path(path, run_name="__main__")
        else:
            main()
    finally:
        atexit._run_exitfuncs()
