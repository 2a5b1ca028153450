"""The learner's ranks in other processes as one learner, which survives the death of any of them.

All ranks are handed the same groups, which lie in shared memory once per machine, and take every update together. If
one dies or does not answer in time, all are ended, started again and taken back to the last checkpoint. The updates
since then are taken again from the journal: the groups of every update since the last checkpoint, as they were drawn.
An update is a function of weights and groups, so the learner arrives where it was, bit for bit on the same hardware.
Versions keep their meaning, no group is drawn twice, and the engines go on sampling meanwhile. The version that was
published last is compared with its fingerprint from before; a difference is said, not hidden.

Every wait lets somebody else work: `meanwhile` is called about ten times a second while the ranks are busy.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from bapo.config.errors import ClusterError
from bapo.learn.learner import Update
from bapo.learn.ranks import LostRank
from bapo.runs.history import LEARNER, Restart
from bapo.screen.watch import ActorLine
from bapo.train.cluster.cargo import Batch
from bapo.train.cluster.hosts import Published
from bapo.train.cluster.ray import Actor, Call, Lost, Missing, Silent, answered, end, put
from bapo.types import Group

UPDATING = "take update"
"""What the ranks do while they learn, in words that a number follows."""
TRIES = 3
"""How often in a row the ranks may die before one update is done."""
LISTEN_SECONDS = 0.05
"""How long we listen for answers before `meanwhile` gets its turn."""
GRACE_SECONDS = 5.0
"""How long after one rank's error we look for the death of another one that explains it."""
ANSWER_SECONDS = 60.0
"""How long an answer may take to arrive after its rank has given it."""


