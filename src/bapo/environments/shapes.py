"""Environments as people have written them for other libraries, recognised by their methods. None is needed.

    tools    functions, and the public methods of a class as TRL's `environment_factory` makes it: `reset(**row)`
             returns text for the prompt or None, `get_reward()` a number. A turn without a call ends the episode.
    games    `step(text)`, after `reset` (gem, textarena, Gymnasium, OpenEnv), `init` (SkyRL) or `initial_observation`
             (Tinker's cookbook, on messages). The game says when it is over; its rewards are added up.

A class with a method `step` is a game, unless that method is annotated to return text. What makes an environment is
called with the columns of the row that it names, and so are `reset` and `init`, whose `**kwargs` get all of them; these
two may also ask for a `seed`. Methods may be async. An error that a tool raises is an observation, as in TRL; an error
of anything else is a failure of the environment. This runs in the process of one episode (`episode_process.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bapo.environments.calls import Call, Malformed, Parse
from bapo.types import LARGEST_REWARD

__all__ = ["Game", "Tools", "accepted", "is_game", "named", "public_methods"]

RESERVED = ("reset", "get_reward")
"""Public methods of an environment of TRL's that are no tools."""
STATE = ("state", "restore")
"""Methods that say what an environment can go on from, and go on from it. With both of them, neither is a tool."""
STARTS = ("reset", "init", "initial_observation")
"""What begins a game."""
MESSAGE = {"role": "user", "content": ""}
"""What we read of a message, and what it is if it is missing."""
Reply = dict[str, Any]
"""The fields of an `Answer` that have a value."""


class Loop:
    """Waits for what async methods return, in one event loop, so that clients kept between calls stay valid."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._finalizer = weakref.finalize(self, self.runner.close)

    def __call__(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What the method returns, or what it returns in the end."""
        returned = method(*given, **named)
        return self.runner.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(returned: Any) -> Any:
    return await returned


def is_game(environment: Any) -> bool:
    """Whether the environment takes whole turns, and not calls of tools."""
    step = getattr(type(environment), "step", None)
    return step is not None and inspect.signature(step).return_annotation not in (str, "str")


def public_methods(environment: Any) -> list[Callable[..., Any]]:
    """The methods that are tools, in TRL's order. Looked up on the class: properties are not evaluated."""
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    reserved = RESERVED + (STATE if keeps_state(environment) else ())
    return [getattr(environment, name) for name, _ in found if name not in reserved and not name.startswith("_")]


def keeps_state(environment: Any) -> bool:
    """Whether the environment offers `state` and `restore`."""
    return all(callable(getattr(type(environment), name, None)) for name in STATE)


