"""Verifiers in processes of their own, where no answer can stall or kill the training.

    with VerifierPool("bapo.tasks.verify.math:verify", workers=4, seconds=5, memory_mb=1024) as pool:
        pool.scores([("72", r"… \\boxed{72}"), …])          # a Score each, in order

A model under training will sooner or later write 9^{9^{9^{9}}}, and a verifier that computes with answers will try to
evaluate it. So a verifier is a pure function `verify(answer, response) -> Score`, named as module:function, and workers
(`bapo.process.limited`) call it under hard limits of wall-clock time and memory for each answer. An answer that exceeds
them, or ends the process, is a failure, not a reward of 0: the verifier could not tell. A verifier that catches its own
MemoryError decides for itself.

Workers never import torch. In our process, one thread per worker feeds the worker and waits for it. Several callers
share the workers: all that they ask goes through one queue, so a slow response holds back one worker and no caller.
Equal pairs are verified once per call. Responses are failures if no worker can be started for them.
"""

import json
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from bapo.process.limited import CannotStart, Worker
from bapo.tasks.task import followed
from bapo.types import LARGEST_REWARD, Score

Item = TypeVar("Item")
MAX_DEFAULT_WORKERS = 16
"""Without a number, there is one worker per core that this process may use, up to this many."""


class _Job:
    """What one caller asks for."""

    def __init__(self, one: Callable[[Worker, Any], Iterable[Any]], work: "queue.SimpleQueue[Any]") -> None:
        self.one, self._work = one, work
        self.over = threading.Event()
        self.busy: set[Worker] = set()
        """The workers that do something of it."""
        self.error: BaseException | None = None
        self.unable = ""
        """Why a worker could not be started."""
        self._left, self._failed, self._lock = 0, 0, threading.Lock()

    def put(self, items: Iterable[Any]) -> None:
        """Queue these items, too."""
        for item in items:
            with self._lock:
                self._left += 1
            self._work.put((self, item))

    def work(self, worker: Worker, item: Any, workers: int) -> None:
        """Do one item, in the thread of a worker, unless the job is given up."""
        self.busy.add(worker)
        try:
            if not self.over.is_set():
                self.put(self.one(worker, item))
        except CannotStart as error:
            self.unable, self._failed = str(error), self._failed + 1
            if self._failed < workers:
                self.put([item])  # for another worker
            else:
                self.over.set()
        except BaseException as error:
            self.error = error
            self.over.set()
        self.busy.discard(worker)
        with self._lock:
            self._left -= 1
            if not self._left:
                self.over.set()


class Pool(AbstractContextManager["Pool"]):
    """Workers that take work from one queue. They end with `close`, with the `with` block, or with the process."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._workers, os.getpid(), self._work)
        try:
            for worker in self._workers:
                worker.start()
            self._workers[0].wait_until_ready()
        except BaseException:
            self.close()
            raise

    def work_on(self, items: Iterable[Item], one: Callable[[Worker, Item], Iterable[Item]]) -> str:
        """Let `one` do each item with some worker, in its thread; it returns items to be done besides.

        Returns why items are left, if no worker can be started any more.
        """
        if not self._finalizer.alive:
            name = self._workers[0].name
            raise ValueError(f"the pool of {name} was closed and cannot score any more. Make a new one.")
        with self._starting:
            for worker in self._workers[len(self._threads) :]:
                given = worker, self._work, len(self._workers)
                self._threads.append(threading.Thread(target=_serve, args=given, name="verifier", daemon=True))
                self._threads[-1].start()
        job = _Job(one, self._work)
        try:
            job.put(listed := list(items))
            if listed:
                job.over.wait()
            if job.error is not None:
                raise job.error
        except BaseException:  # Ctrl-C: no thread may keep waiting
            job.over.set()
            _close_all(list(job.busy), os.getpid())
            raise
        return job.unable

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()


class VerifierPool(Pool):
    """Workers that all call one verifier."""

    def __init__(
        self, verifier: str, *, workers: int | None = None, seconds: float = 5.0, memory_mb: int = 1024
    ) -> None:
        self.verifier, self.seconds = verifier, seconds
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        super().__init__([Worker(verifier, memory_mb) for _ in range(workers or min(cores, MAX_DEFAULT_WORKERS))])

    def scores(self, responses: Sequence[tuple[Any, str]]) -> list[Score]:
        """The score that the verifier gives each (answer, response), in order. No response text makes it raise."""
        keys = [json.dumps(pair) for pair in responses]
        different = dict(zip(keys, responses, strict=True))
        follower, counting = followed(len(different)), threading.Lock()
        found: dict[str, Score] = {}

        def one(worker: Worker, item: tuple[str, tuple[Any, str]]) -> tuple[()]:
            key, pair = item
            score = self._score(worker.call(self.seconds, pair))
            with counting:
                found[key] = follower.known(score)
            return ()

        unable = self.work_on(different.items(), one)
        return [found.get(key) or Score(None, failure=unable) for key in keys]

    def _score(self, reply: dict[str, Any]) -> Score:
        if "result" not in reply:
            return Score(None, failure=reply["failure"])
        try:
            score = Score(**reply["result"])
            if score.reward is None:
                return score
            if abs(score.reward) <= LARGEST_REWARD:
                return replace(score, reward=float(score.reward))
        except (TypeError, OverflowError):
            pass
        return Score(None, failure=f"{self.verifier} returned {json.dumps(reply['result'])[:100]}; it must be a Score")


def _serve(worker: Worker, work: "queue.SimpleQueue[Any]", workers: int) -> None:
    """The thread of a worker."""
    while (taken := work.get()) is not None:
        job, item = taken
        job.work(worker, item, workers)
        del taken, job, item  # while it waits, it keeps nothing alive


def _close_all(workers: Sequence[Worker], owner: int, work: "queue.SimpleQueue[Any] | None" = None) -> None:
    """End all workers, and with `work` their threads. A process forked from their owner leaves them alone."""
    if os.getpid() == owner:
        for _ in workers:
            if work is not None:
                work.put(None)
        for worker in workers:
            if worker.process is not None:
                worker.hang_up()  # so that all of them exit at the same time
        for worker in workers:
            worker.close()
