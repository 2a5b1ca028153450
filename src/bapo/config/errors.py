"""Every error of ours that a person can act on, each with the exit code of the command that ends with it.

    0     done
    1     an unexpected error, a verifier that fails on every response, updates that are not finite, a sampler and a
          learner that have drifted apart, a comparison with runs that did not finish, or a ledger that does not balance
    2     bad usage, a bad configuration, or input that cannot be read
    3     a checkpoint, or what an evaluation saved, is missing or damaged
    4     the disk is full or cannot be written to (an OSError)
    5     a part of the cluster cannot be started or kept alive
    130   stopped by the user; everything is saved

A message names what is wrong, why, and what to do instead. It is shown without a traceback.
"""

from __future__ import annotations


class BapoError(Exception):
    """An error that a person can act on."""

    exit_code = 1


class ConfigError(BapoError, ValueError):
    """What was asked for cannot be done."""

    exit_code = 2


class UsageError(ConfigError):
    """A command line that cannot be read. It is shown together with the usage of the command."""


class DumpError(BapoError, ValueError):
    """A dump of logged batches cannot be read."""

    exit_code = 2


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
