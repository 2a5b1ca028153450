"""A run of the scheduler on an engine, in rounds: the caller that waits, for the engine and for environments.

A response that ended a turn gives its slot back, and its environment is asked while the engine samples others. What is
sampled together must not depend on how long an environment takes. So there are rounds:

    a round ends       when half of the responses under way have ended, or a turn of theirs: then the engine rests
    in the next round  their environments may answer
    at its end         whoever has not answered yet is waited for, and all of them go on together

An environment that answers at once needs no round for it. An engine that never rests gives other tokens each time
anyway: it is given a response as soon as that is answered. A run is over when the engine has done its work and all
environments have answered, so that a checkpoint knows nothing of time either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bapo.rollout.engine import Engine, Sampled, TellSampled, left_idle, sampled
from bapo.rollout.scheduler import Rollout, Scheduler, Work, give_up
from bapo.types import Trajectory

ANSWER_SECONDS = 0.25
"""How long a run waits for environments before it tells how far it is."""
TURN_SECONDS = 0.05
"""How long the engine samples before a run looks who has ended a turn, and who was answered."""


def run(scheduler: Scheduler, engine: Engine, *, tell: TellSampled | None = None) -> Rollout:
    """Continue the admitted responses within the budget and return the groups that became complete.

    If the engine raises, nothing is lost: every response keeps the tokens that were collected. `tell` is called with
    how far the run is.
    """
    scheduler.begin(engine.version)
    running = _Running(scheduler, engine, tell, len(scheduler.unfinished()), scheduler.sampled_tokens)
    with left_idle(engine):
        while True:
            running.hear(scheduler.unfinished())
            if (work := scheduler.requests(engine.version)) is None:
                return scheduler.take()
            running.play(work)


@dataclass(frozen=True)
class _Running:
    """A run under way."""

    scheduler: Scheduler
    engine: Engine
    tell: TellSampled | None
    asked: int
    """How many responses were unfinished when it began."""
    tokens: int
    """How many tokens had been sampled then."""

    def play(self, work: Work) -> None:
        """Do this work, and what follows from it, until nothing is under way and nobody is with an environment."""
        scheduler, engine, requests, begun = self.scheduler, self.engine, work.requests, self.scheduler.sampled_tokens
        talk, left = scheduler.conversations, work.token_budget
        away: list[Trajectory] = []  # whose turn ended in the round before
        ended: list[Trajectory] = []  # whose turn has ended in this round
        while requests or away or ended or scheduler.under_way:
            if requests or scheduler.under_way:
                engine.submit(requests, scheduler.sampling, token_budget=left, turns=talk is not None)
            self.report()
            for collected in sampled(engine, scheduler.under_way, seconds=TURN_SECONDS if talk else None):
                for request, segment in collected:
                    ended += scheduler.accept(request, segment)
                scheduler.listen(0)
                self.report()
                if engine.resting is None and scheduler.idle(ended):
                    break
            if engine.resting is None:
                while ended and not (scheduler.under_way or scheduler.idle(ended)):
                    self.listen()
                back, ended = scheduler.idle(ended), [each for each in ended if scheduler.waits(each)]
            else:
                back, away, ended = away, ended, []
                if (talk is not None and talk.at_once) or not (back or scheduler.under_way):
                    back, away = back + away, []
                self.hear(back)
            if work.token_budget is not None:
                left = max(0, work.token_budget + begun - scheduler.sampled_tokens)
            requests = [] if left == 0 else scheduler.again(back)

    def hear(self, responses: Sequence[Trajectory]) -> None:
        """Wait until all of these are answered. If one was given up, so is its group, once all of that are answered."""
        while any(map(self.scheduler.waits, responses)):
            self.listen()
        groups = self.scheduler.given_up(responses)
        while any(self.scheduler.waits(trajectory) for group in groups for trajectory in group.trajectories):
            self.listen()
        give_up(groups)

    def listen(self) -> None:
        """Wait for an answer, and tell how far the run is."""
        self.scheduler.listen(ANSWER_SECONDS)
        self.report()

    def report(self) -> None:
        """Tell how far the run is."""
        if self.tell is not None:
            left = len(self.scheduler.unfinished())
            self.tell(Sampled(self.asked - left, self.asked, self.scheduler.sampled_tokens - self.tokens))