def named(function: Callable[..., Any], row: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """What a function names of a row, or of what is known besides."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [each.name for each in inspect.signature(function).parameters.values() if each.kind in kinds]
    return {name: value for name, value in {**known, **row}.items() if name in names}


def accepted(function: Callable[..., Any], row: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """The same, or the whole row with it if the function takes `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return named(function, row, **known) | (dict(row) if takes_all else {})


class Tools:
    """Functions that the model calls by name, and the environment, if there is one, that some of them belong to."""

    def __init__(
        self,
        environment: Any,  # TRL's, or None
        functions: Sequence[Callable[..., Any]],
        parse: Parse,
        graders: Sequence[tuple[Callable[..., Any], float]] = (),  # rewards that take `environments`, their weights
    ) -> None:
        self.environment, self.parse, self.graders, self.run = environment, parse, graders, Loop()
        methods = [] if environment is None else public_methods(environment)
        self.tools = {function.__name__: function for function in (*functions, *methods)}
        self.said: list[dict[str, Any]] = []
        self.row: Mapping[str, Any] = {}
        self.keeps = keeps_state(environment)

    def begin(self, row: Mapping[str, Any], seed: int) -> Reply:
        """Reset the environment. What it returns is added to the prompt."""
        self.row = row
        if self.environment is None:
            return {}
        returned = self.run(self.environment.reset, **accepted(self.environment.reset, row, seed=seed))
        if returned is not None and not isinstance(returned, str):
            raise TypeError(f"reset returned something of type {type(returned).__name__}, not text or None")
        return {"text": returned or ""}

    def act(self, turn: str, calls: Sequence[Call] | str | None = None) -> Reply:
        """Make the calls of a turn, one after the other. `calls`: what was found in it already, or what is wrong."""
        self.said.append({"role": "assistant", "content": turn})
        try:
            if isinstance(calls, str):
                raise Malformed(calls)
            found = list(self.parse(turn) if calls is None else calls)
        except Malformed as error:
            told = [_message("unknown", {"error": str(error)})]
        else:
            told = [_message(name, self._result(name, arguments)) for name, arguments in found]
        self.said += told
        return {"text": told, "over": not told}

    def state(self) -> Any:
        """What the episode can go on from."""
        return [self.said, self.run(self.environment.state)]

    def restore(self, row: Mapping[str, Any], state: Any) -> Reply:
        """Go on from there."""
        self.row, (self.said, own) = row, state
        self.run(self.environment.restore, own)
        return {}

    def grade(self) -> Reply:
        """The environment's own reward and those of functions that look at it, added up."""
        rewards: list[Any] = []
        if callable(own := getattr(self.environment, "get_reward", None)):
            rewards.append(self.run(own))
        lists = {name: [value] for name, value in self.row.items()}
        lists |= {"environments": [self.environment], "prompts": [self.row.get("prompt")], "completions": [self.said]}
        for grader, weight in self.graders:
            (reward,) = self.run(grader, **accepted(grader, lists))
            rewards.append(None if reward is None else weight * number(reward))
        given = [number(reward) for reward in rewards if reward is not None]
        if self.graders and not given:
            raise ValueError("no reward function applies to this episode: all of them returned None")
        return {"reward": number(math.fsum(given))} if given else {}

    def _result(self, name: str, arguments: Mapping[str, Any]) -> Any:
        try:
            if name not in self.tools:
                raise ValueError(f"Tool {name} not found.")
            return str(self.run(self.tools[name], **arguments))
        except MemoryError:
            raise
        except Exception as error:
            return {"error": str(error)}


def _message(name: str, result: Any) -> dict[str, str]:
    return {"role": "tool", "name": name, "content": str(result)}


class Game:
    """Something that takes a turn's text and says what happens, what it is worth and whether it is over."""

    def __init__(self, game: Any) -> None:
        self.game, self.run, self.total, self.shown = game, Loop(), 0.0, ""
        self.messages = 0
        """How much of a conversation that the game repeats was seen."""
        self.keeps = keeps_state(game)

    def begin(self, row: Mapping[str, Any], seed: int) -> Reply:
        """Start the game. Text is added to the prompt; messages take its place."""
        start = next((getattr(self.game, name) for name in STARTS if hasattr(self.game, name)), None)
        if start is None:
            raise TypeError(f"{type(self.game).__name__} has a method step, but none of {', '.join(STARTS)}")
        returned = self.run(start, **accepted(start, row, seed=seed, num_players=1))
        if returned is None:
            return {"text": self._seen()}
        if isinstance(returned, tuple):  # with what else is known
            returned = returned[0]
        if not isinstance(returned, str):
            returned = getattr(returned, "observation", returned)
        if isinstance(returned, list):
            self.messages = len(returned)
        return {"text": _said(returned)}

    def act(self, turn: str, calls: Any = None) -> Reply:
        """Make a step."""
        if hasattr(self.game, "initial_observation"):
            self.messages += 1
            returned = self.run(self.game.step, {"role": "assistant", "content": turn})
        else:
            returned = self.run(self.game.step, turn)
        said, reward, over = self._read(returned)
        reward = 0.0 if reward is None else number(reward)
        self.total += reward
        return {"text": said, "reward": reward, "over": bool(over)}

    def state(self) -> Any:
        """What the game can go on from."""
        return [self.total, self.shown, self.messages, self.run(self.game.state)]

    def restore(self, row: Mapping[str, Any], state: Any) -> Reply:
        """Go on from there."""
        self.total, self.shown, self.messages, own = state
        self.run(self.game.restore, own)
        return {}

    def grade(self) -> Reply:
        """The rewards of all steps. An unfinished game keeps those that it gave."""
        return {"reward": number(self.total)}

    def _read(self, returned: Any) -> tuple[Any, Any, Any]:
        """Observation, reward, and whether it is over."""
        match returned:
            case bool(over), dict():  # textarena: everything else must be asked for
                if not over:
                    return self._seen(), None, False
                rewards, _ = self.game.close()
                return "", (rewards or {}).get(0), True
            case said, reward, over:
                return _said(said), reward, over
            case said, reward, over, dict():
                return _said(said), reward, over
            case said, reward, ended, cut, dict():
                return _said(said), reward, ended or cut
            case {"observations": said, "reward": reward, "done": over}:
                return _said(said), reward, over
        if hasattr(returned, "next_messages") and hasattr(returned, "episode_done"):
            said, self.messages = returned.next_messages[self.messages :], len(returned.next_messages)
            return _said(said), returned.reward, returned.episode_done
        if hasattr(returned, "observation") and hasattr(returned, "done"):
            return _said(returned.observation), returned.reward, returned.done
        raise TypeError(f"what step returned is {_shape(returned)}, not observation, reward and done in a known form")

    def _seen(self) -> str:
        """What a game of textarena shows now and did not show before, without what the player said itself."""
        player, seen = self.game.get_observation()
        if isinstance(seen, str):
            new, self.shown = seen.removeprefix(self.shown), seen
            return new
        return "\n".join(str(text) for sender, text, *_ in seen if sender != player)


def number(reward: Any) -> float:
    """A reward as a number that can be trained on."""
    reward = reward.item() if hasattr(reward, "item") else reward  # of numpy, torch
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"the reward is of type {type(reward).__name__}, not a number")
    if not abs(float(reward)) <= LARGEST_REWARD:
        raise ValueError(f"the reward is {reward}, which float32 cannot hold")
    return float(reward)


def _said(observation: Any) -> Any:
    """Text, or messages with a role and a content."""
    if observation is None:
        return ""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, list) and all(isinstance(each, dict) for each in observation):
        return [
            {"role": str(each.get("role", "user")), "content": str(each.get("content", ""))} for each in observation
        ]
    raise TypeError(f"the observation is {_shape(observation)}, not text or messages")


def _shape(value: Any) -> str:
    parts = f" with {len(value)} parts" if isinstance(value, tuple | list | dict) else ""
    return f"of type {type(value).__name__}{parts}"
