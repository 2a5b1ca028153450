"""Environments and tools as users write them, well-behaved and hostile ones. Imported by processes of episodes."""

import asyncio
import os
import random
import signal
import sys
import time
from typing import Annotated


class Guess:
    """As TRL's `environment_factory` wants it."""

    def reset(self, **row):
        """Begin."""
        self.number, self.rewarded, self.row = random.randint(1, 9), 0.0, row
        return f" It is below {row.get('below', 10)}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.
        """
        if number > 9:
            raise ValueError("Too large.")
        self.rewarded = float(number == self.number)
        return "right" if self.rewarded else "wrong"

    def get_reward(self):
        """Whether it was found."""
        return self.rewarded

    def _hidden(self):
        return "nobody calls this"


class Unrewarded(Guess):
    """Its reward comes from a function that looks at it."""

    get_reward = None


def looks(environments, completions, below, **columns):
    """A reward function of TRL's."""
    (environment,), (messages,) = environments, completions
    assert [message["role"] for message in messages][:2] == ["assistant", "tool"]
    return [environment.rewarded + below[0]]


def counts_turns(response: str, answer: str) -> float:
    """A reward function for transcripts: ours."""
    return float(response.count("<|im_start|>assistant") == int(answer) and response.endswith("Done."))


def shout(text: str) -> str:
    """
    Say it louder.

    Args:
        text: What to say.
    """
    return text.upper()


async def later(text: Annotated[str, "What to say."]) -> str:
    """
    Say it later.

    Args:
        text: What to say.
    """
    await asyncio.sleep(0)
    return text


def __dunder__(text: str) -> str:  # noqa: N807
    """
    A tool with a strange name.

    Args:
        text: Anything.
    """
    return text


def backwards(turn):
    """A format of tool calls: !tool argument."""
    if turn.startswith("!!"):
        raise ValueError("One ! is enough.")
    name, _, text = turn[1:].partition(" ")
    return [(name, {"text": text})] if turn.startswith("!") else []


class Echo:
    """A game that repeats what was said, three times."""

    def __init__(self, prefix="said "):
        self.prefix, self.turns = prefix, 0

    def reset(self, seed=None):
        """Begin."""
        return f"seed {seed}"

    def step(self, action):
        """Say it again."""
        self.turns += 1
        return self.prefix + action, 0.25, self.turns == 3


class Secret:
    """Nobody can repeat it, but it says what it can go on from."""

    def reset(self):
        """Begin."""
        self.number, self.tries = os.urandom(8).hex(), []

    def look(self, how: str) -> str:
        """
        Look at it.

        Args:
            how: How.
        """
        self.tries.append({how} if how == "set" else how)
        return f"{self.number} {len(self.tries)}"

    def get_reward(self):
        """How often it was looked at."""
        return len(self.tries)

    def state(self):
        """What it can go on from."""
        return {"number": self.number, "tries": self.tries}

    def restore(self, state):
        """Go on from there."""
        self.__dict__.update(state)


class Dice(Echo):
    """A game that nobody can repeat."""

    def step(self, action):
        """Throw."""
        said, *others = super().step(action)
        return f"{said} {os.urandom(8).hex()}", *others

    def state(self):
        """What it can go on from."""
        return self.turns

    def restore(self, state):
        """Go on from there."""
        self.turns = state


class Hostile:
    """Does what it is told."""

    def reset(self):
        """Begin."""

    def do(self, what: str) -> str:
        """
        Do harm.

        Args:
            what: Which.
        """
        self.what = what
        if what == "hang":
            time.sleep(1000)
        if what == "loop":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(1000)
        if what == "exit":
            os._exit(3)
        if what == "sys.exit":
            sys.exit(4)
        if what == "kill":
            os.killpg(0, signal.SIGKILL)
        if what == "memory":
            return "x" * (1 << 34)
        if what == "print":
            for _ in range(1024):
                os.write(1, b"x" * (1 << 20))
        if what == "raise":
            raise RuntimeError("broken\nin two lines")
        if what == "close":
            os.closerange(3, 256)
        returned = {"bytes": b"\xff", "none": None, "unicode": "\ud800 ß", "long": "x" * 10_000_000}
        return returned.get(what, "fine")

    def get_reward(self):
        """Of the last thing that it was told."""
        return {"nan": float("nan"), "text": "much"}.get(self.what, 1.0)


ALL = {"guess": Guess, "echo": Echo, "hostile": Hostile}


class Counter:
    """Counts up to what its row says, and ends with an error that the model is told."""

    def reset(self, target, **row):
        """Begin."""
        self.count, self.target = 0, target
        return f" Stop at {target}."

    def add(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        if self.count >= self.target:
            raise ValueError("It is over.")
        self.count += step
        return self.count

    def get_reward(self) -> float:
        """Whether it was met."""
        return float(self.count == self.target)


def quiet(completions, environments, **columns):
    """A reward function of TRL's: half a point if the last message has no call and the environment was met."""
    return [
        0.5 * (messages[-1]["content"] == "It is four." and environment.count == environment.target)
        for messages, environment in zip(completions, environments, strict=True)
    ]


class Silent:
    """It has a tool and no reward."""

    def reset(self):
        """Begin."""


KEEPING = {"secret": Secret, "dice": Dice}
GAMES = {"echo": Echo, "twice": Echo}
