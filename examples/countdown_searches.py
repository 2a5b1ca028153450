"""Writes searches for countdown as data: python examples/countdown_searches.py DIR [--seed N].

    prompt      3,4,4,7=37:                  make 37 of these numbers
    response    3,4,4,7:7-3=4                a first step: 7-3
                4,4,4:4+4=8;8,4:12,4,32      a try: 4+4 of the three numbers that are left; then 8+4, 8-4 and 8*4
                4,4,4:4*4=16;16,4:20,12,64   another try
                3,4,4,7:3*7=21               back to the four numbers, and another first step
                21,4,4:4+4=8;8,21:29,13,big
                21,4,4:21*4=84;84,4:88,80,big
                21,4,4:4*4=16;16,21:37       a hit ends the search
                answer 3*7=21 4*4=16 16+21=37

The search goes in depth and in a random order: it makes three to five tries from a first step before it takes another
one. After 12 to 15 tries it gives up and ends with `no answer`. So a search that fails is longer than one that finds
the answer. A difference is the larger number minus the smaller; `big` stands for every value above 99.

solved.jsonl holds three searches for each of 4,096 problems, with and without an answer; the column `right` tells them
apart. train.jsonl has 2,048 problems to be rewarded on, and test.jsonl 256 held-out ones. No problem is in two of the
files. Of all tries for a problem, 2% to 10% hit its target.

`reward` is the verifier, for `task.reward = "examples.countdown_searches:reward"`.
"""

import argparse
import json
import random
import re
from collections import Counter
from itertools import combinations, combinations_with_replacement
from pathlib import Path

SIZES = {"solved": 4096, "train": 2048, "test": 256}  # in problems
SEARCHES = 3
NUMBERS, LARGEST_NUMBER = 4, 9
LARGEST = 99  # of all values, and of the targets
SMALLEST_TARGET = 10
HITS = (0.02, 0.10)  # share of all tries that hit the target
TRIES = (12, 15)  # of a whole search
PATIENCE = (3, 5)  # tries from one first step

STEP = re.compile("([0-9]{1,2})([-+*])([0-9]{1,2})=([0-9]{1,2})")


def reward(response: str, answer: dict) -> float:
    """1.0 if the last line is `answer` and steps that use each number once and end at the target, otherwise 0.0.

    A step takes two of the numbers that are there, and puts its value in their place. The arithmetic must be right.
    """
    word, *steps = response.rpartition("\n")[2].split(" ")
    there = list(answer["numbers"])
    if word != "answer" or len(steps) != len(there) - 1:
        return 0.0
    for step in steps:
        if (parts := STEP.fullmatch(step)) is None:
            return 0.0
        left, operator, right, stated = parts.groups()
        for number in (int(left), int(right)):
            if number not in there:
                return 0.0
            there.remove(number)
        if (value := apply(operator, int(left), int(right))) != int(stated):
            return 0.0
        there.append(value)
    return float(there == [answer["target"]])


def apply(operator: str, left: int, right: int) -> int:
    if operator == "*":
        return left * right
    return left + right if operator == "+" else left - right


def operations(a: int, b: int) -> dict[str, int]:
    """What two numbers can become: `a+b` and so on, with its value."""
    pairs = {"+": (a, b), "-": (max(a, b), min(a, b)), "*": (a, b)}
    return {f"{left}{operator}{right}": apply(operator, left, right) for operator, (left, right) in pairs.items()}


def steps_from(numbers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Every step, `a+b=c`, with the numbers there are after it: its value first, then the others."""
    found = {}
    for i, j in combinations(range(len(numbers)), 2):
        others = tuple(number for place, number in enumerate(numbers) if place not in (i, j))
        for text, value in operations(numbers[i], numbers[j]).items():
            if 1 <= value <= LARGEST:
                found[f"{text}={value}"] = (value, *others)
    return found


def share_of_hits(numbers: tuple[int, ...]) -> Counter[int]:
    """Target -> the chance that a random first step and a random second one lead to two numbers that give it."""
    share: Counter[int] = Counter()
    first = steps_from(numbers).values()
    for three in first:
        second = steps_from(three).values()
        for two in second:
            for value in set(operations(*two).values()):
                share[value] += 1 / (len(first) * len(second))
    return share


def problems() -> list[tuple[tuple[int, ...], int]]:
    """Every (sorted numbers, target) that is neither too easy nor too hard, in a fixed order."""
    return [
        (numbers, target)
        for numbers in combinations_with_replacement(range(1, LARGEST_NUMBER + 1), NUMBERS)
        for target, share in sorted(share_of_hits(numbers).items())
        if SMALLEST_TARGET <= target <= LARGEST and HITS[0] <= share <= HITS[1]
    ]


def search(numbers: tuple[int, ...], target: int, chance: random.Random) -> str:
    """One search, written out."""
    lines, tries_left = [], chance.randint(*TRIES)
    for first, three in shuffled(steps_from(numbers), chance):
        lines.append(f"{listed(numbers)}:{first}")
        for second, two in shuffled(steps_from(three), chance)[: chance.randint(*PATIENCE)]:
            values = operations(*two)
            hits = [f"{text}={target}" for text, value in values.items() if value == target]
            shown = list(values.values())
            if hits:
                shown = shown[: shown.index(target) + 1]
            lines.append(f"{listed(three)}:{second};{listed(two)}:{listed(shown)}")
            if hits:
                return "\n".join([*lines, f"answer {first} {second} {hits[0]}"])
            tries_left -= 1
            if not tries_left:
                return "\n".join([*lines, "no answer"])
    return "\n".join([*lines, "no answer"])


def shuffled(steps: dict[str, tuple[int, ...]], chance: random.Random) -> list[tuple[str, tuple[int, ...]]]:
    return chance.sample(list(steps.items()), len(steps))


def listed(numbers) -> str:
    return ",".join(str(number) if number <= LARGEST else "big" for number in numbers)


def rows(name: str, drawn: list[tuple[tuple[int, ...], int]], chance: random.Random) -> list[dict]:
    """The rows of one file."""
    made = []
    for given, target in drawn:
        numbers = tuple(chance.sample(given, len(given)))
        row = {"prompt": f"{listed(numbers)}={target}:\n", "answer": {"numbers": numbers, "target": target}}
        if name != "solved":
            made.append(row)
            continue
        for _ in range(SEARCHES):
            response = search(numbers, target, chance)
            made.append(row | {"response": response, "right": bool(reward(response, row["answer"]))})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write the three files to")
    parser.add_argument("--seed", type=int, default=0, help="decides the problems of each file, and the searches")
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)  # noqa: S311
    left = problems()
    chance.shuffle(left)
    chosen.directory.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        drawn, left = left[:size], left[size:]
        made = rows(name, drawn, chance)
        (chosen.directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        right = f", {sum(row['right'] for row in made) / len(made):.0%} with the answer" if name == "solved" else ""
        print(f"{chosen.directory / name}.jsonl: {len(made):,} rows{right}")


if __name__ == "__main__":
    main()
