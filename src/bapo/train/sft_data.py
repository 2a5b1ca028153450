"""Demonstrations as a model sees them: the tokens to read, the tokens to learn, and their order.

    ids = prompt as the sampler will put it  +  response  +  the token that ends a response

The response is tokenised separately from the prompt, because the model also samples it separately, one token at a time
after the prompt's tokens. The end token is learned too; without it the model would never stop. It is the token that the
chat template writes after an assistant's turn if the sampler stops there, otherwise the tokenizer's own end token.

Held-out prompts are those with the smallest ids. Ids are hashes, so the held-out prompts do not depend on the seed or
on the order of the rows, and all responses to one prompt are on the same side. Two prompts count as one if they ask the
same question or become the same tokens: for example, a chat with a system message, and a plain text that the model puts
the same system message before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

from bapo.config.sft import SftTaskConfig
from bapo.models import Policy
from bapo.models.policy import end_of_turn
from bapo.preflight.examine import Demonstrations
from bapo.tasks.data.problems import Demonstration, smallest
from bapo.types import Message, batches_per_pass, even_part


class Encoded(NamedTuple):
    """A demonstration in the tokens of a model."""

    prompt: list[int]
    response: list[int]
    """Includes the token that ends it."""


@dataclass(frozen=True)
class SftData:
    """The demonstrations that a run learns from, those it only measures, and what happened to the rest."""

    train: list[Encoded]
    held_out: list[Encoded]
    counts: dict[str, int]
    """Rows read, demonstrations used and held out, and how many were left out for which reason."""

    @cached_property
    def fingerprint(self) -> str:
        """One value for all demonstrations, in order. A resumed run must find the same value that it began with."""
        lines = (json.dumps([encoded.prompt, encoded.response]) for encoded in (*self.train, *self.held_out))
        return sha256("\n".join(lines).encode()).hexdigest()


class Batches:
    """Batches in a shuffled order that a single number can resume: update i of (seed, epoch) is always the same.

    An epoch is cut into batches whose sizes differ by one at most, so no demonstration is left over.
    """

    def __init__(self, data: Sequence[Encoded], *, size: int, epochs: int, seed: int) -> None:
        self.data = data
        self.per_epoch = batches_per_pass(len(data), size)
        self.total = epochs * self.per_epoch
        self.seed = seed
        self._epoch, self._order = -1, list[int]()

    def at(self, update: int) -> list[Encoded]:
        """The batch of one update. Updates count from 0."""
        epoch, index = divmod(update, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.data)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)  # noqa: S311
        begin, end = even_part(len(self._order), self.per_epoch, index)
        return [self.data[i] for i in self._order[begin:end]]


def encode_demonstrations(loaded: Demonstrations, config: SftTaskConfig, policy: Policy) -> SftData:
    """Encode demonstrations in the model's tokens. Those that are too long for the model are left out and counted."""
    train, held_out, reports = loaded
    counts = {key: sum(asdict(report)[key] for report in reports) for key in COUNTED}
    encoder = Encoder(policy, config.max_tokens)
    learned = [(question(d), encoded) for d in train if (encoded := encoder(d))]
    measured = [(question(d), encoded) for d in held_out if (encoded := encoder(d))]
    named = under_one_name(learned + measured)
    given, measured = named[: len(learned)], named[len(learned) :]
    names = {name for name, _ in measured} if config.test else smallest({name for name, _ in given}, config.holdout)
    learned = [pair for pair in given if pair[0] not in names]
    if config.test:
        counts["also_held_out"] = len(given) - len(learned)
    else:
        measured = [pair for pair in given if pair[0] in names]
    counts |= {"too_long": encoder.too_long, "longest": encoder.limit or 0}
    if not learned or (config.test and not measured):
        kind = "task.test" if learned else "task.train"
        raise ValueError(
            f"{kind} gives no demonstration that can be used: {describe(counts)}. Raise task.max_tokens if the model "
            "has enough positions, or choose other data."
        )
    counts |= {"train": len(learned), "held_out": len(measured)}
    return SftData([encoded for _, encoded in learned], [encoded for _, encoded in measured], counts)


COUNTED = ("read", "duplicates", "without_prompt", "without_answer")


def describe(counts: dict[str, int]) -> str:
    """Say in words what happened to the rows."""
    left_out = {
        "duplicates": "duplicates",
        "without_prompt": "without a prompt",
        "without_answer": "without a response",
        "too_long": f"longer than {counts['longest']:,} tokens",
        "also_held_out": "also held out",
    }
    parts = [f"{counts[key]:,} {words}" for key, words in left_out.items() if counts.get(key)]
    used = f", {counts['train']:,} to learn from, {counts['held_out']:,} held out" if "train" in counts else ""
    return f"{counts['read']:,} rows read{used}" + (f"; left out: {', '.join(parts)}" if parts else "")


def question(demonstration: Demonstration) -> str:
    """The id of the question. Demonstrations of one prompt share it."""
    return demonstration.id.rpartition("-")[0]


def under_one_name(pairs: Sequence[tuple[str, Encoded]]) -> list[tuple[str, Encoded]]:
    """The pairs under new names, shared by all whose names or prompt tokens agree: the smallest of the old names."""
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while above.get(name, name) != name:
            name = above[name]
        return name

    first: dict[tuple[int, ...], str] = {}
    for name, encoded in pairs:
        one, other = top(name), top(first.setdefault(tuple(encoded.prompt), name))
        above[max(one, other)] = min(one, other)
    return [(top(name), encoded) for name, encoded in pairs]


class Encoder:
    """Turns demonstrations into tokens, and counts those that are too long."""

    def __init__(self, policy: Policy, max_tokens: int | None) -> None:
        self.policy = policy
        self.end_of_text, self.end_of_chat = end_of_response(policy, ""), end_of_response(policy, [])
        positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        self.limit = min((limit for limit in (max_tokens, positions) if limit is not None), default=None)
        self.too_long = 0

    def __call__(self, demonstration: Demonstration) -> Encoded | None:
        """Encode one demonstration; None if it is longer than the limit."""
        prompt = self.policy.encode(demonstration.prompt)
        if not prompt:
            raise ValueError(
                f"the prompt {demonstration.prompt!r} has no tokens, so nothing predicts the first token of its "
                "response. Put text around it with task.template, or remove it from the data."
            )
        response = list(self.policy.tokenizer.encode(demonstration.response, add_special_tokens=False))
        end = next((i + 1 for i, token in enumerate(response) if token in self.policy.stop_ids), None)
        if end is not None and not self.policy.decode(response[end:]).strip():
            response = response[:end]  # some data sets write the end token themselves, and a line break after it
        if not response or response[-1] not in self.policy.stop_ids:
            response.append(self.end_of_text if isinstance(demonstration.prompt, str) else self.end_of_chat)
        if self.limit is not None and len(prompt) + len(response) > self.limit:
            self.too_long += 1
            return None
        return Encoded(prompt, response)


def end_of_response(policy: Policy, prompt: str | list[Message]) -> int:
    """The token that ends a response to such a prompt: one that the sampler stops at; in a chat, the template's own."""
    tokenizer = policy.tokenizer
    end = end_of_turn(tokenizer) if policy.chat or not isinstance(prompt, str) else None
    if end is not None and end in policy.stop_ids:
        return end
    return int(tokenizer.eos_token_id) if tokenizer.eos_token_id is not None else min(policy.stop_ids)
