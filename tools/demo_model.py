"""Rebuilds the demo model: tokenizer, supervised warm start, measurement, files.

    python tools/demo_model.py --out DIR

A Llama-architecture model with one token per character is trained, supervised, on noisy searches for the training
problems of the countdown task. Held-out problems are used only for the final measurement. The result
solves about four in ten held-out problems with one response and nine in ten with eight, which leaves room for
reinforcement learning. One thread and one seed give the same files again, on the same machine and torch version.

A demonstration is what a careless solver would write. It tries expressions more or less at random and closes the first
one whose stated value is the target. Four kinds of chance shape the tries and leave reinforcement learning something to
do:

    careless     a try draws its numbers with replacement, so it may use one twice and another not at all
    near         a try comes from the few expressions of the right numbers whose values are nearest to the target;
                 otherwise any of them is drawn
    false stop   a try is closed whatever its value
    wrong sum    a try states a value that is a little off

A search that finds nothing reaches the length limit and stays unclosed. So wrong responses are longer than right ones,
which is the imbalance that BAPO addresses.

The sampler below serves only the final report. It knows nothing about versions, parking or log-probs; the engines in
`rollout` do.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bapo.demo import MAX_RESPONSE_TOKENS
from bapo.screen.terminal import say
from bapo.tasks.countdown import ALPHABET, END_MARK, OPERATORS, SEPARATOR, Countdown, evaluate, expressions
from bapo.types import Problem

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
IGNORED = -100
"""The label of tokens that are not learned: prompts and padding."""
BATCH_SIZE = 32
PEAK_LR = 1e-3
WARMUP_STEPS = 100
LOWEST, HIGHEST = -50, 150
"""Expressions with values outside this range are not tried: the model need not learn such sums."""
NEAREST = 10
"""How many expressions a near try chooses from."""
SLIPS = (-10, -2, -1, 1, 2, 10)
"""The errors that a wrong sum can make."""
_STATED = re.compile(r"(\d+)([-+*])(\d+)([-+*])(\d+)=(-?\d+)", re.ASCII)


@dataclass(frozen=True)
class Response:
    """One sampled response to one problem."""

    text: str
    """The text without the stop token."""
    length: int
    """In tokens, including the stop token."""
    entropy: float
    """Sum over tokens, in nats."""
    reward: float


@dataclass(frozen=True)
class Measurement:
    """How well a model does on some problems."""

    avg: float
    """Mean reward: avg@k for k responses per problem."""
    pass_any: float
    """Share of problems that at least one response solves: pass@k."""
    entropy: float
    """Mean per response token, in nats."""
    length: float
    length_right: float
    length_wrong: float
    positive_share: float
    """Share of the sum of |advantage| over tokens that positive tokens hold. Advantages are normalised per group, as in
    GRPO."""
    closed_wrong: float
    """Share of wrong responses that are closed."""
    true_statements: float
    """Share of stated values that are right."""


@dataclass(frozen=True)
class Noise:
    """How often each kind of noise occurs: a probability per try."""

    careless: float = 0.2
    near: float = 0.35
    """A probability among the tries that are not careless."""
    false_stop: float = 0.01
    wrong_sum: float = 0.02


def demonstrate(problem: Problem, rng: Random, noise: Noise, *, max_length: int) -> str:
    """One search: a closed chain, or the first `max_length` characters of a chain that is not closed by then."""
    numbers, target = tuple(problem.answer["numbers"]), problem.answer["target"]
    text = ""
    while len(text) < max_length:
        expression, value = _one_try(numbers, target, rng, noise)
        if rng.random() < noise.wrong_sum:
            value += rng.choice(SLIPS)
        closed = value == target or rng.random() < noise.false_stop
        text += f"{expression}={value}{END_MARK if closed else SEPARATOR}"
        if closed:
            break
    return text[:max_length]


def _one_try(numbers: tuple[int, ...], target: int, rng: Random, noise: Noise) -> tuple[str, int]:
    if rng.random() < noise.careless:
        while True:
            first, second, third = (rng.choice(numbers) for _ in numbers)
            operator, other_operator = rng.choice(OPERATORS), rng.choice(OPERATORS)
            value = evaluate((first, second, third), operator + other_operator)
            if LOWEST <= value <= HIGHEST:
                return f"{first}{operator}{second}{other_operator}{third}", value
    right = _tried_expressions(tuple(sorted(numbers)))
    if rng.random() < noise.near:
        return rng.choice(sorted(right, key=lambda found: (abs(found[1] - target), rng.random()))[:NEAREST])
    return rng.choice(right)


@cache
def _tried_expressions(numbers: tuple[int, ...]) -> list[tuple[str, int]]:
    return [found for found in expressions(numbers) if LOWEST <= found[1] <= HIGHEST]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of the task's alphabet; `<eos>` follows the end mark and stops the response."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 0.8 million parameters, freshly initialised. There is no bos token: prompts start with their text."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        max_new_tokens=MAX_RESPONSE_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def encode_demonstrations(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, rng: Random, noise: Noise
) -> tuple[Tensor, Tensor]:
    """One demonstration per problem -> (input ids, labels), both [problems, longest], padded on the right."""
    ids, labels = [], []
    for problem in problems:
        prompt = tokenizer.encode(problem.prompt, add_special_tokens=False)
        text = demonstrate(problem, rng, noise, max_length=MAX_RESPONSE_TOKENS)
        response = tokenizer.encode(text, add_special_tokens=False)
        if text.endswith(END_MARK):
            response.append(tokenizer.eos_token_id)
        response = response[:MAX_RESPONSE_TOKENS]
        ids.append(prompt + response)
        labels.append([IGNORED] * len(prompt) + response)
    longest = max(map(len, ids))
    return (
        torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in ids]),
        torch.tensor([row + [IGNORED] * (longest - len(row)) for row in labels]),
    )


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    steps: int,
    seed: int,
    noise: Noise,
) -> None:
    """Supervised training on fresh demonstrations, one batch per step. The learning rate warms up, then falls to 0
    along a cosine."""
    rng = Random(seed)  # noqa: S311 - data, not secrets
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = min(WARMUP_STEPS, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    began, losses = time.monotonic(), []
    model.train()
    for step in range(1, steps + 1):
        ids, labels = encode_demonstrations(rng.choices(problems, k=BATCH_SIZE), tokenizer, rng, noise)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            elapsed = time.monotonic() - began
            say(f"step {step}/{steps}  loss {fmean(losses):.4f}  {elapsed:.0f} s")
            losses.clear()
    model.train(False)


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Countdown,
    problems: Sequence[Problem],
    *,
    responses: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[Response]]:
    """Sample a group of responses per problem, in the order of `problems`. Prompts of equal length share a batch."""
    generator = torch.Generator().manual_seed(seed)
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, problem in enumerate(problems):
        by_length[len(problem.prompt)].append(i)
    groups: list[list[Response]] = [[] for _ in problems]
    for indices in by_length.values():
        rows = [i for i in indices for _ in range(responses)]
        ids = torch.tensor(tokenizer([problems[i].prompt for i in rows], add_special_tokens=False)["input_ids"])
        tokens, entropies = _continue(model, ids, tokenizer.eos_token_id, temperature, generator)
        for i, row, row_entropies in zip(rows, tokens.tolist(), entropies.tolist(), strict=True):
            length = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            text = str(tokenizer.decode(row[:length], skip_special_tokens=True))
            reward = task.score(problems[i], text)
            groups[i].append(Response(text, length, sum(row_entropies[:length]), reward))
    return groups


def _continue(
    model: LlamaForCausalLM, ids: Tensor, eos: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sample up to the length limit -> (tokens, entropies), both [rows, length]. After `eos` a row holds noise."""
    past, step_ids, stopped = None, ids, torch.zeros(len(ids), dtype=torch.bool)
    tokens: list[Tensor] = []
    entropies: list[Tensor] = []
    while len(tokens) < MAX_RESPONSE_TOKENS and not stopped.all():
        out = model(input_ids=step_ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        logprobs = (out.logits[:, -1] / temperature).log_softmax(-1)
        step_ids = torch.multinomial(logprobs.exp(), 1, generator=generator)
        tokens.append(step_ids)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1, keepdim=True))
        stopped |= step_ids[:, 0] == eos
    return torch.cat(tokens, dim=1), torch.cat(entropies, dim=1)


