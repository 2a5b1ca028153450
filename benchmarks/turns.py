"""What turns cost: tokens per second of episodes with tools, and how busy the engine stays while tools work.

    python benchmarks/turns.py [--shapes 135m,1.5b] [--episodes 256] [--turns 2] [--mean 512] [--seconds 1]
    python benchmarks/turns.py --tiny                       on a CPU, very small: tests the script, not speed

Episodes have so many turns of geometric length, and 32 tokens are said after each but the last. Every case samples the
same tokens as a load of one turn with as many tokens in each response, which is the measure:

    at once        environments in this process, which answer when they are asked
    recomputed     the same, without the keys and values that a turn leaves behind
    SECONDS tools  real processes, one for each episode, which sleep for so long in every turn; `busy` is the share of
                   the time in which the engine works

Each is measured with as many slots as there are episodes, and with half as many.
"""

import argparse
import statistics
import time
from unittest import mock

import torch
import workload
from timing import synchronize, table

from bapo.environments.conversations import Conversations
from bapo.environments.episode import Answer
from bapo.environments.hosted import Hosted, Recipe
from bapo.rollout import rounds
from bapo.rollout.engine import Request, Sampling, generate
from bapo.rollout.local.engine import engine_for
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.types import Problem

PROMPT, SAID = 64, 32


class Sleeper:
    """An environment of a user's: it thinks for a while about every turn."""

    def __init__(self, seconds, turns):
        self.seconds, self.left = seconds, turns

    def reset(self):
        return ""

    def step(self, text):
        time.sleep(self.seconds)
        self.left -= 1
        return "said", 0.0, self.left == 0


class Prompt:
    """An environment that answers when it is asked, and is asked like one that does not."""

    name, at_once, turn_ends = "prompt", False, ()

    def __init__(self, turns):
        self.turns, self.left, self.answers = turns, {}, []

    def begin(self, key, problem, state=None):
        self.left[key] = self.turns
        self.answers.append((key, Answer()))

    def act(self, key, turn):
        self.left[key] -= 1
        self.answers.append((key, Answer("said", over=not self.left[key])))

    def grade(self, key):
        self.answers.append((key, Answer(reward=0.0)))

    def collect(self, timeout):
        answers, self.answers = self.answers, []
        return answers

    def end(self, key):
        self.left.pop(key, None)

    def close(self):
        self.left.clear()


class Tokens:
    """A script without a tokenizer: everything that is said is the same so many tokens."""

    def __init__(self, prompts):
        self.prompts = prompts

    def prompt(self, problem, opening):
        return self.prompts[int(problem.id)]

    def turn(self, tokens):
        return ""

    def observation(self, said):
        return [1] * SAID

    def context(self, problem, opening, turns):
        return None


class Watched:
    """An engine that knows for how long it has worked."""

    def __init__(self, engine):
        self.engine, self.worked = engine, 0.0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def collect(self, timeout=None):
        began = time.perf_counter()
        found = self.engine.collect(timeout)
        self.worked += time.perf_counter() - began
        return found


def played(engine, environments, prompts, given, stops):
    """Seconds, the share of them that the engine worked, and the tokens that each response has sampled."""
    most = PROMPT + given.turns * (8 * given.mean + SAID)
    talk = Conversations(environments, Tokens(prompts), ends=stops, max_tokens=most)
    scheduler = Scheduler(Sampling(), max_response_tokens=most, conversations=talk)
    watched, began = Watched(engine), time.perf_counter()
    scheduler.admit(
        new_group(i, Problem(str(i), "", None), [], responses=1, seed=0, opened=False) for i in range(given.episodes)
    )
    groups = rounds.run(scheduler, watched).groups
    synchronize(engine.model.device.type)
    seconds = time.perf_counter() - began
    assert len(groups) == given.episodes
    return seconds, watched.worked / seconds, [len(group.trajectories[0].versions) for group in groups]


def cases(given):
    """By name: what makes environments, and whether keys and values of turns are used."""
    options = {"seconds": given.seconds, "turns": given.turns}
    hosted = Recipe("turns:Sleeper", options=options)
    return {
        "at once": (lambda: Prompt(given.turns), True),
        "recomputed": (lambda: Prompt(given.turns), False),
        f"{given.seconds:g} s tools": (lambda: Hosted(hosted, seconds=given.seconds + 30), True),
    }


def measure(shape, slots, given):
    model = workload.make_model(shape, given.device, torch.bfloat16 if given.device == "cuda" else torch.float32)
    vocabulary = model.config.vocab_size
    stops = frozenset(range(2, 2 + max(1, round(vocabulary / given.mean))))  # weights are random: one token in so many
    prompts = workload.prompts(given.episodes, PROMPT, vocabulary)
    engine = engine_for(model, slots=slots)
    engine.load(model.named_parameters(), version=0)

    def one_turn(lengths):
        requests = [Request(prompts[i], 0, i, length) for i, length in enumerate(lengths)]
        began = time.perf_counter()
        generate(engine, requests, Sampling())
        synchronize(given.device)
        return time.perf_counter() - began

    rows = []
    for name, (make, keeps) in cases(given).items():
        forgetful = mock.patch("bapo.rollout.cuda.sitting._begin_of", lambda request, kept: None)
        found = []
        for _ in range(given.repeat + 1):  # the first one warms up
            environments = make()
            try:
                if keeps:
                    seconds, busy, lengths = played(engine, environments, prompts, given, stops)
                else:
                    with forgetful:
                        seconds, busy, lengths = played(engine, environments, prompts, given, stops)
            finally:
                environments.close()
            found.append((sum(lengths) / seconds, busy, one_turn(lengths) / seconds))
        rate, busy, share = (statistics.median(column) for column in zip(*found[1:], strict=True))
        rows.append([f"{shape}, {slots} slots", name, f"{rate:,.0f}", f"{share:.0%}", f"{busy:.0%}"])
        print("  ".join(rows[-1]), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135m,1.5b")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--mean", type=int, default=512, help="tokens of a turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="what a slow tool takes")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.tiny:
        small = {"shapes": "tiny", "episodes": 8, "mean": 8, "seconds": 0.05, "repeat": 1}
        given = argparse.Namespace(**vars(given) | small)
    rows = [
        row
        for shape in given.shapes.split(",")
        for slots in (given.episodes, given.episodes // 2)
        for row in measure(shape, slots, given)
    ]
    header = ["case", "tools", "tokens/s", "of one turn", "busy"]
    print(f"\n{given.episodes} episodes of {given.turns} turns of about {given.mean} tokens\n{table(header, rows)}")


if __name__ == "__main__":
    main()
