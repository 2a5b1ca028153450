"""The command line in processes of its own, without the seven seconds that each would take to import torch.

`bapo` and `started` fork a server that has imported everything already. What they give is a whole process: it has its
own signals, limits, working directory and exit code, and it can be killed. All forks of one server hash strings alike,
so a test of runs that must not depend on that compares them with a run of `bapo_anew`, which starts the interpreter.
"""

import atexit
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["__main__", "bapo.train.run", "bapo.train.sft", "bapo.evaluate.run", "bapo.report"])
PATIENCE = 300  # seconds


def bapo_anew(*arguments, **options):
    """`python -m bapo.cli` until its end."""
    command = [sys.executable, "-m", "bapo.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, **options)


def bapo(*arguments, cwd=".", env=None, largest_file=None):
    """The same in a fork, which cannot write files of more than `largest_file` bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        process = _fork(arguments, out, err, cwd, env, largest_file)
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"bapo {arguments} took longer than {PATIENCE} seconds:\n{out.read_text()}")
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def started(*arguments, log, errors=None):
    """A fork in the background that writes all it says into one file, or its errors into another."""
    return _fork(arguments, log, errors or log, ".", None, None)


def in_ranks(work, ranks, *arguments):
    """Call `work(rank, *arguments)` in so many forks at once. An error in one of them is raised here."""
    torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")


def _fork(arguments, out, err, cwd, env, largest_file):
    arguments = [str(argument) for argument in arguments]
    details = (arguments, str(out), str(err), str(cwd), env or dict(os.environ), largest_file)
    process = FORKS.Process(target=_command, args=details, daemon=True)
    process.start()
    return process


def _command(arguments, out, err, cwd, env, largest_file):
    """What the interpreter would do around `bapo.cli.main`."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    sys.path.insert(0, os.getcwd())
    os.environ.clear()
    os.environ.update(env)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    from bapo.cli import main

    try:
        main(arguments)
    finally:
        atexit._run_exitfuncs()
