"""What a configuration means on this machine, for every process of a run: device, model, settings of the learner."""

from __future__ import annotations

from typing import Any, TypeVar

from bapo.config.base import ModelConfig, OptimizerConfig, refuse_on_cpu
from bapo.config.placement import placed
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.learner_settings import LearnerSettings
from bapo.models import Policy, hush, load_policy
from bapo.models.lora import LoraSettings

Kind = TypeVar("Kind", Config, SftConfig)


def resolve(config: Kind) -> Kind:
    """Decide everything in the configuration that depends on this machine, and which preset `auto` is."""
    elsewhere = isinstance(config, Config) and config.cluster.address is not None
    device, dtype, threads = placed(config.device, config.model.dtype, config.threads, elsewhere=elsewhere)
    refuse_on_cpu(device, config.learn, asked=config.device)
    model = config.model.model_copy(update={"dtype": dtype})
    decided: dict[str, Any] = {"device": device, "threads": threads, "model": model}
    if isinstance(config, Config):
        decided["objective"] = config.objective.for_passes(config.offpolicy.reuse)
    return config.model_copy(update=decided)


def prompting(model: ModelConfig) -> dict[str, Any]:
    """How prompts become text, for `load_policy` and `outline_policy`."""
    chat = {"auto": None, "yes": True, "no": False}[model.chat]
    return {"chat": chat, "system": model.system, "template_options": dict(model.template_options)}


def make_policy(config: Config | SftConfig) -> Policy:
    """Load the model of a run, without the usual messages."""
    hush()
    model, lora = config.model, config.model.lora
    return load_policy(
        model.path,
        dtype=model.dtype,
        device=config.device,
        attention=model.attention,
        **prompting(model),
        lora=LoraSettings(lora.rank, lora.alpha, lora.targets) if lora.rank else None,
        seed=config.seed,
    )


def on_the_cpu(config: Any) -> Any:
    """The same configuration for a model that is loaded on the CPU, to be divided from there."""
    model = config.model
    if model.attention == "flash_attention_2":  # it does not run there; packed passes bring their own
        model = model.model_copy(update={"attention": "auto"})
    return config.model_copy(update={"device": "cpu", "model": model})


def threads_of_actor(config: Config) -> int:
    """Threads of one actor: this machine's cores, shared by as many actors as may be on it."""
    cluster = config.cluster
    actors = cluster.rollouts + cluster.learners if cluster.address is None else 1
    return max(1, config.threads // actors)


def learner_settings(config: Config) -> LearnerSettings:
    """The part of the configuration that the learner needs."""
    learn, objective = config.learn, config.objective
    return LearnerSettings(
        **optimizer_settings(learn),
        objective=objective.name,
        clip=objective.clip,
        scope=objective.scope,
        options=dict(objective.options),
        reduction=learn.reduction,
        length=config.rollout.max_tokens,
        advantages=learn.advantages,
        temperature=config.rollout.temperature,
        warmup_updates=learn.warmup_updates,
        total_updates=config.steps * config.updates_per_step,
        ess_reference=learn.ess_reference,
        float32_head=config.model.float32_head,
        anchor_limit=learn.anchor_limit,
        kl=learn.kl,
        kept_caches=config.offpolicy.partial_cache == "keep",
    )


def optimizer_settings(learn: OptimizerConfig) -> dict[str, Any]:
    """The settings that every learner needs, whatever its loss."""
    return {name: getattr(learn, name) for name in OptimizerConfig.model_fields}
