"""Builds the parts of a run from its configuration: model, task, engine, scheduler, buffer, learner.

It also says what these parts cannot do together, and what a person should know of them. A dry run asks it for that.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

import torch

from bapo.buffer import Buffer
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.config.run import Config, TaskConfig
from bapo.environments.played import PlayedTask, conversations_of, rows_of
from bapo.learn.learner import Learns
from bapo.learn.learner_settings import wrong_values
from bapo.learn.reference import Reference, initial
from bapo.models.policy import Policy, prompt_text
from bapo.preflight.examine import TaskData, load_task, make_judge, wrong_options
from bapo.rollout.engine import Engine, Sampling
from bapo.rollout.local.engine import engine_for
from bapo.rollout.scheduler import Scheduler
from bapo.runs.ledger import Ledger
from bapo.tasks.countdown import Countdown
from bapo.tasks.data.problems import within, without_overlap
from bapo.tasks.judge import Judge
from bapo.tasks.task import ProblemStream, Task
from bapo.tasks.verify.scorers import DataTask, Verifier, check_answers, open_scorer, overlong_penalty
from bapo.train.loop import Parts
from bapo.train.machine import learner_settings, make_policy, on_the_cpu, slow_precision
from bapo.train.torchrun import ALONE, SharedEngine, SharedTask, Team, make_learner
from bapo.types import Problem

UNKNOWN = 0.2
"""The share of unknown tokens above which a model cannot read its prompts."""


def build(config: Config, team: Team = ALONE, data: TaskData | None = None) -> Parts:
    """Build the parts of a run at its beginning. `config` must be resolved, except for what the data decides.

    `data`: the problems, if they were read already.
    """
    torch.set_num_threads(max(1, config.threads // team.on_this_machine))
    policy = make_policy(on_the_cpu(config) if config.cluster.on else config)
    task, notes = make_task(config, policy, data)
    if team.size > 1 and isinstance(task, DataTask) and task.judge is not None:
        raise ConfigError(
            f"task.reward={config.task.reward!r} is for one process or a cluster, but torchrun started {team.size} "
            "ranks, which would each ask the judge and keep their own scores. Start the run without torchrun."
        )
    ledger = Ledger()
    config = config.model_copy(update={"eval": config.eval.among(len(task.test))})
    if wrong := list(misfits(config, policy, task)):
        raise ConfigError("\n".join(wrong))
    off = config.offpolicy
    scheduler = Scheduler(
        Sampling(stop_ids=policy.stop_ids, **config.rollout.sampling),
        max_response_tokens=config.rollout.max_tokens,
        token_budget=off.partial_budget,
        max_age=None if off.partial_budget is None else config.parked_max_age,
        over_age=off.partial_over_age,
        versions_per_run=config.updates_per_step,
        record=ledger.record,
        conversations=conversations_of(task, config.task, policy, config.rollout.max_tokens),
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
        truncated=config.learn.truncated,
        each_reward=config.learn.advantages == "gdpo",
        seed=config.seed,
        record=ledger.record,
    )
    stream = ProblemStream(task.train, seed=config.seed)
    engine, learner, close = _workers(config, policy, task, team)  # last: whoever starts a cluster must end it
    if isinstance(task, PlayedTask):
        close = task.close  # and there is no cluster
    return Parts(
        config=config,
        task=task if team.size == 1 else SharedTask(task, team),
        policy=policy,
        notes=[
            *notes,
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
    if config.task.plays and (config.cluster.on or team.size > 1):
        raise ConfigError(
            "task.environment and task.tools are for one process that samples and learns. Start the run without "
            "torchrun, and leave cluster.rollouts out."
        )
    if config.cluster.on:
        if team.size > 1:
            raise ConfigError(
                f"cluster.rollouts={config.cluster.rollouts}, but torchrun started {team.size} ranks. Start a cluster "
                "without torchrun: Ray starts its processes."
            )
        from bapo.train.cluster.loop import start_cluster

        policy.model.to("meta")  # this process only needs to know its shape
        return start_cluster(config, policy, task)
    model = policy.model
    if config.learn.refers and team.size > 1:
        raise ConfigError(
            f"{config.learn.refers} is for one process, but torchrun started {team.size} ranks, which keep no "
            "reference. Set it to 0, or start the run without torchrun."
        )
    kept = initial(model, moves=config.learn.kl_every is not None) if config.learn.refers else None
    engine: Engine = engine_for(
        model,
        slots=config.rollout.slots,
        parked=config.offpolicy.partial_cache,
        cache_tokens=config.rollout.cache_tokens,
        float32_head=config.model.float32_head,
        precision=config.rollout.precision,
    )
    if team.size > 1:
        engine = SharedEngine(engine, team)
        model = make_policy(on_the_cpu(config)).model  # the learner's own
    learner = make_learner(model, learner_settings(config), config, team)
    if kept is not None:
        learner.reference = Reference(kept, learner.whole, learner.settings)
    return engine, learner, lambda: None


def make_task(config: Config, policy: Policy, data: TaskData | None = None) -> tuple[Task, list[str]]:
    """The task that the configuration names, fitted to the model that will answer, and what to know about it.

    It does not depend on the seed: all seeds see the same problems. `data`: its problems, if they were read already.
    """
    chosen = config.task
    if chosen.name == "countdown":
        return Countdown(), []
    if chosen.name == "gym":
        if find_spec("reasoning_gym") is None:
            raise ValueError(
                "task.name='gym' needs reasoning-gym, which is not installed. Install it with: pip install 'bapo[math]'"
            )
        from bapo.tasks.gym import Gym

        return Gym(
            chosen.gym,
            train_size=chosen.gym_train,
            test_size=chosen.gym_test,
            chat=policy.chat,
            thinking=policy.opens_thinking,
            workers=chosen.reward_workers or None,
            seconds=chosen.reward_seconds,
            memory_mb=chosen.reward_memory_mb,
        ), []
    return _from_data(config, policy, data)


def _verifier(chosen: TaskConfig, policy: Policy, judge: Judge | None) -> Verifier:
    return open_scorer(
        chosen.rewards,
        opens_thinking=policy.opens_thinking,
        weights=chosen.reward_weights,
        seconds=chosen.reward_seconds,
        memory_mb=chosen.reward_memory_mb,
        workers=chosen.reward_workers or None,
        retries=chosen.reward_retries,
        isolated=chosen.reward_isolated,
        judge=judge,
    )


def _from_data(config: Config, policy: Policy, data: TaskData | None) -> tuple[Task, list[str]]:
    chosen = config.task
    judge = make_judge(chosen)
    if chosen.plays:
        return PlayedTask(chosen, policy, partial(_verifier, chosen, policy, judge), *rows_of(chosen)), []
    verifier = _verifier(chosen, policy, judge)
    data = data or load_task(chosen, whole_rows=verifier.takes_columns)
    notes, most = list(data.notes), chosen.max_prompt_tokens
    apart = "task.test" if chosen.test else "task.holdout"
    loaded: dict[str, Sequence[Problem]] = {"task.train": data.train, apart: data.test}
    for name, problems in loaded.items():
        long: Sequence[Problem] = ()
        if most is not None:
            loaded[name], long = within(problems, lambda prompt: len(policy.encode(prompt)), most)
        if long:
            notes.append(f"{name}: left out {counted(len(long), 'prompt')} over {most} tokens")
    test = loaded[apart]
    train, shared = without_overlap(loaded["task.train"], test)
    if shared:
        notes.append(f"task.train: left out {counted(len(shared), 'problem')} also held out")
    if not train or not test:
        empty = "task.train" if not train else apart
        remedy = "Give other data to train on." if shared and not train else "Raise task.max_prompt_tokens."
        raise ValueError(f"{empty} has no problem left. {'; '.join(notes)}. {remedy}")
    check_answers([*train, *test], chosen.rewards)
    return DataTask(train, test, verifier.scores, judge), notes


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
    """Say which lower bound used tokens have: the bounds on the screen do not show it."""
    if (used_low := config.objective.bound_of_used) is None:
        return []
    told = f"push once: tokens that were trained on before have a lower bound of {used_low:g}"
    return list(idle_push_once(config)) or [told]


def idle_push_once(config: Config) -> Iterator[str]:
    """Say so if push once is asked for, but has nothing to do."""
    off = config.offpolicy
    if config.objective.bound_of_used is not None and off.reuse == 1 and not off.replay_fraction:
        yield (
            "push once does nothing in this run: no token is trained on twice (offpolicy.reuse=1, "
            "offpolicy.replay_fraction=0)"
        )


def endless_warmup(config: Config) -> Iterator[str]:
    """Say so if the learning rate rises during the whole run."""
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
    prompts = (problem.prompt for problem in (*task.train, *task.test))
    longest = heapq.nlargest(LOOKED_AT, prompts, key=lambda prompt: len(prompt_text(prompt)))
    return max(len(policy.encode(prompt)) for prompt in longest)


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
    if wrong := list(wrong_options(config)):
        yield from wrong
        return
    try:
        yield from wrong_values(learner_settings(config))
    except ValueError as error:
        yield str(error)


def unreadable(config: Config, policy: Policy, task: Task) -> Iterator[str]:
    """Say so if a model knows too few of the tokens of its first prompts to read them."""
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
