"""The directory of a run, as the process that works on it writes it.

Logs are appended line by line and flushed, so that others can follow them. All other files are written whole or not at
all. The modules that write the files, run.py and sft.py, say what they mean. The process at work holds a lock on the
file `lock`, which is released when the process ends, for whatever reason. Other processes may read meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray
from safetensors.numpy import save_file

from bapo.config.errors import CheckpointError, ConfigError
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.runs import lock

Kept = TypeVar("Kept", Config, SftConfig)

LOGS = ("metrics.jsonl", "timing.jsonl", "rollouts.jsonl", "ledger.jsonl", "failures.jsonl")


class RunDirectory:
    """The files of a run. Logs are appended line by line and flushed, so that others can follow them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: Config | SftConfig) -> RunDirectory:
        """Create a new directory. An existing directory is never overwritten."""
        path = Path(config.out.replace("{time}", time.strftime("%Y%m%d-%H%M%S")))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            is_run = (path / "config.json").exists()
            other = f", or continue that run with `bapo resume {path}`." if is_run else "; this one holds no run."
            raise ConfigError(f"out={config.out}: {path} exists already. Choose another directory{other}") from None
        except OSError as error:
            raise ConfigError(
                f"out={config.out}: cannot create {path}: {error.strerror}. Choose another place."
            ) from None
        run = cls(path)
        run.write("config.json", config.model_dump(mode="json"))
        return run

    def config(self, schema: type[Kept]) -> Kept:
        """The configuration that the run was created with."""
        try:
            return parse(schema, json.loads((self.path / "config.json").read_text()), source="config.json")
        except ConfigError as error:
            raise CheckpointError(
                f"{self.path} cannot be resumed: {error}\nIt is not a configuration of this version of bapo. Resume it "
                "with the version that wrote it, or restore the file."
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{self.path / 'config.json'} is damaged: {error}. Restore it to resume.") from None
        except OSError:
            raise CheckpointError(
                f"{self.path} has no config.json, so it is not a run directory. Give the directory that a run printed."
            ) from None

    def held(self) -> AbstractContextManager[int]:
        """Hold the lock, so that no other process works in the directory."""
        return lock.held(
            self.path / "lock",
            busy=f"another process is at work on the run in {self.path}. Wait for it, or stop it, then run this "
            "command again.",
        )

    def summary(self) -> dict[str, Any] | None:
        """The summary, which a run writes last; None if the run is not complete."""
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        partial = self.path / f"{name}.partial"
        partial.write_text(json.dumps(value, indent=2) + "\n")
        partial.rename(self.path / name)

    def write_arrays(self, name: str, arrays: dict[str, NDArray[Any]]) -> None:
        """Write a safetensors file, whole or not at all."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        save_file(arrays, partial)
        partial.rename(path)

    def append(self, name: str, *values: dict[str, Any]) -> None:
        """Append lines to a log."""
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)

    def sizes(self) -> dict[str, int]:
        """How long each log is, in bytes."""
        return {name: (self.path / name).stat().st_size if (self.path / name).exists() else 0 for name in LOGS}

    def cut(self, sizes: dict[str, int]) -> None:
        """Cut the logs back to their length at a checkpoint. The steps after it will be repeated."""
        for name, size in sizes.items():
            if self.sizes()[name] < size:
                raise CheckpointError(
                    f"{self.path / name} is shorter than its checkpoint recorded: {self.sizes()[name]} of {size} "
                    "bytes, so the run cannot be continued without a gap. Restore the file, or start the run again."
                )
        for name, size in sizes.items():
            if size < self.sizes()[name]:
                os.truncate(self.path / name, size)

    def flush(self) -> None:
        """Flush the logs to disk, so that none is shorter than a checkpoint says."""
        for name in LOGS:
            if (self.path / name).exists():
                with (self.path / name).open("a") as file:
                    os.fsync(file.fileno())