def measure(groups: Sequence[Sequence[Response]]) -> Measurement:
    """Reduce groups of responses to the figures that the model is tuned for."""
    responses = [response for group in groups for response in group]
    right = [response for response in responses if response.reward == 1.0]
    wrong = [response for response in responses if response.reward == 0.0]
    statements = [match.groups() for response in responses for match in _complete_tries(response.text)]
    true = [evaluate((int(a), int(b), int(c)), p + q) == int(value) for a, p, b, q, c, value in statements]
    positive = negative = 0.0
    for group in groups:
        rewards = [response.reward for response in group]
        mean, deviation = fmean(rewards), pstdev(rewards)
        for response in group if deviation else ():
            signal = (response.reward - mean) / deviation * response.length
            positive, negative = positive + max(signal, 0.0), negative + max(-signal, 0.0)

    def mean_of(values: list[float]) -> float:
        return fmean(values) if values else math.nan

    return Measurement(
        avg=fmean(response.reward for response in responses),
        pass_any=fmean(any(response.reward == 1.0 for response in group) for group in groups),
        entropy=sum(response.entropy for response in responses) / sum(response.length for response in responses),
        length=fmean(response.length for response in responses),
        length_right=mean_of([response.length for response in right]),
        length_wrong=mean_of([response.length for response in wrong]),
        positive_share=positive / (positive + negative) if positive else math.nan,
        closed_wrong=mean_of([response.text.endswith(END_MARK) for response in wrong]),
        true_statements=mean_of([float(is_true) for is_true in true]),
    )


def _complete_tries(text: str) -> list[re.Match[str]]:
    """The well-formed tries of a response, without a last one that the length limit cut short."""
    tries = text.replace(END_MARK, SEPARATOR).split(SEPARATOR)[:-1]
    return [match for match in map(_STATED.fullmatch, tries) if match]


def main() -> None:
    """Build, train, measure, save."""
    parser = argparse.ArgumentParser(prog="python tools/demo_model.py", description="Rebuild the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="directory for the model and tokenizer files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the demonstrations")
    parser.add_argument("--steps", type=int, default=4000, help="batches of 32 demonstrations to train on")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} would train nothing. Give 1 or more.")

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    task, tokenizer = Countdown(), build_tokenizer()
    model = build_model(tokenizer)
    say(f"{model.num_parameters():,} parameters, {len(task.train)} training problems")
    train(model, tokenizer, task.train, steps=arguments.steps, seed=arguments.seed, noise=Noise())
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    say(f"saved to {arguments.out}; now sampling 8 responses to each of {len(task.test)} held-out problems")
    groups = sample(model, tokenizer, task, task.test, seed=arguments.seed)
    for name, value in asdict(measure(groups)).items():
        say(f"{name:16} {value:.3f}")
    for group in groups[:2]:
        for response in group[:3]:
            say(f"{response.reward:.0f}  {response.text}")


if __name__ == "__main__":
    main()
