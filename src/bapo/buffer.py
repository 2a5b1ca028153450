"""Replay with a hard staleness bound: what the learner trains on, how often, and how old it may be.

Groups are added when they are finished and scored, and are then drawn update by update. Two off-policy sources (method,
section 6) live here, each with its own switch:

    reuse     a group is fresh until `reuse` passes have visited it, once per pass
    replay    groups of earlier rollouts join the batches of later ones, up to an age and a number of uses

A rollout consists of all groups added up to the call that declares it whole, including the groups of that call. Its
passes begin then. Groups may be added at any time, even during the passes over earlier rollouts: rollouts are visited
one after the other, the oldest first.

A pass over m groups makes max(1, m / batch_groups rounded) batches (at most `max_batches`) whose sizes differ by one at
most, the larger ones first, so that no update rests on a few left-over groups. If groups are lost during a pass, those
that are left are cut again, into no more batches than were left. A draw takes the next such batch of n groups and adds
round(f / (1 - f) n) replayed groups (ties to even), so that replay makes up the fraction f of the batch; it adds fewer
if fewer are eligible. Replay accompanies fresh groups and never stands alone. A draw that has no batch says why: DONE
means that all passes are over and it is time for the next rollout; NOT_YET means that groups are waiting for the rest
of their rollout.

The staleness bound. Let age(group, v) = v - version of the oldest token in any of its responses; an empty response
has no token and does not count. With `max_staleness` = S, no token with staleness above S is ever trained on:

    - a draw at version v first releases every group of age > S, so everything it returns has age at most S at v;
    - the learner takes exactly one update per draw, with weights of version v, and keeps no group for a later one;
    - so every group in every update came from that update's own draw, and each of its tokens has staleness
      v - token version <= age(group, v) <= S.

Admission plays no part in this proof, so the bound holds however old a rollout is when it arrives and however far the
learner has moved between two calls.

How large S must be for the bound to cost nothing: n groups make u = reuse * max(1, n / batch_groups rounded) updates.
If their rollout becomes whole at age at most A (the scheduler's `max_age`), is drawn at once, and the version advances
by one per update, then the last visit happens at age A + u - 1. With S >= A + u - 1 no fresh group expires.
`lost_fresh` counts fresh groups that do expire. The groups of a rollout have age u or more when the next rollout is
first drawn, so a replay age below u replays nothing.

Order depends on names, not on history: groups are sorted by a hash of (seed, purpose, group id). So the order of the
groups does not change with the order in which they arrive or are held, or when one of them is lost.

Memory. At most `capacity` groups are held; the oldest (by oldest token, then id) are evicted first, fresh or not. A
group that no draw can return any more is released at once. Groups are handed out without being copied, so callers must
not change them; only the learner may add the log-probs of its reference, which are then kept with the group.
Advantages, packing and weighting by age are the learner's task. Nothing here waits or runs in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256
from typing import Any

from bapo.types import (
    Group,
    Record,
    Truncated,
    batches_per_pass,
    even_part,
    group_from_state,
    group_state,
    increased,
    nothing,
)


@dataclass(frozen=True)
class BufferMetrics:
    """What the buffer has done since it was made, and what it holds; `bapo.runs.metrics` explains every field.

    At all times, added = retired + expired + evicted + held.
    """

    adds: int = 0
    draws: int = 0
    added: int = 0
    filtered: int = 0
    fresh: int = 0
    replayed: int = 0
    replay_short: int = 0
    retired: int = 0
    expired: int = 0
    evicted: int = 0
    lost_fresh: int = 0
    held: int = 0
    held_tokens: int = 0
    to_visit: int = 0


@dataclass
class _Held:
    """A group, and how often it has been used."""

    group: Group
    rollout: int
    """The number of its rollout, counted from 1."""
    passes: int = 0
    """How many fresh passes have visited it."""
    replays: int = 0
    """How often it was replayed."""
    skipped: int = 0
    """How many of these updates were skipped, and so did not use it."""
    oldest: int = field(init=False)
    """Version of its oldest token."""

    def __post_init__(self) -> None:
        self.oldest = min(min(trajectory.versions) for trajectory in self.group.trajectories if trajectory.versions)


@dataclass(frozen=True)
class Admitted:
    """What happened to the groups of one `add`."""

    groups: list[Group]
    """Groups the buffer now holds."""
    filtered: list[Group]
    """Groups without a training signal, which the buffer does not hold."""


class NoBatch(Enum):
    """Why a draw has no groups."""

    NOT_YET = "groups are waiting for the rest of their rollout"
    DONE = "the passes over all groups are over"


class Buffer:
    """Holds finished groups and decides, update by update, which of them are trained on."""

    def __init__(
        self,
        *,
        batch_groups: int,
        max_batches: int | None = None,
        reuse: int = 1,
        max_staleness: int,
        replay_fraction: float = 0.0,
        replay_max_age: int = 0,
        replay_max_uses: int = 1,
        capacity: int = 1024,
        truncated: Truncated = "keep",
        each_reward: bool = False,
        seed: int = 0,
        record: Record = nothing,
    ) -> None:
        """`max_batches`: most batches in one pass; a larger rollout makes larger batches. `replay_fraction`: the
        replayed share of each batch; 0 turns replay off. `replay_max_age`: the age of the oldest group that is
        replayed, in versions. `replay_max_uses`: how often a group is replayed, on top of its `reuse` fresh passes.
        `truncated`: what the learner does with truncated responses, which may leave a group without a signal.
        `each_reward`: whether a group teaches if any of its several rewards differs, though their sums do not.
        `record` is told what happens to every group.
        """
        wrong = wrong_settings(
            updates=reuse * (max_batches or 1),
            batch_groups=batch_groups,
            reuse=reuse,
            max_staleness=max_staleness,
            replay_fraction=replay_fraction,
            replay_max_age=replay_max_age,
            replay_max_uses=replay_max_uses,
            capacity=capacity,
        )
        if first := next(wrong, None):
            raise ValueError(first)
        self.batch_groups = batch_groups
        self.max_batches = max_batches
        self.reuse = reuse
        self.max_staleness = max_staleness
        self.replay_fraction = replay_fraction
        self.replay_max_age = replay_max_age
        self.replay_max_uses = replay_max_uses
        self.capacity = capacity
        self.truncated = truncated
        self.each_reward = each_reward
        self.seed = seed
        self.record = record
        self._held: dict[int, _Held] = {}
        self._version: int | None = None
        self._batches_left: dict[int, tuple[int, int]] = {}
        """For each whole rollout with passes left: the number of its present pass, and the most batches left in it."""
        self._open = False
        """Whether groups were added to a rollout that is not whole yet."""
        self._totals = BufferMetrics()

    def add(self, groups: Iterable[Group], *, version: int, whole: bool = True) -> Admitted:
        """Take in finished, scored groups. A refused call changes nothing.

        `whole`: these groups complete their rollout, so its passes begin; otherwise they wait for the rest.
        """
        self._check_version(version)
        rollout = self._totals.adds + 1
        admitted: dict[int, _Held] = {}
        filtered = []
        for group in groups:
            _check_group(group, version)
            if group.id in self._held or group.id in admitted:
                raise ValueError(
                    f"group {group.id} (problem {group.problem.id!r}) is already in the buffer, and ids are unique "
                    "within a run. Add each finished group once."
                )
            if self._has_signal(group):
                admitted[group.id] = _Held(group, rollout)
            else:
                filtered.append(group)
        self._version = version
        self._held |= admitted
        for held in admitted.values():
            self.record("held", held.group.id, oldest=held.oldest)
        for group in filtered:
            self.record("filtered", group.id)
        self._count(added=len(admitted), filtered=len(filtered))
        self._open = not whole
        if whole:
            self._batches_left[rollout] = (-1, 0)
            self._count(adds=1)
        self._settle(version)
        return Admitted([held.group for held in admitted.values()], filtered)

    def draw(self, *, version: int) -> list[Group] | NoBatch:
        """Return the groups of the next update, fresh ones first, or the reason why there are none.

        Each group says how many updates have used it before.
        """
        self._check_version(version)
        self._version = version
        self._settle(version)
        if not self._batches_left:
            return NoBatch.NOT_YET if self._open else NoBatch.DONE
        rollout = min(self._batches_left)
        fresh = self._next_of_pass(rollout)
        places = round(self.replay_fraction / (1 - self.replay_fraction) * len(fresh))
        replayed = self._sample_replay(places, before=rollout)
        drawn = [
            replace(held.group, uses=held.passes + held.replays - held.skipped)  # how many updates used it before
            for held in fresh + replayed
        ]
        for group in drawn:
            self.record("trained", group.id, version=version, uses=group.uses)
        for held in fresh:
            held.passes += 1
        for held in replayed:
            held.replays += 1
        self._count(draws=1, fresh=len(fresh), replayed=len(replayed), replay_short=places - len(replayed))
        self._settle(version)
        return drawn

    def skipped(self, groups: Iterable[Group]) -> None:
        """The update on the groups of the last draw was skipped: its visits are over, but it has used none of them."""
        for group in groups:
            self.record("skipped", group.id, version=self._version)
            if (held := self._held.get(group.id)) is not None:
                held.skipped += 1

    def metrics(self) -> BufferMetrics:
        """Counts since the buffer was made, which are saved and restored with it, and present levels."""
        return replace(
            self._totals,
            held=len(self._held),
            held_tokens=sum(len(t.versions) for held in self._held.values() for t in held.group.trajectories),
            to_visit=sum(self._passes_left(held) for held in self._held.values()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what this buffer does next, as plain JSON data. Settings are not included."""
        return {
            "version": self._version,
            "open": self._open,
            "batches_left": [[rollout, *left] for rollout, left in self._batches_left.items()],
            "totals": dict(vars(self._totals)),
            "held": [
                {name: getattr(held, name) for name in ("rollout", "passes", "replays", "skipped")}
                | {"group": group_state(held.group)}
                for held in self._held.values()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Whatever this buffer held before is forgotten."""
        self._version = state["version"]
        self._open = state["open"]
        self._batches_left = {rollout: (number, left) for rollout, number, left in state["batches_left"]}
        self._totals = BufferMetrics(**state["totals"])
        held = [_Held(**{**saved, "group": group_from_state(saved["group"])}) for saved in state["held"]]
        self._held = {each.group.id: each for each in held}

    def _passes_left(self, held: _Held) -> int:
        """Fresh passes that will still visit it: none once all passes over its rollout are done."""
        over = held.rollout <= self._totals.adds and held.rollout not in self._batches_left
        return 0 if over else max(0, self.reuse - held.passes)

    def _unvisited(self, rollout: int) -> tuple[int, list[_Held]]:
        """The number of the present pass over a rollout, from 0, and the groups that it has not visited yet."""
        unfinished = [held for held in self._held.values() if held.rollout == rollout and self._passes_left(held)]
        number = min(held.passes for held in unfinished)
        return number, [held for held in unfinished if held.passes == number]

    def _next_of_pass(self, rollout: int) -> list[_Held]:
        """The next batch of the present pass: the first groups, in its order, that it has not visited yet."""
        number, unvisited = self._unvisited(rollout)
        present, left = self._batches_left[rollout]
        most = left if present == number else self.max_batches
        batches = batches_per_pass(len(unvisited), self.batch_groups)
        batches = min(batches, most or batches)
        self._batches_left[rollout] = (number, batches - 1)
        begin, end = even_part(len(unvisited), batches, batches - 1)  # the last part is never the smaller one
        return self._shuffled(unvisited, "pass", rollout, number)[: end - begin]

    def _sample_replay(self, places: int, *, before: int) -> list[_Held]:
        """Groups of earlier rollouts, without replacement. All held groups are eligible, since `_settle` has run."""
        earlier = [held for held in self._held.values() if held.rollout < before]
        return self._shuffled(earlier, "replay", self._totals.draws)[:places]

    def _shuffled(self, groups: list[_Held], *purpose: str | int) -> list[_Held]:
        """The groups in a random order that is a function of (seed, purpose, ids)."""

        def key(held: _Held) -> bytes:
            return sha256(repr((self.seed, *purpose, held.group.id)).encode()).digest()

        return sorted(groups, key=key)

    def _has_signal(self, group: Group) -> bool:
        """Whether rewards differ, so that not all advantages are 0, and there are tokens to apply them to."""
        compared = group.compared(self.truncated)
        rewards = {(t.learning_reward, *(t.rewards.values() if self.each_reward else ())) for t in compared}
        return len(rewards) > 1 and any(trajectory.tokens for trajectory in group.trained(self.truncated))

    def _settle(self, version: int) -> None:
        """Release every group that no draw at this version or later can return, then the oldest beyond the capacity."""
        for held in list(self._held.values()):
            fresh = self._passes_left(held) > 0
            limit = self.max_staleness if fresh else self.replay_max_age
            if not fresh and (self.replay_fraction == 0 or held.replays >= self.replay_max_uses):
                self._release(held, "retired")
            elif version - held.oldest > limit:
                self._release(held, "expired")
        excess = max(0, len(self._held) - self.capacity)
        for held in sorted(self._held.values(), key=lambda held: (held.oldest, held.group.id))[:excess]:
            self._release(held, "evicted")
        unfinished = {held.rollout for held in self._held.values() if self._passes_left(held)}
        self._batches_left = {rollout: left for rollout, left in self._batches_left.items() if rollout in unfinished}

    def _release(self, held: _Held, reason: str) -> None:
        del self._held[held.group.id]
        self.record(reason, held.group.id)
        self._count(**{reason: 1}, lost_fresh=int(self._passes_left(held) > 0))

    def _check_version(self, version: int) -> None:
        if self._version is not None and version < self._version:
            raise ValueError(
                f"version={version} is older than the last call's {self._version}; the learner never moves back. "
                "Pass the learner's current version."
            )

    def _count(self, **more: int) -> None:
        self._totals = increased(self._totals, **more)


def _check_group(group: Group, version: int) -> None:
    """Only complete groups enter, because rewards are compared within them."""
    for index, trajectory in enumerate(group.trajectories):
        name = f"response {index} of group {group.id} (problem {group.problem.id!r})"
        if not trajectory.finished:
            raise ValueError(
                f"{name} is {trajectory.status}; only finished groups can be added. Add the groups that a run returned."
            )
        if trajectory.reward is None or not math.isfinite(trajectory.reward):
            raise ValueError(
                f"{name} has reward {trajectory.reward}, which is not a finite number. Score every response of a group "
                "before you add it."
            )
        if max(trajectory.versions, default=version) > version:
            raise ValueError(
                f"{name} has a token of version {max(trajectory.versions)}, newer than the learner's {version}, so its "
                "age is unknown. Pass the learner's current version."
            )


def wrong_settings(
    *,
    updates: int,
    batch_groups: int,
    reuse: int,
    max_staleness: int,
    replay_fraction: float,
    replay_max_age: int,
    replay_max_uses: int,
    capacity: int,
) -> Iterator[str]:
    """What cannot be about these settings of a buffer, in the words of the configuration, which asks here, too.

    `updates`: how many the passes over one rollout take, at most.
    """
    for key, value, least in (
        ("learn.batch_groups", batch_groups, 1),
        ("offpolicy.reuse", reuse, 1),
        ("offpolicy.max_staleness", max_staleness, 0),
        ("offpolicy.replay_max_age", replay_max_age, 0),
        ("offpolicy.replay_max_uses", replay_max_uses, 1),
    ):
        if value < least:
            yield f"{key}={value} is too small. Set it to {least} or more."
    if updates - 1 > max_staleness:
        yield (
            f"offpolicy.reuse={reuse} makes {updates} updates on each rollout batch, so its tokens reach staleness "
            f"{updates - 1}, but offpolicy.max_staleness={max_staleness} forbids that. Set max_staleness >= "
            f"{updates - 1}, lower reuse, or raise learn.batch_groups."
        )
    if not 0 <= replay_fraction < 1:
        yield (
            f"offpolicy.replay_fraction={replay_fraction} is not a share of a batch that leaves room for fresh groups. "
            "Set it to 0 for no replay, or to a number between 0 and 1."
        )
    if replay_fraction > 0 and replay_max_age > max_staleness:
        yield (
            f"offpolicy.replay_max_age={replay_max_age} exceeds offpolicy.max_staleness={max_staleness}, which holds "
            f"for every token. Set replay_max_age <= {max_staleness}, or raise max_staleness."
        )
    if replay_fraction > 0 and replay_max_age < updates:
        yield (
            f"offpolicy.replay_max_age={replay_max_age} replays nothing: after the passes over it "
            f"(offpolicy.reuse={reuse}), a rollout has age {updates} or more. Set replay_max_age >= {updates}, or "
            "replay_fraction=0 for no replay."
        )
    if capacity < batch_groups:
        yield (
            f"offpolicy.replay_capacity={capacity} cannot hold one batch of learn.batch_groups={batch_groups}. "
            f"Set replay_capacity >= {batch_groups}."
        )
