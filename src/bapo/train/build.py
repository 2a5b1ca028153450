"""Builds the parts of a run from its configuration."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from bapo.buffer import Buffer
from bapo.config.base import ModelConfig, refuse_on_cpu
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.config.placement import placed
from bapo.config.run import Config
from bapo.config.sections import LearnConfig
from bapo.config.sft import SftConfig, SftLearnConfig
from bapo.learn.learner import Learns
from bapo.learn.reference import Reference, initial
from bapo.learn.settings import LearnerSettings, wrong_values
from bapo.models import Policy, hush, load_policy, prompt_text
from bapo.models.lora import LoraSettings
from bapo.preflight.examine import TaskData, wrong_options
from bapo.rollout.engine import Engine, Sampling
from bapo.rollout.in_process import engine_for
from bapo.rollout.scheduler import Scheduler
from bapo.runs.ledger import Ledger
from bapo.tasks.task import ProblemStream, Task
from bapo.tasks.verify.scorers import overlong_penalty
from bapo.train.loop import Parts
from bapo.train.speed import slow_precision
from bapo.train.tasks import make_task
from bapo.train.team import ALONE, Team
from bapo.train.together import SharedEngine, SharedTask, make_learner, on_the_cpu

Kind = TypeVar("Kind", Config, SftConfig)

UNKNOWN = 0.2
"""The share of unknown tokens above which a model cannot read its prompts."""


def resolve(config: Kind) -> Kind:
    """Decide everything in the configuration that depends on this machine, and which preset `auto` is."""
    elsewhere = isinstance(config, Config) and config.cluster.address is not None
    device, dtype, threads = placed(config.device, config.model.dtype, config.threads, elsewhere=elsewhere)
    refuse_on_cpu(device, config.learn, asked=config.device)
    decided: dict[str, Any] = {"device": device, "threads": threads}
    decided["model"] = config.model.model_copy(update={"dtype": dtype})
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


def build(config: Config, team: Team = ALONE, data: TaskData | None = None) -> Parts:
    """Build the parts of a run at its beginning. `config` must be resolved, except for what the data decides.

    `data`: the problems, if they were read already.
    """
    torch.set_num_threads(max(1, config.threads // team.on_this_machine))
    policy = make_policy(on_the_cpu(config) if config.cluster.on else config)
    prepared = make_task(config, policy, data)
    task, ledger = prepared.task, Ledger()
    config = config.model_copy(update={"eval": config.eval.among(len(task.test))})
    if wrong := list(misfits(config, policy, task)):
        raise ConfigError("\n".join(wrong))
    off = config.offpolicy
    scheduler = Scheduler(
        Sampling(config.rollout.temperature, policy.stop_ids),
        max_response_tokens=config.rollout.max_tokens,
        token_budget=off.partial_budget,
        max_age=None if off.partial_budget is None else config.parked_max_age,
        over_age=off.partial_over_age,
        versions_per_run=config.updates_per_step,
        record=ledger.record,
    )
    buffer = Buffer(
        batch_groups=config.learn.batch_groups,
        max_batches=config.max_batches,
        reuse=off.reuse,
        max_staleness=off.max_staleness,
        replay_fraction=off.replay_fraction,
        replay_max_age=min(off.replay_max_age, off.max_staleness),
        replay_max_uses=off.replay_max_uses,
        capacity=off.replay_capacity,
        seed=config.seed,
        record=ledger.record,
    )
    stream = ProblemStream(task.train, seed=config.seed)
    engine, learner, close = _workers(config, policy, task, team)  # last: whoever starts a cluster must end it
    return Parts(
        config=config,
        task=task if team.size == 1 else SharedTask(task, team),
        policy=policy,
        notes=[
            *prepared.notes,
            *([] if config.cluster.on else engine_notes(engine)),
            *clip_notes(config),
            *endless_warmup(config),
            *slow_precision(config),
            *unreadable(config, policy, task),
        ],
        overlong=_overlong(config),
        engine=engine,
        stream=stream,
        scheduler=scheduler,
        buffer=buffer,
        learner=learner,
        ledger=ledger,
        close=close,
    )


def _workers(config: Config, policy: Policy, task: Task, team: Team) -> tuple[Engine, Learns, Callable[[], None]]:
    """Who samples and who learns, in this process, with the ranks beside it or in a cluster, and what ends them."""
    if config.cluster.on:
        if team.size > 1:
            raise ConfigError(
                f"cluster.rollouts={config.cluster.rollouts}, but torchrun started {team.size} ranks. Start a cluster "
                "without torchrun: Ray starts its processes."
            )
        from bapo.train.cluster_parts import start_cluster

        policy.model.to("meta")  # this process only needs to know its shape
        return start_cluster(config, policy, task)
    model = policy.model
    if config.learn.kl and team.size > 1:
        raise ConfigError(
            f"learn.kl={config.learn.kl:g} is for one process, but torchrun started {team.size} ranks, which keep no "
            "reference. Set learn.kl=0, or start the run without torchrun."
        )
    kept = initial(model) if config.learn.kl else None
    engine: Engine = engine_for(
        model,
        slots=config.rollout.slots,
        parked=config.offpolicy.partial_cache,
        cache_tokens=config.rollout.cache_tokens,
        float32_head=config.model.float32_head,
    )
    if team.size > 1:
        engine = SharedEngine(engine, team)
        model = make_policy(on_the_cpu(config)).model  # the learner's own
    learner = make_learner(model, learner_settings(config), config, team)
    if kept is not None:
        learner.reference = Reference(kept, learner.whole, learner.settings)
    return engine, learner, lambda: None


def engine_notes(engine: Engine) -> list[str]:
    """What a person should know of an engine that cannot do everything."""
    notes = []
    if not engine.draws_by_position:
        notes.append("this engine draws its own random numbers: a resumed run will not repeat an uninterrupted one")
    if not engine.gives_entropies:
        notes.append("this engine gives no entropies: evaluations do not measure eval/entropy")
    return notes


def cluster_notes(config: Config) -> list[str]:
    """What a person should know of a run on a cluster, before its actors have started."""
    cluster = config.cluster
    if not cluster.on:
        return []
    ranks, actors = counted(cluster.learners, "learner rank"), counted(cluster.rollouts, "rollout actor")
    told = [f"{actors} ({cluster.engine}) and {ranks} on {cluster.address or 'this machine'}, device {config.device}"]
    if cluster.ahead:
        told.append(
            f"sampling runs up to {counted(cluster.ahead * config.updates_per_step, 'update')} ahead of learning, so "
            f"two runs with the same seed differ"
        )
    if cluster.engine == "vllm":
        told.append("vLLM gives no entropies: evaluations do not measure eval/entropy")
    return told


def clip_notes(config: Config) -> list[str]:
    """What a person should know of a clip that the bounds on the screen do not show."""
    used_low = learner_settings(config).used_low
    if used_low is None:
        return []
    told = f"push once: tokens that were trained on before have a lower bound of {used_low:g}"
    return list(idle_push_once(config)) or [told]


def idle_push_once(config: Config) -> Iterator[str]:
    """Says so if push once is asked for, but has nothing to do."""
    objective, off = config.objective, config.offpolicy
    used_low = objective.clip.used_low if objective.name == "bapo" else objective.options.get("used_low")
    if used_low is not None and off.reuse == 1 and not off.replay_fraction:
        yield (
            "push once does nothing in this run: no token is trained on twice (offpolicy.reuse=1, "
            "offpolicy.replay_fraction=0)"
        )


def endless_warmup(config: Config) -> Iterator[str]:
    """Says so if the learning rate rises during the whole run."""
    updates, warmup = config.steps * config.updates_per_step, config.learn.warmup_updates
    if warmup > updates:
        yield (
            f"learn.warmup_updates={warmup}, but the run makes {counted(updates, 'update')}, so the rate stays below "
            f"learn.lr={config.learn.lr:g}. Lower warmup_updates."
        )


def _overlong(config: Config) -> Callable[[int], float]:
    """A function from the length of a response to what it adds to the reward for learning."""
    if config.task.overlong_tokens == 0:
        return lambda length: 0.0
    return partial(
        overlong_penalty,
        max_tokens=config.rollout.max_tokens,
        buffer=config.task.overlong_tokens,
        penalty=config.task.overlong_penalty,
    )


LOOKED_AT = 256
"""How many prompts are measured in tokens: those with the most characters. A data set may have millions."""


def longest_prompt(policy: Policy, task: Task) -> int:
    """The length of the longest prompt, in tokens."""
    prompts = heapq.nlargest(
        LOOKED_AT, (p.prompt for p in (*task.train, *task.test)), key=lambda p: len(prompt_text(p))
    )
    return max(len(policy.encode(prompt)) for prompt in prompts)


def misfits(config: Config, policy: Policy, task: Task) -> Iterator[str]:
    """What model and task cannot do together."""
    if config.eval.problems is not None and config.eval.problems > len(task.test):
        yield (
            f"eval.problems={config.eval.problems}, but the task holds out only {counted(len(task.test), 'problem')}. "
            f"Set eval.problems <= {len(task.test)}."
        )
    longest = longest_prompt(policy, task)
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    if positions is not None and longest >= positions:
        yield (
            f"the longest prompt has {longest} tokens, but {config.model.path!r} has room for {positions}, response "
            "included. Set task.max_prompt_tokens to leave such problems out, or use a model with a longer context."
        )
    elif positions is not None and longest + config.rollout.max_tokens > positions:
        yield (
            f"rollout.max_tokens={config.rollout.max_tokens} and prompts of up to {longest} tokens exceed the model's "
            f"{positions} positions. Set rollout.max_tokens <= {positions - longest}."
        )
    yield from list(wrong_options(config)) or _wrong_settings(config)


def _wrong_settings(config: Config) -> Iterator[str]:
    """What the learner and the objective say of their settings."""
    try:
        yield from wrong_values(learner_settings(config))
    except ValueError as error:
        yield str(error)


def unreadable(config: Config, policy: Policy, task: Task) -> Iterator[str]:
    """Says so if a model knows too few of the tokens of its first prompts to read them."""
    tokenizer = policy.tokenizer
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return
    tokens = [token for problem in list(task.train)[:8] for token in policy.encode(problem.prompt)]
    share = tokens.count(unknown) / max(1, len(tokens))
    if share > UNKNOWN:
        yield (
            f"{share:.0%} of the tokens of the prompts are unknown to {config.model.path!r}, so it cannot read them. "
            "Use a model that can; the embedded demo reads countdown problems only: digits and a few signs."
        )


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


SHARED = (
    *("lr", "betas", "weight_decay", "clip_norm", "schedule", "micro_tokens"),
    *("activation_checkpointing", "compile", "offload_optimizer"),
)
"""Keys of `learn` that both reinforcement learning and supervised training pass on to LearnerSettings."""


def optimizer_settings(learn: LearnConfig | SftLearnConfig) -> dict[str, Any]:
    """The settings that every learner needs, whatever its loss."""
    return {name: getattr(learn, name) for name in SHARED}
