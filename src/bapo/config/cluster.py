"""The section `cluster`: how many processes sample and learn, where they run, and how long others wait for them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.config.base import Section


class ClusterConfig(Section):
    """Sampling and learning in processes of their own, on this machine or on many. docs/cluster.md explains it."""

    rollouts: int = Field(0, ge=0)
    """How many rollout actors sample. 0: there is no cluster, and this process samples and learns."""
    learners: int = Field(1, ge=1)
    """How many learner ranks share the model and every update."""
    ahead: int = Field(1, ge=0)
    """How many rollouts sampling may run ahead of learning. 0: sampling and learning take turns. Every rollout ahead
    makes tokens older by the updates of one step, within `offpolicy.max_staleness`."""
    engine: Literal["in-process", "vllm"] = "in-process"
    """What samples. in-process: bapo's own engine for this device. vllm: vLLM, which must be installed."""
    address: str | None = None
    """The Ray cluster to join: "auto", or host:port. None starts Ray on this machine, reachable from this machine
    only."""
    gpus_per_rollout: int = Field(1, ge=1)
    """GPUs of each rollout actor (tensor parallel; more than one needs vllm)."""
    silence_seconds: float = Field(60.0, gt=0)
    """A rollout actor that does not answer for so long, while it samples or loads weights, is replaced. Its responses
    continue elsewhere."""
    start_seconds: float = Field(600.0, gt=0)
    """How long an actor may take to start."""
    update_seconds: float = Field(1800.0, gt=0)
    """How long an update, a checkpoint or an export may take before the learner ranks are restarted."""

    @property
    def on(self) -> bool:
        """Whether there is a cluster."""
        return self.rollouts > 0

    @model_validator(mode="after")
    def _used(self) -> Self:
        if not self.on:
            changed = [key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default]
            if changed:
                raise ValueError(
                    f"cluster.{changed[0]}={getattr(self, changed[0])!r} does nothing with cluster.rollouts=0, which "
                    f"runs everything in this process. Set cluster.rollouts, or leave cluster.{changed[0]} out."
                )
        if self.gpus_per_rollout > 1 and self.engine != "vllm":
            raise ValueError(
                f"cluster.gpus_per_rollout={self.gpus_per_rollout} needs cluster.engine='vllm': bapo's own engine uses "
                "one GPU. Set gpus_per_rollout=1 and raise cluster.rollouts instead."
            )
        return self
