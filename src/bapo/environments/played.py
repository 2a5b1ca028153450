"""Makes what a run with environments needs: problems, the processes of episodes, and the script of its conversations.

Rewards come from the environment (`get_reward`, the steps of a game), from reward functions written for TRL, which are
called beside the environment, or from the task's other rewards, which score the whole transcript. An environment may
need no data: then each problem is a seed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bapo.config.numerals import counted
from bapo.config.task import CALCULATOR, EpisodeConfig, TaskConfig
from bapo.environments.calculator import Calculator
from bapo.environments.calls import FORMATS
from bapo.environments.conversations import Conversations
from bapo.environments.episode import Answer, Environments
from bapo.environments.hosted import Hosted, Recipe, row_of
from bapo.environments.script import PolicyScript, tool_format
from bapo.models.policy import Policy
from bapo.tasks.data.problems import hold_out, load_rows
from bapo.tasks.task import Task
from bapo.tasks.verify.scorers import Verifier
from bapo.types import Problem, Score, refuse

REHEARSAL = "rehearsal"
EXAMPLES: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
"""An argument of each type; of any other, a text."""
UNGRADED = "the environment gave no reward"


class PlayedTask:
    """Problems that are answered in several turns."""

    def __init__(
        self,
        task: TaskConfig,
        policy: Policy,
        verifier: Callable[[], Verifier],  # opens what scores transcripts, if the environment does not
        train: Sequence[Problem] = (),  # rows, unless the environment makes its own problems
        test: Sequence[Problem] = (),
    ) -> None:
        self.train, self.test = train, test
        rows = {str(each.extra.get("environment", "")): row_of(each) for each in reversed([*train, *test])}
        weights = task.reward_weights or (1.0,) * len(task.rewards)
        named = [(name, weight) for name, weight in zip(task.rewards, weights, strict=True) if ":" in name]
        chosen = tool_format(policy.tokenizer) if task.tool_format == "auto" else task.tool_format
        self.tool_format = chosen
        recipe = Recipe(
            task.environment,
            task.environment_options,
            task.tools,
            chosen if chosen in FORMATS or ":" in chosen else "",
            named,
        )
        self.environments = Hosted(
            recipe,
            seconds=task.tool_seconds,
            memory_mb=task.tool_memory_mb,
            observation_tokens=task.observation_tokens,
            rows=rows,
        )
        try:
            about = self.environments.about
            if task.name == "environment":
                self.train, self.test = (
                    _seeds(task, part, count, list(about))
                    for part, count in (("train", task.environment_train), ("test", task.environment_test))
                )
            tools = {name: each["tools"] for name, each in about.items()}
            self.script = PolicyScript(
                policy, tools=tools, observation_tokens=task.observation_tokens, forks=task.history == "fork"
            )
            self.environments.shown = self.script.shown
            if any(tools.values()):
                self.environments.calls = self.script.calls_for(chosen)
            self.graded = graded = all(each["rewards"] for each in about.values())
            """Whether environments give rewards, and no verifier is asked."""
            left = [name for name in task.rewards if name not in self.environments.grading]
            refuse(
                (
                    graded and left and "reward" in task.changed(),
                    f"task.reward={', '.join(left)} would score nothing: {self.environments.name} has rewards of its "
                    "own. Leave it out, or remove get_reward.",
                ),
                (
                    not graded and not self._answers(),
                    f"{self.environments.name} gives no reward, and there are no answers to compare with. Give it a "
                    "method get_reward, set task.reward to a function that takes environments, or give data whose "
                    "rows have an answer.",
                ),
            )
            self._verifier = None if graded else verifier()
        except BaseException:
            self.environments.close()
            raise

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The scores of transcripts to which their environment gave no reward."""
        if self._verifier is None:
            return [Score(None, UNGRADED)] * len(responses)
        return self._verifier.scores(responses)

    def close(self) -> None:
        """End the processes of episodes, and those of the verifier."""
        self.environments.close()
        if self._verifier is not None:
            self._verifier.close()

    def _answers(self) -> bool:
        """Whether every problem has an answer to compare with."""
        return all(problem.answer is not None for problem in (*self.train, *self.test))


