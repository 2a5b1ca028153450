"""`bapo doctor`: whether this machine can run what you want, and what to do about what is missing.

Every check is a line: what was looked at, what was found, and a remedy where there is something to do. With a recipe or
keys, the model and the data that they name are read too, by the same checks that `bapo train` makes before it begins.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from bapo import __version__
from bapo.commands.training import read_request
from bapo.config.numerals import counted
from bapo.config.placement import available_cores, default_threads
from bapo.config.run import Config
from bapo.runs.write import why_not_out
from bapo.screen.terminal import say
from bapo.tasks.data.sources import BENCHMARKS, DATA_DIRECTORY

GIB = 2**30
EXTRAS = {
    "math": (("math_verify", "reasoning_gym"), 'reward = "math" and task.name = "gym"'),
    "lora": (("peft",), "model.lora.rank"),
    "tensorboard": (("tensorboard",), "log.to"),
    "wandb": (("wandb",), "log.to"),
    "trackio": (("trackio",), "log.to"),
    "mlflow": (("mlflow", "sqlalchemy", "alembic"), "log.to"),
    "parquet": (("pyarrow",), "parquet files"),
    "data": (("datasets",), "data sets from the hub"),
    "gguf": (("gguf",), "GGUF files"),
    "ray": (("ray",), "the cluster section"),
    "vllm": (("vllm",), 'cluster.engine = "vllm"'),
    "trl": (("trl",), "BapoTrainer inside TRL"),
    "verl": (("verl",), "the policy loss inside verl"),
    "textarena": (("textarena",), "games for task.environment"),
}
"""Optional packages by the name of the extra that installs them, and what they are for."""
TAKEN = "run directory"
"""The name of the check whose remedy is another directory."""
PORTS = {6379: "Ray", 8265: "Ray's dashboard"}


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    found: str
    remedy: str = ""
    """What to do; empty if there is nothing to do."""
    stops: bool = False
    """Whether a run cannot start without it."""

    def line(self) -> str:
        """As it is printed."""
        mark = "ok" if not self.remedy else "BAD" if self.stops else "note"
        told = f"{mark:<5}{self.name:<15}{self.found}"
        return "\n".join([told, *(f"{'':<20}{line}" for line in self.remedy.splitlines())])


def doctor(words: list[str]) -> int:
    """Carry out `bapo doctor`."""
    request = read_request(Config, words, prog="bapo doctor")
    if request.given.unknown:
        request.checked_config()
    findings = [*_python(), *_torch(), *_extras(), *_machine(), *_data(), *_model(request.draft, request.wrong)]
    for finding in findings:
        say(finding.line())
    bad = sum(finding.stops for finding in findings)
    where = " in another directory (--out)" if any(finding.name == TAKEN for finding in findings) else ""
    verdict = f"{counted(bad, 'thing')} must be put right before a run can start" if bad else "A run can start"
    say(f"\n{verdict}{where}.")
    return 1 if bad else 0


def _python() -> Iterator[Finding]:
    yield Finding("Python", f"{sys.version.split()[0]}, {sys.executable}")
    yield Finding("bapo", __version__)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "Install it as https://pytorch.org says for your machine."
        yield Finding("torch", f"cannot be imported: {error}", remedy, stops=True)
        return
    yield Finding("torch", torch.__version__)
    found = _version("transformers")
    remedy = "" if found else "Install it with: pip install transformers"
    yield Finding("transformers", found or "missing", remedy, stops=not found)
    card = shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
            remedy = "Another process uses it; nvidia-smi shows which." if free < 0.5 * total else ""
            yield Finding(f"GPU {index}", found, remedy)
    elif card:
        yield Finding(
            "GPU",
            "there is an NVIDIA GPU, but torch does not see it",
            f"This torch ({torch.__version__}) may be a build for CPUs, or the driver may be too old for it. Install a "
            "CUDA build. Until then, runs use the CPU.",
        )
    else:
        yield Finding("GPU", "none: runs use the CPU, which is enough for the embedded model")


def _extras() -> Iterator[Finding]:
    for extra, (packages, purpose) in EXTRAS.items():
        names = {package: package.replace("_", "-") for package in packages}
        absent = [name for package, name in names.items() if find_spec(package) is None]
        found = ", ".join(f"{name} {_version(package) or ''}".strip() for package, name in names.items())
        remedy = f"Needed for {purpose}: pip install 'bapo[{extra}]'" if absent else ""
        yield Finding(f"[{extra}]", f"{', '.join(absent)} not installed" if absent else found, remedy)


def _machine() -> Iterator[Finding]:
    yield Finding("cores", f"{available_cores()}, of which a run uses {default_threads()}")
    with_memory = Path("/proc/meminfo")
    if with_memory.exists():
        facts = dict(line.split(":", 1) for line in with_memory.read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
        low = free < 2 * GIB
        yield Finding("memory", f"{free / GIB:.1f} GiB free", "Close other programs; 2 GiB is little." if low else "")
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding(
        "disk",
        f"{free / GIB:.1f} GiB free in {Path.cwd()}",
        "A checkpoint takes 12 bytes per trained parameter. Choose another disk with --out." if free < 5 * GIB else "",
    )
    shared = Path("/dev/shm")  # noqa: S108 - it is only measured
    if shared.exists():
        free = shutil.disk_usage(shared).free
        remedy = "Ray and vLLM pass weights through it. In a container, start with --shm-size=8g." if free < GIB else ""
        yield Finding("shared memory", f"{free / GIB:.1f} GiB free in {shared}", remedy)
    for port, owner in PORTS.items():
        taken = _taken(port)
        remedy = 'If Ray runs here, join it with cluster.address = "auto"; otherwise end what uses the port.'
        yield Finding(f"port {port}", f"{'in use' if taken else 'free'} ({owner})", remedy if taken else "")


def _data() -> Iterator[Finding]:
    root = os.environ.get(DATA_DIRECTORY)
    if not root:
        yield Finding(f"${DATA_DIRECTORY}", "not set: benchmarks such as gsm8k come from the hub")
        return
    path = Path(root)
    found = [name for name in BENCHMARKS if (path / name).is_dir()]
    remedy = "" if found else f"Put benchmarks there as {root}/gsm8k/train.jsonl and so on, or unset it."
    yield Finding(f"${DATA_DIRECTORY}", f"{root}: {', '.join(found) or 'no benchmark'}", remedy)


def _model(config: Config, wrong: list[str]) -> Iterator[Finding]:
    """The model and the data of the recipe, or of the embedded run."""
    what = f"model {config.model.path}, task {config.task.name}"
    taken = why_not_out(config.out) if Path(config.out).is_dir() else None
    others = [line for line in wrong if line != taken]
    yield from (Finding("recipe", what, line, stops=True) for line in others)
    if not others:
        yield Finding("recipe", f"{what}: nothing wrong that can be seen without loading the model")
    if taken is not None:
        yield Finding(TAKEN, f"{config.out} is in use", taken)


def _taken(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _version(package: str) -> str | None:
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return None
