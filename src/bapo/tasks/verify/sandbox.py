"""Verifiers in processes of their own, where no answer can stall or kill the training.

    with VerifierPool("bapo.tasks.verify.math:verify", workers=4, seconds=5, memory_mb=1024) as pool:
        pool.scores([("72", r"… \\boxed{72}"), …])          # a Score each, in order

A model under training will sooner or later write 9^{9^{9^{9}}}, and a verifier that computes with answers will try to
evaluate it. So a verifier is a pure function `verify(answer, response) -> Score`, named as module:function, and workers
(`bapo.process.limited`) call it under hard limits of wall-clock time and memory for each answer. An answer that exceeds
them, or ends the process, is a failure, not a reward of 0: the verifier could not tell. A verifier that catches its own
MemoryError decides for itself.

Workers never import torch. In our process, one thread per worker feeds the worker and waits for it. Equal pairs are
verified once per call, and no response is verified twice. The pool serves one caller at a time, and other callers wait
until that call returns. Responses are failures if no worker can be started for them.
"""

import json
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from bapo.process.limited import CannotStart, Worker
from bapo.tasks.task import followed
from bapo.types import LARGEST_REWARD, Score

Item = TypeVar("Item")
MAX_DEFAULT_WORKERS = 16
"""Without a number, there is one worker per core that this process may use, up to this many."""


class Pool(AbstractContextManager["Pool"]):
    """Workers that take work from one queue. They end with `close`, with the `with` block, or with the process."""

    def __init__(self, workers: list[Worker]) -> None:
        self._lock = threading.Lock()  # a worker serves one caller at a time
        self._workers = workers
        self._finalizer = weakref.finalize(self, _close_all, self._workers, os.getpid())
        try:
            for worker in self._workers:
                worker.start()
            self._workers[0].wait_until_ready()
        except BaseException:
            self.close()
            raise

    def work_on(self, items: Iterable[Item], one: Callable[[Worker, Item], Iterable[Item]]) -> str:
        """Let `one` do each item with some worker, in a thread per worker; it returns items to be done besides.

        Returns why items are left, if no worker can be started any more.
        """
        work: queue.SimpleQueue[Item] = queue.SimpleQueue()
        for item in items:
            work.put(item)
        unable = ""

        def drain(worker: Worker) -> None:
            nonlocal unable
            with suppress(queue.Empty):
                while True:
                    item = work.get_nowait()
                    try:
                        more = one(worker, item)
                    except CannotStart as error:
                        unable = str(error)
                        work.put(item)  # for another worker, if one is left
                        return
                    for each in more:
                        work.put(each)

        with self._lock, ThreadPoolExecutor(len(self._workers)) as threads:
            if not self._finalizer.alive:
                name = self._workers[0].name
                raise ValueError(f"the pool of {name} was closed and cannot score any more. Make a new one.")
            busy = self._workers[: work.qsize()]
            try:
                for finished in [threads.submit(drain, worker) for worker in busy]:
                    finished.result()
            except BaseException:  # Ctrl-C: no thread may keep waiting
                with suppress(queue.Empty):
                    while True:
                        work.get_nowait()
                _close_all(busy, os.getpid())
                raise
        return unable

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


def _close_all(workers: Sequence[Worker], owner: int) -> None:
    """End all workers. A process forked from their owner leaves them alone."""
    if os.getpid() == owner:
        for worker in workers:
            if worker.process is not None:
                worker.hang_up()  # so that all of them exit at the same time
        for worker in workers:
            worker.close()
