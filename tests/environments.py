"""Small environments for tests: real ones, that answer by rule, at once or late, and fail when they are told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from bapo.environments.episode import Answer, Said
from bapo.models.policy import Policy
from bapo.types import Problem
from tests.tiny.families import FAMILIES, make_tokenizer

SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}
QWEN = (  # in the style of Qwen 2.5 and 3: tools in the system message, their answers in a user message
    "{% if tools %}{{ '<|im_start|>system\n<tool_call>' + (tools | map('tojson') | join('\n')) + '<|im_end|>\n' }}"
    "{% endif %}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set said = m.content %}{% if THINKS and '</think>' in said and loop.index0 < ns.last %}"
    "{% set said = said.split('</think>\n\n')[-1] %}{% endif %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + said + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + said }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


THINKING = QWEN.replace("THINKS", "true")


def chatting(template: str | None = THINKING, **options: Any) -> Policy:
    """A policy without a model, whose tokens are bytes."""
    tokenizer = make_tokenizer(FAMILIES["qwen2.5-instruct"])
    tokenizer.chat_template = template
    return Policy(None, tokenizer, frozenset([tokenizer.eos_token_id]), chat=template is not None, **options)


class Numbers:
    """Text is numbers between spaces, and each is a token."""

    def prompt(self, problem: Problem, opening: Said) -> list[int]:
        return [int(each) for each in f"{problem.prompt} {opening}".split()]

    def turn(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def observation(self, said: Said) -> list[int]:
        return [int(each) for each in str(said).split()]

    def context(self, problem: Problem, opening: Said, turns: Sequence[tuple[Sequence[int], Said]]) -> list[int] | None:
        return None


class Forgetful(Numbers):
    """It reads only the last token of a turn again."""

    def context(self, problem: Problem, opening: Said, turns: Sequence[tuple[Sequence[int], Said]]) -> list[int]:
        read = self.prompt(problem, opening)
        for tokens, said in turns:
            read += [tokens[-1], *self.observation(said)]
        return read


@dataclass
class Ruled:
    """Answers a turn by a rule of its text and its number, from 1; each answer comes up to `late` - 1 calls later."""

    rule: Callable[[str, int], Answer]
    opening: Callable[[Problem], Answer] = lambda problem: Answer()
    grading: Callable[[list[str]], Answer] = lambda turns: Answer()
    late: int = 0
    turn_ends: tuple[str, ...] = ()
    name: str = "ruled"
    keeps: bool = False
    """Whether it offers its state: the turns so far, of which it remembers nothing else."""
    at_once: bool = False
    turns: dict[str, list[str]] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    waiting: list[list[object]] = field(default_factory=list)
    chance: Random = field(default_factory=Random)

    def begin(self, key: str, problem: Problem, state: Any = None) -> None:
        assert key not in self.turns, "begun twice"
        self.turns[key] = list(state or [])
        self.begun[key] += 1
        self._answer(key, self.opening(problem) if state is None else Answer())

    def act(self, key: str, turn: str) -> None:
        self.turns[key].append(turn)
        self._answer(key, self.rule(turn, len(self.turns[key])))

    def grade(self, key: str) -> None:
        self._answer(key, self.grading(self.turns[key]))

    def collect(self, timeout: float) -> list[tuple[str, Answer]]:
        ready = [(key, answer) for key, answer, calls in self.waiting if not calls]
        self.waiting = [[key, answer, calls - 1] for key, answer, calls in self.waiting if calls]
        return ready

    def end(self, key: str) -> None:
        self.turns.pop(key, None)
        self.waiting = [each for each in self.waiting if each[0] != key]

    def close(self) -> None:
        self.turns.clear()

    def _answer(self, key: str, answer: Answer) -> None:
        assert all(each[0] != key for each in self.waiting), "two open questions"
        calls = self.chance.randrange(self.late) if self.late else 0
        answer = replace(answer, state=list(self.turns[key])) if self.keeps else answer
        self.waiting.append([key, answer, calls])
