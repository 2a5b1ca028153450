"""Every error of ours that a person can act on, each with the exit code of the command that ends with it.

    0     done
    1     an unexpected error, a verifier that fails on every response, updates that are not finite, a sampler and a
          learner that have drifted apart, a comparison with runs that did not finish, or a ledger that does not balance
    2     bad usage, a bad configuration, or input that cannot be read
    3     a checkpoint, or what an evaluation saved, is missing, damaged or of other settings; or memory ran out
    4     the disk is full, or a file cannot be read or written (an OSError)
    5     a part of the cluster cannot be started or kept alive
    130   stopped by Ctrl-C or SIGTERM; a line says what to do next

A message names what is wrong, why, and what to do instead. It is shown without a traceback.
"""

import errno
import os
import re
from pathlib import Path

OUT_OF_MEMORY = "out of memory"
"""How the message begins where memory ran out."""
_SHORT_OF_MEMORY = re.compile(
    r"not enough memory|can(?:'|no)t allocate|out of memory|bad_alloc|can't start new thread|"
    r"failed to map segment|could not create a memory|unable to mmap",
    re.IGNORECASE,
)
"""What libraries say where memory ran out. Many have no exception of their own for it."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whatever a library made of it."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if isinstance(error, RuntimeError | ImportError | OSError) and _SHORT_OF_MEMORY.search(str(error)):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and ran_out_of_memory(before)


def failed_at(error: OSError) -> str:
    """What the operating system refused: "cannot read" or "cannot write", if the error tells it; otherwise empty."""
    by_library = re.search(r"os error (\d+)", str(error))  # safetensors has no number of its own for it
    number = error.errno or (int(by_library[1]) if by_library else 0)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return "cannot write"
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return ""
    path = Path(os.fsdecode(error.filename))
    if number == errno.ENOENT and path.parent.is_dir():
        return "cannot read"  # it could have been made
    if number in (errno.EACCES, errno.EPERM) and path.exists():
        return "cannot write" if os.access(path, os.R_OK) else "cannot read"
    return "cannot write" if number in (errno.EACCES, errno.EPERM) and path.parent.is_dir() else ""


class BapoError(Exception):
    """An error that a person can act on."""

    exit_code = 1


class ConfigError(BapoError, ValueError):
    """What was asked for cannot be done."""

    exit_code = 2


class UsageError(ConfigError):
    """A command line that cannot be read. It is shown together with the usage of the command."""


class Answered(SystemExit):
    """The parser of a command line has answered by itself: it showed help, or said what it cannot read."""


class DumpError(BapoError, ValueError):
    """A dump of logged batches cannot be read."""

    exit_code = 2


class PlaceError(BapoError, OSError):
    """Something else stands where a file or folder of a run belongs: a link, a FIFO, a device. It was not opened."""

    exit_code = 2

    def __init__(self, path: Path | str, what: str = "") -> None:
        super().__init__(errno.EINVAL, what, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}".rstrip()


class CheckpointError(BapoError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged."""

    exit_code = 3


class DamagedError(BapoError):
    """What an evaluation saved is damaged, so that it cannot be continued."""

    exit_code = 3


class ClusterError(BapoError, RuntimeError):
    """A part of the cluster cannot be started, reached or kept alive."""

    exit_code = 5


class RankFailed(BapoError, RuntimeError):  # noqa: N818
    """Another rank of the same run failed, has gone, or is silent."""


class VerifierFailed(BapoError, RuntimeError):  # noqa: N818
    """A verifier failed on every response, so that nothing can be learned or measured with it."""

    def __init__(self, responses: int, cause: str, when: str) -> None:
        super().__init__(
            f"the verifier failed on all {responses} responses {when}. The first failure was: {cause}. Nothing was "
            "learned from these responses. Check task.reward, and the answers in the data."
        )


class DriftedApart(BapoError, RuntimeError):  # noqa: N818
    """The learner's log-probs of fresh tokens are not those that the sampler recorded."""


class Interrupted(BapoError):  # noqa: N818
    """The run was asked to stop, and stopped after saving."""

    exit_code = 130
