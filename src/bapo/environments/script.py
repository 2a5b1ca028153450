"""What is said to a model, as its tokens (`episode.py:Script`), and what a model says, as an environment reads it.

What a model reads after a turn is what its chat template writes between the turn and its next one: the end of line
after the turn, the tool's or user's message, and the words that open an answer. The template is given a fixed
conversation before that message, of which the tokens up to the end of its turn are cut off, as TRL does it. So what was
sampled is never encoded again.

This is right only if the template would have written the turn itself in the same way. `refuse_template` looks: some
templates remove the reasoning of earlier turns when a user's message follows, so in training a model would see
conversations that it never sees in use. Empty reasoning, which some write for a model that does not think, is no loss.

Models without a chat template, and text in general, get what is said as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from bapo.environments.calls import FORMATS, Call, Malformed, format_of, of_message
from bapo.environments.episode import Said
from bapo.models.policy import Policy, encoded
from bapo.models.templates import reason_of, render
from bapo.models.turns import EMPTY_REASONING
from bapo.types import Message, Problem, refuse

CUT = "\n[… cut after {} tokens]"
"""The mark at the end of an observation that was too long."""
REASONING, ANSWER, TOOL = "a3f8e2b1", "c9d4f5c2", "d6e7a9f3"
"""Words that no template writes itself."""


class PolicyScript:
    """How text becomes tokens of one policy."""

    def __init__(
        self,
        policy: Policy,
        *,
        tools: Mapping[str, Sequence[Any]] | None = None,  # JSON schemas for each environment, by its name
        observation_tokens: int = 1024,
        forks: bool = False,  # whether the template may write earlier turns anew
    ) -> None:
        self.policy, self.observation_tokens, self.forks = policy, observation_tokens, forks
        self.tools = {name: list(schemas) for name, schemas in (tools or {}).items() if schemas}
        if self.tools:
            self._refuse_tools()
        refuse(
            (
                forks and not (self.tools or policy.chat),
                "task.history='fork' is for chat templates that change earlier turns, and this model has no chat. "
                "Leave it out.",
            )
        )
        if self.tools or policy.chat:
            self.refuse_template("tool" if self.tools else "user")

    def prompt(self, problem: Problem, opening: Said) -> list[int]:
        """The problem, with what its environment said when it began: text follows it, messages take its place."""
        return self.policy.encode(self._asked(problem, opening), tools=self._told(problem))

    def context(self, problem: Problem, opening: Said, turns: Sequence[tuple[Sequence[int], Said]]) -> list[int] | None:
        """The conversation as the chat template writes it now, if it may fork."""
        if not self.forks:
            return None
        given = self._asked(problem, opening)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        thinking = "<think>\n" if self.policy.opens_thinking else ""
        for tokens, said in turns:
            messages.append({"role": "assistant", "content": thinking + self.policy.transcript(list(tokens))})
            messages += self._messages(said)
        return self.policy.encode(messages, tools=self._told(problem))

    def _told(self, problem: Problem) -> list[Any] | None:
        """The tools of the environment of a problem."""
        return self.tools.get(str(problem.extra.get("environment", "")) if "" not in self.tools else "")

    def _asked(self, problem: Problem, opening: Said) -> str | list[Message]:
        given: str | list[Message] = problem.prompt
        if isinstance(opening, list):
            given = opening or given
        elif isinstance(given, str):
            given += opening
        elif opening:
            *before, last = given
            given = [*before, {**last, "content": last["content"] + opening}]
        refuse((not given, "there is nothing to answer: neither the problem nor the environment says anything"))
        return given

    def turn(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, with special tokens."""
        return self.policy.decode(list(tokens))

    def observation(self, said: Said) -> list[int]:
        """The tokens that follow a finished turn."""
        if not said:
            return []
        if not (self.policy.chat or self.tools):
            text = said if isinstance(said, str) else "\n".join(each["content"] for each in said)
            return encoded(self.policy.tokenizer, self._cut(text))
        return self._after(self._messages(said))

    def _messages(self, said: Said) -> list[Message]:
        """What an environment said, each message within the limit."""
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return [{**each, "content": self._cut(each["content"])} for each in messages]

    def shown(self, turn: str) -> str:
        """What an environment sees of a turn: its text after the reasoning, without the token that ended it."""
        ends = [self.policy.decode([end]) for end in self.policy.stop_ids]
        while end := next((end for end in ends if end and turn.endswith(end)), ""):
            turn = turn.removesuffix(end)
        _, closed, after = turn.rpartition("</think>")
        unclosed = not closed and ("<think>" in turn or self.policy.opens_thinking)
        return "" if unclosed else after

    def calls_for(self, chosen: str) -> Callable[[str], list[Call] | str] | None:
        """What finds calls in this format, if it is the tokenizer. Refuses a model whose format nobody knows."""
        has_own = getattr(self.policy.tokenizer, "response_template", None) is not None
        refuse(
            (
                not chosen,
                "task.tool_format='auto' does not recognise how this model writes calls of tools: its chat template "
                "shows neither <tool_call> with JSON nor Llama's form. Name hermes or llama, or a function of yours "
                "that finds the calls in a turn (module:function).",
            ),
            (
                chosen == "tokenizer" and not has_own,
                "task.tool_format='tokenizer' needs a tokenizer with a response_template, and this one has none. Set "
                "task.tool_format='auto'.",
            ),
            (
                chosen != "tokenizer" and ":" not in chosen and chosen not in FORMATS,
                f"task.tool_format={chosen!r} is unknown. Set it to auto, tokenizer, {', '.join(FORMATS)}, or "
                "module:function.",
            ),
        )
        return self._calls if chosen == "tokenizer" else None

    def refuse_template(self, role: str) -> None:
        """Refuse a chat template that writes a turn differently once a message of this role follows."""
        after = {"role": role, "content": TOOL} | ({"name": TOOL} if role == "tool" else {})
        try:
            before, whole = self._rendered([], TOOL), self._rendered([after], TOOL)
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses a {role} message after a turn: {reason_of(error)} Use a model whose "
                "template takes one."
            ) from error
        turn = before[: before.rfind(ANSWER) + len(ANSWER)]
        kept = EMPTY_REASONING.sub("", whole).startswith(EMPTY_REASONING.sub("", turn))
        how = "removes the reasoning of" if REASONING in turn and REASONING not in whole else "changes"
        refuse(
            (
                whole.count(TOOL) <= before.count(TOOL),
                f"the chat template does not write {role} messages. Use a model whose template does.",
            ),
            (
                not kept and not self.forks,
                f"the chat template is not prefix-preserving: when a {role} message follows, it {how} the turn before. "
                "A response keeps every token that was sampled, so training would differ from use. Set "
                "task.history='fork', which goes on from what the template writes; model.template_options so that the "
                "model does not reason (such as enable_thinking=false); or use a model whose template keeps its turns.",
            ),
        )
        self._after([after])

    def _refuse_tools(self) -> None:
        name = next(iter(self.tools.values()))[0]["function"]["name"]
        shows = self.policy.tokenizer.chat_template is not None
        if shows:
            chat: list[Message] = [{"role": "user", "content": ANSWER}]
            shows = name in self.policy.chat_text(chat, tools=next(iter(self.tools.values())))
        refuse(
            (
                not shows,
                f"the model cannot be told of its tools: its chat template does not write them ({name}, …). Use a "
                "model that was trained with tools, or an environment with a method step(text).",
            )
        )

    def _calls(self, turn: str) -> list[Call] | str:
        """The calls in a turn, as the tokenizer's own template reads them, or what is wrong with them."""
        schemas = [schema for each in self.tools.values() for schema in each]
        try:
            message = self.policy.tokenizer.parse_response(turn, prefix=self._opening, tools=schemas)
            return of_message(message or {})
        except Malformed as error:
            return str(error)
        except Exception as error:
            return f"The tool call cannot be read: {error}"

    @cached_property
    def _opening(self) -> str:
        """What the template writes before an answer."""
        return self.policy.chat_text([{"role": "user", "content": "0"}])

    @property
    def _before(self) -> list[dict[str, Any]]:
        """The fixed conversation: a question, and a turn."""
        thinks = "</think>" in str(self.policy.tokenizer.chat_template) and "</think>" not in self._opening
        said = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}" if thinks else ANSWER
        return [{"role": "user", "content": "0"}, {"role": "assistant", "content": said}]

    def _rendered(self, after: Sequence[Mapping[str, Any]], tool: str | None) -> str:
        """The fixed conversation with these messages after its turn, which calls a tool if one is named."""
        options: dict[str, Any] = {"add_generation_prompt": bool(after), **self.policy.template_options}
        if tool is None or not self.tools:
            return render(self.policy.tokenizer, [*self._before, *after], **options)
        question, turn = self._before
        forms: tuple[dict[str, Any] | str, ...] = ({}, "{}")  # some templates want text
        for arguments in forms:
            call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
            try:
                return render(self.policy.tokenizer, [question, turn | {"tool_calls": [call]}, *after], **options)
            except TemplateError as error:
                refused = error
        raise refused

    def _after(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """What the template writes after a turn, up to where the next one begins."""
        tool = str(messages[0]["name"]) if messages[0]["role"] == "tool" else None
        before, whole = (encoded(self.policy.tokenizer, self._rendered(each, tool)) for each in ([], messages))
        ends = [place for place, token in enumerate(whole) if token in self.policy.stop_ids]
        count = sum(token in self.policy.stop_ids for token in before)
        refuse(
            (
                not count and whole[: len(before)] != before,
                "the chat template ends a turn with no token of its own, so nobody can tell where what is sampled "
                "ends and what follows begins. Use a model whose turns end with a special token.",
            )
        )
        return whole[ends[count - 1] + 1 if count else len(before) :]

    def _cut(self, text: str) -> str:
        """The text, at most so many tokens of it."""
        most, tokens = self.observation_tokens, encoded(self.policy.tokenizer, text)
        return text if len(tokens) <= most else self.policy.decode(tokens[:most]) + CUT.format(most)


def tool_format(tokenizer: Any) -> str:
    """The format of tool calls that a model's template shows; empty if we do not know it."""
    has_own = getattr(tokenizer, "response_template", None) is not None
    return format_of(str(tokenizer.chat_template), has_own=has_own) or ""