def conversations_of(task: Task | None, chosen: EpisodeConfig, policy: Policy, max_tokens: int) -> Conversations | None:
    """The episodes of a run or an evaluation, within these limits; None if responses have one turn."""
    environments: Environments
    if isinstance(task, PlayedTask):
        environments, script = task.environments, task.script
    elif chosen.environment == CALCULATOR:
        environments, script = Calculator(), PolicyScript(policy, forks=chosen.history == "fork")
    else:
        return None
    return Conversations(
        environments,
        script,
        ends=policy.stop_ids | _ends(policy, environments.turn_ends),
        max_tokens=max_tokens,
        max_turns=chosen.turns,
        max_context=getattr(policy.model.config, "max_position_embeddings", None),
    )


def _ends(policy: Policy, texts: tuple[str, ...]) -> set[int]:
    """The tokens whose text ends with one of these."""
    known = policy.tokenizer.get_vocab().values() if texts else ()
    return {token for token in known if policy.decode([token]).endswith(texts)}


def rows_of(task: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    """The rows to train on and those held out; none where the environment makes its own problems."""
    columns = task.prompt_column, task.answer_column, task.template
    train = load_rows(task.train, *columns)
    if task.test:
        return train, load_rows(task.test, *columns)
    return hold_out(train, task.holdout)


def _seeds(task: TaskConfig, part: str, count: int, names: Sequence[str]) -> list[Problem]:
    """Problems that are no more than a name, of which an episode has its random numbers.

    Environments take turns, as often as their weights say: the one that is furthest behind comes next.
    """
    given = task.environment_weights
    weights = {name: given.get(name, 1.0) for name in names}
    total, possible = math.fsum(weights.values()), all(0 <= weight < math.inf for weight in weights.values())
    refuse(
        (
            given.keys() - weights.keys() or not (possible and total),
            f"task.environment_weights={given} does not weigh the environments of {task.environment}. Give numbers, 0 "
            f"or more and not all 0, for some of {', '.join(filter(None, names)) or 'several: there is one'}.",
        )
    )
    problems, times = [], Counter[str]()
    for index in range(count):
        name = max(weights, key=lambda name: (index + 1) * weights[name] / total - times[name])
        times[name] += 1
        row = {"environment": name} if name else {}
        problems.append(Problem(f"{part}-{index}", "", None, str(task.environment), row))
    return problems


def rehearse(task: PlayedTask, policy: Policy) -> Iterator[tuple[str, str]]:
    """The first problem's episode with a turn that nobody sampled, in words: for a tool, a call with any arguments."""
    problem, environments, script = task.train[0], task.environments, task.script
    schemas = environments.about[str(problem.extra.get("environment", ""))]["tools"]
    turn = _called(schemas[0]["function"], task.tool_format) if schemas else "0"
    environments.begin(REHEARSAL, problem)
    (began,) = _answered(environments)
    if not began.failure:
        yield "prompt", policy.decode(script.prompt(problem, began.text))
        environments.act(REHEARSAL, turn)
        (said,) = _answered(environments)
        yield "turn", f"{turn}\nsaid by this dry run; the tokens of a model's turns are trained on"
        if not said.failure:
            environments.grade(REHEARSAL)
            (graded,) = _answered(environments)
            tokens = script.observation("" if said.over else said.text)
            over = "; the episode is over" if said.over else ""
            text = policy.decode(tokens).strip("\n")
            yield (
                "answer",
                f"{text}\n{counted(len(tokens), 'token')} that are read and not trained on{over}".strip("\n"),
            )
            own = f"{graded.reward:g}" if graded.reward is not None else "by task.reward, from the whole transcript"
            yield "reward", (graded.failure and f"the grader failed: {graded.failure}") or own
            environments.end(REHEARSAL)
            return
        began = said
    environments.end(REHEARSAL)
    yield "answer", f"the environment failed: {began.failure}"


def _answered(environments: Hosted) -> list[Answer]:
    answers: list[tuple[str, Answer]] = []
    while not answers:
        answers = environments.collect(1.0)
    return [answer for _, answer in answers]


def _called(tool: dict[str, Any], form: str) -> str:
    """A call of this tool, as a model would write it in a format that we know."""
    kinds = {name: kind.get("type") for name, kind in tool["parameters"].get("properties", {}).items()}
    arguments = {name: EXAMPLES.get(str(kind), "example") for name, kind in kinds.items()}
    if form == "llama":
        return json.dumps({"name": tool["name"], "parameters": arguments})
    call = json.dumps({"name": tool["name"], "arguments": arguments})
    return f"<tool_call>{call}</tool_call>" if form == "hermes" else call
