"""Importing SkyRL before Python 3.12, where pydantic wants the TypedDict of typing_extensions instead of typing's."""

import sys
import typing


def load_skyrl():
    """Import SkyRL's loss registry, real and whole. An ImportError where SkyRL is not installed."""
    import typing_extensions

    theirs = typing.TypedDict
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict
    try:
        import skyrl.backends.skyrl_train.utils.ppo_utils as ppo_utils
    finally:
        typing.TypedDict = theirs
    return ppo_utils


def metrics_in_worker(logprobs, behavior, advantages, mask):
    """In a Ray worker: the loss named `bapo` out of SkyRL's registry, as `PolicyWorkerBase` takes and calls it."""
    loss_fn = load_skyrl().PolicyLossRegistry.get("bapo")
    from skyrl.train.config import AlgorithmConfig

    config = AlgorithmConfig(policy_loss_type="bapo")
    return loss_fn(logprobs, None, advantages, config=config, loss_mask=mask.float(), rollout_logprobs=behavior)[1]
