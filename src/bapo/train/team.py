"""The processes that live one run together, step by step (`together.py`): what they share, and who speaks for them.

    share   every member does its part, and all get all results
    lead    the first member does something for all: it writes files, or decides

Results travel as JSON, because whoever reaches the store of a torchrun could join, and opening a pickle can run code. A
member keeps its own result as it is. What JSON changes, such as tuples and paths, callers turn into JSON data first.

An error of one member is raised on all of them, at the same place, so nobody waits for somebody who has gone. A run in
a single process is a team of one: nothing is exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar, cast

from bapo.config.errors import RankFailed
from bapo.learn.ranks import Ranks, from_all_texts

Result = TypeVar("Result")


@dataclass(frozen=True)
class Team:
    """One member's view of the team."""

    ranks: Ranks = None
    rank: int = 0
    size: int = 1
    on_this_machine: int = 1
    """How many of them share this machine's cores."""

    @property
    def leads(self) -> bool:
        """Whether this member writes files and the screen."""
        return self.rank == 0

    @property
    def command(self) -> str:
        """What a person types before the verb, to start such a team."""
        return "bapo" if self.size == 1 else f"torchrun --nproc-per-node {self.on_this_machine} -m bapo"

    def share(self, work: Callable[[], Result]) -> list[Result]:
        """The results of every member's work, in the order of ranks, on all. Results are JSON data."""
        if self.ranks is None:
            return [work()]
        result, failure = None, None
        try:
            result = work()
            said = json.dumps([result, None])
        except Exception as error:
            failure = error
            said = json.dumps([None, f"{type(failure).__name__}: {failure}"])
        found = [json.loads(text) for text in from_all_texts(said.encode(), self.ranks)]
        if failure is not None:
            raise failure
        for rank, (_, why) in enumerate(found):
            if why is not None:
                raise RankFailed(f"rank {rank} failed, so the other ranks stop, too. {why}")
        return [cast(Result, result if rank == self.rank else value) for rank, (value, _) in enumerate(found)]

    def lead(self, work: Callable[[], Result]) -> Result:
        """The result of the first member's work, on all. The others do not call it."""
        return cast(Result, self.share(work if self.leads else _nothing)[0])

    def any(self, flag: bool) -> bool:
        """Whether any member says so: the same answer on all."""
        return any(self.share(lambda: flag))


def _nothing() -> None:
    """The work of a member that does not lead."""


ALONE = Team()
"""The team of a run in a single process."""


def check_alike(state: dict[str, Any], team: Team, when: str) -> None:
    """Raise if the members do not know the same."""
    if team.size == 1:
        return
    digests = team.share(lambda: sha256(json.dumps(state).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise RuntimeError(
            f"{when}, rank {others[0]} knows something else than rank 0, so nothing was saved: the ranks of a run must "
            "stay alike. Look for something random in the task, or for ranks with different software, then resume."
        )


def team_notes(team: Team, ranks_before: int | None) -> list[str]:
    """What a person should know of a team, and of a resumed run that had another number of ranks."""
    notes = []
    if team.size > 1:
        notes.append(f"{team.size} ranks together: each samples and scores a part, and keeps a part of the weights")
    if ranks_before not in (None, team.size):
        notes.append(
            f"the checkpoint was written by {ranks_before} ranks, and there are {team.size} now: the run continues "
            "from the same weights, but not bit for bit as it would have"
        )
    return notes
