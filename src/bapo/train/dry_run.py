"""`bapo train --dry-run`: what a run would be, on one screen, and everything that is wrong with it.

The model is looked at without its weights, and nothing is written. Memory and time are estimates, made in
`preflight/memory.py`.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from bapo.config.errors import BapoError
from bapo.config.numerals import counted, every
from bapo.config.run import Config
from bapo.environments.played import PlayedTask, rehearse
from bapo.models.export import check_saves
from bapo.models.loading import hush, outline_policy
from bapo.models.policy import Policy
from bapo.preflight.examine import TaskData, no_room, written_answers
from bapo.preflight.memory import GIB, Memory, Seconds, Shape, memory, on_cluster, seconds
from bapo.rollout.engine import Sampling
from bapo.screen.terminal import duration, printable
from bapo.tasks.countdown import Countdown, expressions
from bapo.tasks.task import Task
from bapo.train.build import (
    cluster_notes,
    endless_warmup,
    idle_push_once,
    longest_prompt,
    make_task,
    misfits,
    unreadable,
)
from bapo.train.card import learning_in_words, objective_in_words, sources_in_words
from bapo.train.machine import measured_speed, prompting, resolve, slow_precision, threads_of_actor
from bapo.types import Problem

SHOWN = 600
"""Characters of the prompt that are shown."""
WARNING = "warning"
"""The name of a line about something that works, but that hardly anybody wants."""
SMALL = 10_000_000
"""For models with fewer parameters, the defaults are right: they are those of the embedded model."""
OTHERS = {
    "steps": "TRL: 3 epochs, verl: 30",
    "rollout.prompts": "verl: 1,024",
    "rollout.max_tokens": "TRL and verl: 512",
    "offpolicy.reuse": "TRL and verl: 1",
    "learn.batch_groups": "verl: 256",
    "learn.lr": "TRL and verl: 1e-6",
}
"""Keys whose defaults fit the embedded model, and the defaults of TRL 1.16 and verl, which are for larger ones."""


def dry_run(config: Config, data: TaskData | None, wrong: list[str]) -> tuple[list[str], list[str]]:
    """The lines of the plan, and everything that is wrong. `wrong` is what is known already."""
    wrong, policy, task, notes = list(wrong), None, None, list[str]()
    hush()
    try:
        config = resolve(config)
    except BapoError as error:
        wrong.append(str(error))
    try:
        policy = outline_policy(config.model.path, **prompting(config.model))
        check_saves(policy)
    except (ValueError, OSError) as error:
        if not any(line.startswith("model.path=") for line in wrong):  # why it cannot be loaded is known already
            wrong.append(str(error))
    if policy is not None and (config.task.name != "data" or config.task.plays or data is not None):
        try:
            task, notes = make_task(_asking_once(config), policy, data)
        except (ValueError, OSError) as error:
            if not str(error) or not any(str(error) in line for line in wrong):
                wrong.append(str(error))
    if policy is not None and task is not None:
        config = config.model_copy(update={"eval": config.eval.among(len(task.test))})
        try:
            wrong += [*misfits(config, policy, task), *unreadable(config, policy, task)]
        except ValueError as error:  # a tokenizer or a template that refuses a prompt
            wrong, task = [*wrong, str(error)], None
    wrong = list(dict.fromkeys(_with_one_limit(config, wrong)))
    placed = not any(line.startswith(f"out={config.out}:") for line in wrong)
    return _plan(config, policy, task, notes, placed=placed), wrong


def _asking_once(config: Config) -> Config:
    """The same configuration, but for a judge that is asked once and then said to be gone."""
    judge = config.task.judge.model_copy(update={"retries": 0})
    return config.model_copy(update={"task": config.task.model_copy(update={"judge": judge})})


def _plan(config: Config, policy: Policy | None, task: Task | None, notes: list[str], *, placed: bool) -> list[str]:
    """The lines of the plan. `placed`: whether the run directory can be made."""
    lines = [*_model(config, policy), *_processes(config), *_task(config, policy, task, notes), *_steps(config)]
    if policy is not None and task is not None:
        lines += _needs(config, policy, task, placed=placed)
    lines += [*_place(config), *_defaults(config, policy)]
    doubts = [*idle_push_once(config), *endless_warmup(config)]
    if config.model.dtype != "auto":  # it is known where the run computes
        doubts += slow_precision(config)
    return [*lines, *(_line(WARNING, text) for text in doubts)]


def _with_one_limit(config: Config, wrong: list[str]) -> list[str]:
    """The same mistakes, where `no_room` gives way to the exact limit."""
    others = [line for line in wrong if line not in no_room(config.model, config.rollout.max_tokens)]
    return others if any(line.startswith("rollout.max_tokens=") for line in others) else wrong


def shape_of(policy: Policy, config: Config) -> Shape:
    """The dimensions of a model, and how many of its parameters are trained."""
    settings = policy.model.config.get_text_config()
    heads = settings.num_attention_heads
    parameters, rank = int(policy.model.num_parameters()), config.model.lora.rank
    head = policy.model.get_output_embeddings()
    modules = policy.model.named_modules()
    layers = {name: m for name, m in modules if isinstance(m, torch.nn.Linear) and m is not head}
    targets = config.model.lora.targets
    chosen = [module for name, module in layers.items() if not targets or name.rpartition(".")[2] in targets]
    return Shape(
        parameters=parameters,
        trained=rank * sum(m.in_features + m.out_features for m in chosen) if rank else parameters,
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        intermediate=getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size,
        key_heads=getattr(settings, "num_key_value_heads", None) or heads,
        head_width=getattr(settings, "head_dim", None) or settings.hidden_size // heads,
        matrices=sum(m.in_features * m.out_features for m in layers.values()),
    )


def _line(name: str, text: str) -> str:
    first, *rest = text.splitlines() or [""]
    return "\n".join([f"{name:<11}{first}", *(f"{'':<11}{line}" for line in rest)])


def _model(config: Config, policy: Policy | None) -> Iterator[str]:
    told = f"{config.model.path}, {config.model.dtype} on {config.device}"
    if policy is not None:
        shape = shape_of(policy, config)
        trained = "all trained" if shape.trained == shape.parameters else f"{shape.trained / 1e6:,.1f} M trained (LoRA)"
        told += f"; {shape.parameters / 1e6:,.1f} M parameters, {trained}"
    yield _line("model", told)


def _processes(config: Config) -> Iterator[str]:
    """Which processes a cluster has, what each computes with, and which Ray they live in."""
    cluster = config.cluster
    if not cluster.on:
        return
    ray = "Ray is started on this machine" if cluster.address is None else f"in the Ray cluster at {cluster.address}"
    actors, ranks = counted(cluster.rollouts, "rollout actor"), counted(cluster.learners, "learner rank")
    on_gpu, processes = config.device == "cuda", cluster.rollouts + cluster.learners
    each = counted(threads_of_actor(config), "CPU thread")
    of_actor, of_rank = (counted(cluster.gpus_per_rollout, "GPU"), "1 GPU") if on_gpu else (each, each)
    told = [
        f"this one, {actors} and {ranks}; {ray}",
        f"{_numbered('rollout', cluster.rollouts)}: engine {cluster.engine}, {of_actor}{_each(cluster.rollouts)}",
        f"{_numbered('learner', cluster.learners)}: {of_rank}{_each(cluster.learners)}",
    ]
    if on_gpu:
        needed = cluster.rollouts * cluster.gpus_per_rollout + cluster.learners
        here = f"; this machine has {torch.cuda.device_count()}" if cluster.address is None else ""
        told.append(f"{counted(needed, 'GPU')} in all{here}")
    elif cluster.address is None and 0 < config.threads < processes:
        told.append(
            f"{processes} processes share {counted(config.threads, 'CPU thread')} and slow each other down; lower "
            "cluster.rollouts or cluster.learners"
        )
    yield _line("processes", "\n".join([*told, *cluster_notes(config)[1:]]))


def _numbered(name: str, count: int) -> str:
    """`rollout 0`, or `rollout 0-3`, as the screen calls them."""
    return f"{name} 0" if count == 1 else f"{name} 0-{count - 1}"


def _each(count: int) -> str:
    return " each" if count > 1 else ""


def _task(config: Config, policy: Policy | None, task: Task | None, notes: list[str]) -> Iterator[str]:
    if policy is None or task is None:
        return
    sizes = f"{counted(len(task.train), 'problem')} to train on, {len(task.test):,} held out"
    asked = f"{config.eval.problems:,} of them evaluated, {counted(config.eval.k, 'response')} each"
    yield _line("data", "\n".join(filter(None, (f"{config.task.name}: {sizes}, {asked}", "; ".join(notes)))))
    if isinstance(task, PlayedTask):
        for label, text in rehearse(task, policy):
            yield _line(label, printable(text if len(text) <= SHOWN else f"{text[:SHOWN]} …"))
        return
    problem = task.train[0]
    text = printable(policy.decode(policy.encode(problem.prompt)))
    yield _line("prompt", text if len(text) <= SHOWN else f"{text[:SHOWN]} …")
    told, doubt = _gold(problem, task)
    yield _line("answer", told)
    if doubt:
        yield _line(WARNING, doubt)
    tokens = (policy.tokenizer.encode(text, add_special_tokens=False) for text in _tries(problem, task))
    shortest = min(map(len, tokens))
    if shortest > config.rollout.max_tokens:
        yield _line(
            WARNING,
            f"this answer alone has {counted(shortest, 'token')}, but rollout.max_tokens={config.rollout.max_tokens} "
            "cuts responses off before that.",
        )


def _tries(problem: Problem, task: Task) -> list[str]:
    """Responses that may be right: for the embedded task, every expression of its numbers."""
    if isinstance(task, Countdown):
        return [f"{text}={value}." for text, value in expressions(problem.answer["numbers"])]
    return written_answers(problem)


def _gold(problem: Problem, task: Task) -> tuple[str, str]:
    """A right response and its reward, and what to look at if that is not a reward."""
    tries = _tries(problem, task)
    scored = list(zip(tries, task.scores([(problem, text) for text in tries]), strict=True))
    found = [(score.reward, text) for text, score in scored if score.reward is not None]
    if not found:
        return f"the verifier fails on the reference answer {problem.answer!r}: {scored[0][1].failure}", ""
    reward, text = max(found, key=lambda pair: pair[0])
    if reward <= 0:
        return (
            f"{problem.answer!r} gets reward {reward:g}, however it is written ({', '.join(map(repr, tries))})",
            "a right response may get no reward. Check task.reward, to which answers come as text even if they are "
            "numbers in\nthe data, or ask in task.template for the form of answer that it wants.",
        )
    return f"{printable(text)!r} gets reward {reward:g}", ""


def _steps(config: Config) -> Iterator[str]:
    rollout, off, per_step = config.rollout, config.offpolicy, config.updates_per_step
    responses = rollout.prompts * rollout.responses
    yield _line(
        "sampling",
        f"{counted(config.steps, 'step')} of {counted(rollout.prompts, 'prompt')} x "
        f"{counted(rollout.responses, 'response')} = {counted(config.steps * responses, 'response')} of up to "
        f"{rollout.max_tokens:,} tokens, {Sampling(**rollout.sampling).words}\n"
        "longer responses are cut off and scored as they are; each step shows their share as `cut`",
    )
    in_all = f"{per_step} per step, {config.steps * per_step:,} in all"
    yield _line("updates", f"{in_all}\n{learning_in_words(config.learn)}")
    yield _line("clip", objective_in_words(config.objective))
    oldest = per_step - 1 + config.cluster.ahead * per_step * config.cluster.on
    sources = sources_in_words(off)
    grows = "" if len(sources) > 1 else f"; tokens grow {counted(oldest, 'update')} old"
    yield _line("staleness", f"at most {counted(off.max_staleness, 'update')}, enforced; {', '.join(sources)}{grows}")
    yield _line("eval", _evaluations(config))


def _evaluations(config: Config) -> str:
    """When the held-out problems are evaluated."""
    asked = config.eval
    told = "before and after training"
    if 0 < asked.every < config.steps:
        told += f", and {every(asked.every, 'step')}"
    told += f"; temperature {asked.temperature:g}"
    if asked.also_at:
        told += f", before and after also {' and '.join(f'{one:g}' for one in asked.also_at)}"
    return told


def _needs(config: Config, policy: Policy, task: Task, *, placed: bool) -> Iterator[str]:
    shape, longest = shape_of(policy, config), longest_prompt(policy, task)
    held = memory(config, shape, longest)
    took = None
    if config.device != "cuda" or torch.cuda.is_available():
        flops, bandwidth = measured_speed(config)
        took = seconds(config, shape, longest, flops=flops, bandwidth=bandwidth)
    if config.cluster.on:
        parts = on_cluster(config, shape, held, took, threads=threads_of_actor(config))
        took = parts.took
        yield _line(
            "memory",
            f"about {_bytes(parts.actor)} in a rollout actor: weights, keys and values\n"
            f"about {_bytes(parts.rank)} in a learner rank: its part of weights and optimizer, activations",
        )
    else:
        yield _line("memory", _told_memory(config, held))
    yield _line("time", "not estimated: this machine has no GPU to measure" if took is None else _told_time(took))
    needed, out = f"up to about {_bytes(held.disk)} in the run directory", Path(config.out)
    if not placed:
        yield _line("disk", needed)
        return
    free = shutil.disk_usage(next(place for place in (out, *out.absolute().parents) if place.exists())).free
    yield _line("disk", f"{needed}; {_bytes(free)} are free there")
    if held.disk > free:
        yield _line(WARNING, "the run directory may not fit on its disk. Lower checkpoint_keep, or choose another out.")


def _told_memory(config: Config, held: Memory) -> str:
    parts = (
        ("weights and optimizer", held.states),
        ("sampler's copy", held.sampler),
        ("copy of the initial weights", held.reference),
        ("keys and values", held.cache),
        ("activations", held.activations),
    )
    told = f"about {_bytes(held.in_all)}: {', '.join(f'{name} {_bytes(size)}' for name, size in parts if size)}"
    if config.device == "cuda" and torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
        told += f"\nthe GPU has {_bytes(has)}"
        if held.in_all > 0.9 * has and not config.cluster.on:
            told += "; lower rollout.slots or learn.micro_tokens, set rollout.cache_tokens or model.lora.rank"
    return told


def _told_time(took: Seconds) -> str:
    parts = (("sampling", took.sampling), ("learning", took.learning), ("evaluating", took.evaluating))
    at_once = "; sampling and learning go on at the same time" if took.at_once else ""
    return (
        f"very roughly {duration(took.in_all)} if every response has its full length: "
        f"{', '.join(f'{name} {duration(part)}' for name, part in parts)}{at_once}"
    )


def _place(config: Config) -> Iterator[str]:
    often = every(config.checkpoint_every, "step")
    often += f" or {config.checkpoint_minutes:g} minutes" if config.checkpoint_minutes else ""
    yield _line("out", f"{config.out}, a checkpoint {often}, {config.checkpoint_keep} kept")
    if config.log.to:
        yield _line("log", f"{', '.join(config.log.to)}; project {config.log.project}")


def _defaults(config: Config, policy: Policy | None) -> Iterator[str]:
    """The defaults that a large model has from the embedded one, each with what others take."""
    if policy is None or config.model.path == "demo" or shape_of(policy, config).parameters < SMALL:
        return
    told = []
    for key, others in OTHERS.items():
        section, _, name = key.rpartition(".")
        table = getattr(config, section) if section else config
        if name not in table.model_fields_set:
            told.append(f"{key} = {getattr(table, name):g} ({others})")
    if told and config.model.lora.rank:
        told.append("LoRA takes ten to twenty times the learning rate that all weights take")
    if told:
        yield _line("defaults", "\n".join(["chosen for the embedded model; set those that do not fit this one", *told]))


def _bytes(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{math.ceil(size / 2**20)} MiB"
