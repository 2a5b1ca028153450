"""What travels between controller and actors, as arrays: what engines have sampled, and the groups of an update.

Each number of a list is an object, which is written and read by itself. An array travels as it lies in memory, and the
processes of a machine share it. Nothing is rounded: floats are float64.

    Answer    what an engine has sampled since its last answer
    Batch     what a learner needs of the groups of an update. A rank reads the tokens of its own part only
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bapo.rollout.engine import Segment
from bapo.types import Group, Problem, Status, Trajectory

STATUSES = (None, *Status)
NAMELESS = Problem("", "", None)
"""In place of the problem of a group: a learner does not look at it."""
COLUMNS = {
    "prompt": np.int32,
    "tokens": np.int32,
    "versions": np.int32,
    "behavior_logprobs": np.float64,
    "reference_logprobs": np.float64,
    "log_kept": np.float64,
    "sampled": np.bool_,
}
"""The lists of a trajectory that a learner reads."""
PLAIN = ("seed", "status", "reward", "rewards", "shaping", "contexts", "ending")
"""What else it knows of one."""


@dataclass(frozen=True)
class Answer:
    """What an engine has sampled since its last answer. A segment has one version."""

    seconds: float
    """For how long it has worked."""
    about: NDArray[np.int64]
    """[segments, 4] request, number of tokens, version, place of the status in STATUSES"""
    tokens: NDArray[np.int32]
    facts: NDArray[np.float64]
    """[2 or 3, tokens] log-probs, entropies, and what truncation kept"""

    @classmethod
    def of(cls, found: Sequence[tuple[int, Segment]], seconds: float) -> Answer:
        """These segments, each with its request."""
        segments = [segment for _, segment in found]
        about = [(id, len(s.tokens), max(s.versions, default=0), STATUSES.index(s.status)) for id, s in found]
        columns = [[s.logprobs for s in segments], [s.entropies for s in segments]]
        if any(s.log_kept for s in segments):
            columns.append([s.log_kept for s in segments])
        return cls(
            seconds,
            np.array(about, np.int64).reshape(-1, 4),
            _end_to_end([s.tokens for s in segments], np.int32),
            np.stack([_end_to_end(column, np.float64) for column in columns]),
        )

    def segments(self) -> list[tuple[int, Segment]]:
        """The segments, as they were."""
        tokens, (logprobs, entropies, *kept) = self.tokens.tolist(), self.facts.tolist()
        found, begin = [], 0
        for id, count, version, status in self.about.tolist():
            part = slice(begin, begin + count)
            given = tokens[part], logprobs[part], entropies[part], [version] * count, STATUSES[status]
            found.append((id, Segment(*given, *(row[part] for row in kept))))
            begin += count
        return found


@dataclass(frozen=True)
class Batch:
    """The groups of an update."""

    about: list[tuple[int, int, list[dict[str, Any]]]]
    """Of each group its id, how often it was used, and the plain facts of its trajectories."""
    columns: dict[str, NDArray[Any]]
    """The lists of all trajectories, end to end."""
    counts: dict[str, NDArray[np.int64]]
    """How long the list of each trajectory is."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Batch:
        """What a learner needs of these groups."""
        lists = {name: [getattr(t, name) for group in groups for t in group.trajectories] for name in COLUMNS}
        return cls(
            [(g.id, g.uses, [{name: getattr(t, name) for name in PLAIN} for t in g.trajectories]) for g in groups],
            {name: _end_to_end(values, COLUMNS[name]) for name, values in lists.items()},
            {name: np.array([len(value) for value in values], np.int64) for name, values in lists.items()},
        )

    def groups(self) -> list[Group]:
        """The groups, without their problems. Their lists are views of the arrays, which read as lists do."""
        views = zip(*(_cut(self.columns[name], self.counts[name]) for name in COLUMNS), strict=True)
        made = [
            (id, uses, [Trajectory(**dict(zip(COLUMNS, next(views), strict=True)), **facts) for facts in each])
            for id, uses, each in self.about
        ]
        return [Group(id, NAMELESS, trajectories, uses) for id, uses, trajectories in made]


def _end_to_end(values: Sequence[Sequence[Any]], kind: Any) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(values), kind, sum(map(len, values)))


def _cut(column: NDArray[Any], counts: NDArray[np.int64]) -> Iterator[Any]:
    view, begin = memoryview(cast(Any, column)), 0
    for count in counts.tolist():
        yield view[begin : begin + count]
        begin += count