class RemoteLearner:
    """A learner made of ranks elsewhere."""

    def __init__(
        self,
        spawn: Callable[[], list[Actor]],  # starts all ranks
        *,
        contexts: Sequence[Sequence[int]],  # what the probes of engines continue
        start_seconds: float,
        update_seconds: float,
    ) -> None:
        self.spawn, self.contexts = spawn, contexts
        self.start_seconds, self.update_seconds = start_seconds, update_seconds
        self.restarted: Callable[[Restart], None] = lambda restart: None
        """Is told when all ranks start again."""
        self.say: Callable[[str], None] = lambda text: None
        """Is told what else a person should know."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Works while the ranks are busy."""
        self.version = 0
        self.restarts = 0
        self.rate = 0.0
        """Tokens per second of the last update."""
        self.doing = "starting"
        self.journal: list[Any] = []
        """References to the groups of every update since the last checkpoint."""
        self.origin: tuple[Path, int] | None = None
        """The last checkpoint and its version; None: the model as it is loaded."""
        self.last: tuple[int, str] | None = None
        """The version that was published last, and the fingerprint of its weights."""
        self._ranks = spawn()
        self._greeted = False

    def step(self, groups: Sequence[Group]) -> Update:
        """One optimizer step on the responses of these groups."""
        began = time.monotonic()
        batch = put(Batch.of(groups), what=f"the groups of update {self.version + 1}")
        update: Update = self._let_all("step", batch, what=f"{UPDATING} {self.version + 1}")
        self.journal.append(batch)
        self.version = update.version
        self.rate = update.tokens / (time.monotonic() - began)
        return update

    def weights(self) -> Published:
        """The weights as they are now, published for engines to load."""
        parcel, (digest, told) = self._let_all("publish", self.contexts, what="publish its weights", returns=2)
        self.last = self.version, digest
        return Published(self.version, parcel, digest, told)

    def save(self, directory: Path) -> None:
        """Write what a checkpoint needs. The ranks must see the same directory."""
        self._let_all("save", directory.absolute(), what="save a checkpoint")

    def saved(self, checkpoint: Path) -> None:
        """This checkpoint of the present version is complete, so older updates need not be repeated any more."""
        self.origin, self.journal = (checkpoint.absolute(), self.version), []

    def load(self, directory: Path, *, version: int) -> None:
        """Restore what `save` wrote at this version."""
        self.origin, self.journal, self.version = (directory.absolute(), version), [], version
        self._let_all("load", directory.absolute(), version, what=f"load {directory.name}")

    def export(self, directory: Path, card: str) -> None:
        """Write the model as it is now, for transformers and vLLM, into the directory of the run."""
        self._let_all("export", directory.absolute(), card, what="export the model")

    def lines(self) -> list[ActorLine]:
        """What a person sees of the ranks: they all do the same."""
        name = "learner" if len(self._ranks) == 1 else f"learner 0-{len(self._ranks) - 1}"
        rate = self.rate if self.doing.startswith(UPDATING) else 0.0
        return [ActorLine(name, self.doing, self.version, rate, 0, self.restarts)]

    def close(self) -> None:
        """End all ranks."""
        end(self._ranks)

    # Ranks.

    def _ask(self, method: str, *given: Any, what: str, returns: int = 1) -> Any:
        """Ask all ranks for the same, once. Returns the answer of rank 0, after all ranks have answered.

        Of an answer in two parts the first, which is large, stays where it is: a reference to it is returned.
        """
        self._greet()
        self.doing = what
        calls = [rank.call(method, *given, what=what, returns=returns) for rank in self._ranks]
        if returns == 1:
            return self._answers(calls, self.update_seconds)[0]
        large, small = calls[0].parts
        return large.ref, self._answers([small, *(call.parts[-1] for call in calls[1:])], self.update_seconds)[0]

    def _let_all(self, method: str, *given: Any, what: str, returns: int = 1) -> Any:
        """Let all ranks do this. Returns the answer of rank 0. If one dies, all start again and do it then."""
        for _ in range(TRIES):
            try:
                answer = self._ask(method, *given, what=what, returns=returns)
                self.doing = "waiting"
                return answer
            except (Lost, Silent, Missing) as error:
                self._restart(error)
            except Exception:
                self.close()  # the other ranks may wait for the one that failed
                raise
        raise ClusterError(f"the learner's ranks died {TRIES} times while they were asked to {what}.")

    def _answers(self, calls: list[Call], seconds: float) -> list[Any]:
        """The answers of all ranks. Raises if one has died, has failed, or has not answered after so many seconds."""
        while True:
            came = answered(calls, LISTEN_SECONDS)
            try:
                answers = [call.answer(ANSWER_SECONDS) for call in came]  # one may have failed while others wait for it
            except Exception as error:
                raise _cause(error, calls) from error
            if len(came) == len(calls):
                return answers
            late = [call for call in calls if call not in came]
            if late[0].seconds > seconds:
                _blame(late)
            self.meanwhile()

    def _greet(self) -> None:
        """Wait until all ranks have started and met each other."""
        if self._greeted:
            return
        self.doing = "starting"
        hellos = self._answers([rank.call("hello", what="start") for rank in self._ranks], self.start_seconds)
        for rank, hello in zip(self._ranks, hellos, strict=True):
            rank.greet(hello)
        if len({hello.process[0] for hello in hellos}) == 1:  # one machine: nothing has to listen
            where = f"file://{tempfile.gettempdir()}/bapo-ranks-{uuid.uuid4().hex}"
        else:
            free = self._ranks[0].call("free_address", what="find a free port")
            where = f"tcp://{self._answers([free], self.update_seconds)[0]}"
        self.doing = "loading the model"
        met = [rank.call("meet", where, what="load the model and meet the other ranks") for rank in self._ranks]
        self._answers(met, self.update_seconds)
        self._greeted = True

    def _restart(self, error: Exception) -> None:
        """Start all ranks again, from the last checkpoint, and repeat the updates of the journal."""
        for _ in range(TRIES):
            self.restarts += 1
            self.restarted(Restart(LEARNER, str(error), updates=len(self.journal)))
            self.close()
            self._ranks, self._greeted = self.spawn(), False
            try:
                return self._repeat()
            except (Lost, Silent, Missing) as again:
                error = again
        raise ClusterError(f"the learner's ranks died {TRIES} times in a row. The last one said: {error}") from error

    def _repeat(self) -> None:
        """Load the last checkpoint and take the updates of the journal again."""
        version = 0
        if self.origin is not None:
            path, version = self.origin
            self._ask("load", path, version, what=f"load {path.name}")
        self._compare(version)
        for number, batch in enumerate(self.journal, 1):
            version = self._ask("step", batch, what=f"repeat update {number} of {len(self.journal)}").version
            self._compare(version)
        assert version == self.version, f"repeating the journal led to version {version} instead of {self.version}"

    def _compare(self, version: int) -> None:
        """If this version was published before the restart, say whether its weights are the same now."""
        if self.last is None or version != self.last[0]:
            return
        _, (digest, _) = self._ask("publish", self.contexts, what=f"publish version {version} again", returns=2)
        if digest != self.last[1]:
            self.say(
                f"version {version} has other bits than before the learner was restarted (fingerprint {digest} instead "
                f"of {self.last[1]}): this hardware does not repeat an update exactly. Training goes on."
            )


def _blame(late: list[Call]) -> None:
    """Raise an error that names everybody who is late. If all are, they may be waiting for each other."""
    try:
        late[0].answer(0)
    except Silent as error:
        others = ", ".join(call.who for call in late[1:])
        raise Silent(f"{error} {others} as well: can they reach each other?" if others else str(error)) from None


def _cause(error: Exception, calls: list[Call]) -> Exception:
    """Why a rank failed: because another one died, because they cannot reach each other, or on its own account."""
    deadline = time.monotonic() + GRACE_SECONDS
    for call in calls:
        try:
            call.answer(max(0.0, deadline - time.monotonic()))
        except Lost as lost:
            return lost
        except Exception:  # noqa: S112 - it is not the cause that we are looking for
            continue
    backend = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "Gloo", "NCCL"))
    if backend or isinstance(error, LostRank | DistError):
        return Lost(f"the learner ranks cannot reach each other: {str(error).splitlines()[0]}")
    return error
