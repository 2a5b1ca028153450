"""`VllmEngine`: samples with vLLM's AsyncLLM, whose scheduler and workers are processes of their own.

    caller's thread       submit, collect, park, load: asks the loop, or reads what has come
    our thread            an event loop: one task per request moves its tokens from vLLM to the mailbox
    EngineCore, workers   vLLM's processes: schedule and compute; they end with this one

`collect` waits for the mailbox; a token fills it, and so do the last segment of a request and the death of EngineCore.
Whatever else waits for vLLM has a deadline and an error that says what was waited for.

Weights are loaded only while nothing is under way, so the version on a token is that of the weights that sampled it. A
load goes through vLLM's weight transfer (`init`, `start`, `update`, `finish`), and its result is checked: the names and
bits of everything that arrived in every worker, and that no parameter of vLLM's model was left out. An engine that
fails it has no version any more and refuses to sample. `worker.probe` is the second check, of what it samples.

What differs from the engines in this process:

- vLLM draws its own random numbers. A request is seeded by (seed, position), but equal requests need not give equal
  tokens: the floating-point numbers depend on what else is in the batch. So `draws_by_position` is False.
- There are no entropies.
- The token budget is not exact: vLLM has sampled up to a few more tokens per response under way before it stops. They
  are returned.
- Temperatures are 0, or between 0.01 and 2.
- Truncation is vLLM's own, with the same rules in the same order. Which of several equal tokens at the edge of top_p
  stays is up to it. It does not say how much it kept, so our sampler in its worker does (`plugin.TellsKept`).
"""

import asyncio
import math
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment
from bapo.rollout.randomness import response_seed
from bapo.rollout.sittings import check_idle, check_requests, non_finite
from bapo.rollout.vllm.buckets import BUCKET_BYTES, batches, check_arrived, fingerprints, fitting, shared
from bapo.rollout.vllm.start import Settings, check_installed, expected_weights, sockets, start
from bapo.types import Status, refuse

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

T = TypeVar("T")

START_SECONDS = 1800.0
"""How long vLLM may take to start. It compiles and captures graphs on GPUs."""
ANSWER_SECONDS = 300.0
"""How long vLLM may take to answer a single call."""
CLOSE_SECONDS = 10.0
"""How long vLLM may take to end by itself before it is killed."""
_LOOK_SECONDS = 0.5
_LOWEST, _HIGHEST = 0.01, 2.0
_STATUS = {"stop": Status.STOPPED, "length": Status.TRUNCATED, "abort": Status.PARKED}


class EngineDied(RuntimeError):  # noqa: N818
    """vLLM's EngineCore has ended, or does not answer. This engine cannot be used any more."""


class VllmEngine:
    """An `Engine` that samples with vLLM. Has no weights until the first `load`."""

    draws_by_position = False
    gives_entropies = False
    resting = None

    def __init__(self, settings: Settings) -> None:
        check_installed()
        self.settings = settings
        self.version = NOTHING_LOADED
        self._expected = expected_weights(settings.model)
        self._streams: dict[int, _Stream] = {}  # by request id, until the last segment has been collected
        self._budget = math.inf
        self._tells_kept = False
        self._count = 0
        self._failure: Exception | None = None  # of the engine, for good
        self._complaint: Exception | None = None  # about a request, raised once
        self._background: set[asyncio.Task[None]] = set()
        self._mail = threading.Condition()
        self._held = ExitStack()
        directory = self._held.enter_context(sockets())
        self._loop = asyncio.new_event_loop()
        # vLLM's processes end with the thread that started them, so it is this one, which lives until `close`.
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._llm: AsyncLLM | None = None
        try:
            self._llm = self._ask(start(settings, directory), "start", START_SECONDS)
            self.positions = int(self._llm.model_config.max_model_len)
            self.vocabulary = int(self._llm.model_config.get_vocab_size())
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            init = self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            self._ask(init, "prepare for weights")
        except BaseException:
            self.close()
            raise

    # The verbs of an engine.

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Move the weights to vLLM, clear its caches, and check what has arrived. Tensors may be on any device."""
        self._check_alive()
        check_idle(self._streams or None, "load")
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.version = NOTHING_LOADED
        sent: dict[str, str] = {}
        self._ask(self._vllm.start_weight_update(), "prepare for new weights")
        try:
            for batch in batches(fitting(weights, self._expected), BUCKET_BYTES):
                sent |= fingerprints(batch)
                with shared(batch) as bucket:
                    request = WeightTransferUpdateRequest(update_info={"bucket": vars(bucket)})
                    self._ask(self._vllm.update_weights(request), f"load {len(batch)} weights, from {batch[0][0]!r}")
        except BaseException:
            with suppress(Exception):  # vLLM refuses another update while one is open
                self._ask(self._vllm.finish_weight_update(), "give up the new weights")
            raise
        self._ask(self._vllm.finish_weight_update(weight_version=str(version)), "finish the new weights")
        reports = self._ask(self._vllm.collective_rpc("bapo_report"), "report what has arrived")
        check_arrived(reports, sent, set(self._expected))
        if not self._ask(self._vllm.reset_prefix_cache(), "clear its caches"):
            raise RuntimeError("vLLM did not clear its cache of prefixes after new weights. Start the engine again.")
        self.version = version

    def takes(self, requests: Sequence[Request]) -> bool:
        """It always does."""
        return True

    def submit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        token_budget: int | None = None,
        turns: bool = False,
    ) -> None:
        """Start work on these requests, beside those under way. A token budget counts from now on, for all of them.

        vLLM keeps keys and values by itself, and finds them when a response comes back.
        """
        self._check_alive()
        check_requests(requests, sampling, token_budget, positions=self.positions, version=self.version)
        check_temperature(sampling.temperature)
        check_tokens(requests, self.vocabulary)
        taken = {request.id for request in requests} & self._streams.keys()
        first = min(taken, default=None)
        refuse((taken, f"the request id {first} is still under way, and segments go by the id. Use unique ids."))
        if token_budget is not None or not self._streams:
            self._budget = math.inf if token_budget is None else token_budget
        if sampling.truncates and not self._tells_kept:
            self._ask(self._vllm.collective_rpc("bapo_tell_kept"), "say how much its truncation keeps")
            self._tells_kept = True
        self._ask(self._submitted(requests, sampling), f"accept {len(requests)} requests")

    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        """What was sampled since the last call, one segment per request.

        Waits for `timeout` seconds, or until all work is done. If EngineCore has died, the tokens that came before are
        returned first; the next call raises.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._mail:
            while self._works() and not (self._failure or self._complaint):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._mail.wait(min(left, _LOOK_SECONDS))
                if self._llm is None or self._llm.errored:
                    self._fail(EngineDied(_DIED))
            if self._complaint is not None:
                complaint, self._complaint = self._complaint, None
                raise complaint
            found = [(id, s.cut()) for id, s in self._streams.items() if s.tokens or s.status is not None]
            for id, segment in found:
                if segment.status is not None:
                    del self._streams[id]
        if not found and self._failure is not None:
            raise self._failure
        return found

    def park(self) -> None:
        """Stop work on everything. Tokens that have come are kept; those still on their way here are not."""
        if self._failure is None and self._works():
            self._ask(self._parked(), "stop its requests")

    def close(self) -> None:
        """End vLLM's processes, at the latest by force. The engine cannot be used afterwards."""
        if self._loop.is_closed():
            return
        if self._failure is None:
            self._failure = RuntimeError("this engine was closed. Start another one.")
        self.version = NOTHING_LOADED
        if self._llm is not None:
            manager = self._llm.engine_core.resources.engine_manager
            processes = list(manager.processes) if manager is not None else []
            with suppress(NotInTime):  # first those who would take the end of EngineCore for its death
                asyncio.run_coroutine_threadsafe(_cancelled(), self._loop).result(CLOSE_SECONDS)
            self._llm.shutdown(timeout=CLOSE_SECONDS)
            for process in processes:
                process.join(CLOSE_SECONDS)
                if process.is_alive():
                    process.kill()
            self._llm = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._held.close()

    # In the caller's thread.

    @property
    def _vllm(self) -> "AsyncLLM":
        assert self._llm is not None
        return self._llm

    def _works(self) -> bool:
        return any(stream.status is None for stream in self._streams.values())

    def _check_alive(self) -> None:
        if self._failure is None and (self._llm is None or self._llm.errored):
            self._fail(EngineDied(_DIED))
        if self._failure is not None:
            raise self._failure

    def _ask(self, coroutine: Coroutine[Any, Any, T], what: str, seconds: float = ANSWER_SECONDS) -> T:
        """Run a coroutine on the loop and wait for its result, within a deadline."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except NotInTime as error:
            future.cancel()
            silent = (
                f"vLLM's EngineCore was asked to {what} and did not answer within {seconds:.0f} s. Look at its log, "
                "then start the engine again."
            )
            raise self._fail(EngineDied(silent)) from error
        except Exception as error:
            if self._llm is not None and self._llm.errored:
                raise self._fail(EngineDied(_DIED)) from error
            raise

    def _fail(self, failure: Exception) -> Exception:
        """Remember the first failure, tell everybody who waits, and return it."""
        with self._mail:
            self.version = NOTHING_LOADED
            if self._failure is None:
                self._failure = failure
            self._mail.notify_all()
        return self._failure

    # On the loop.

    async def _submitted(self, requests: Sequence[Request], sampling: Sampling) -> None:
        from vllm.inputs import tokens_input

        begun = [_Stream(request, f"{self._count + index}", self.version) for index, request in enumerate(requests)]
        self._count += len(begun)
        with self._mail:
            self._streams |= {stream.request.id: stream for stream in begun}
        try:
            for stream in begun:
                prompt = tokens_input(list(stream.request.context))
                queue = await self._vllm.add_request(stream.key, prompt, _parameters(stream.request, sampling))
                stream.task = self._loop.create_task(self._follow(stream, queue, sampling))
        except BaseException:
            with self._mail:
                for stream in begun:
                    del self._streams[stream.request.id]
            await self._vllm.abort([stream.key for stream in begun])
            raise
        if self._budget <= 0:
            await self._parked()

    async def _follow(self, stream: "_Stream", queue: "RequestOutputCollector", sampling: Sampling) -> None:
        """Move the tokens of one request to the mailbox, until its last one."""
        try:
            while stream.status is None:
                output = queue.get_nowait() or await queue.get()
                (part,) = output.outputs
                self._take(stream, part, sampling)
        except Exception as error:
            died = EngineDied(_DIED)
            died.__cause__ = error
            self._fail(died)

    def _take(self, stream: "_Stream", part: Any, sampling: Sampling) -> None:
        tokens = list(part.token_ids)
        known = list(zip(tokens, part.logprobs or (), strict=True))
        logprobs = [at[token].logprob for token, at in known]
        masses = [other.logprob for token, at in known for name, other in at.items() if name != token]
        if sampling.temperature == 0:  # all the probability is on the token that was chosen
            logprobs = [logprob - logprob for logprob in logprobs]
        broken = next((index for index, logprob in enumerate(logprobs) if not math.isfinite(logprob)), None)
        with self._mail:
            if broken is not None:
                position = stream.request.position + stream.given + len(stream.tokens) + broken
                self._complaint = non_finite([stream.request], 0, position)
                stream.status = Status.DROPPED
                self._run(self._vllm.abort(stream.key))
            else:
                stream.tokens += tokens
                stream.logprobs += logprobs
                stream.masses += masses
                if part.finish_reason is not None:
                    stream.status = _STATUS.get(part.finish_reason, Status.DROPPED)
            self._budget -= len(tokens)
            if self._budget <= 0 < self._budget + len(tokens):
                self._run(self._parked())
            self._mail.notify_all()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _parked(self) -> None:
        """Abort everything under way, and wait until the last segment of each has come."""
        streams = [stream for stream in self._streams.values() if stream.status is None]
        await self._vllm.abort([stream.key for stream in streams])
        await asyncio.gather(*(stream.task for stream in streams if stream.task is not None))


@dataclass(eq=False)
class _Stream:
    """A request under way: what has come since the last `collect`, and how it ended."""

    request: Request
    key: str
    version: int
    status: Status | None = None
    task: asyncio.Task[None] | None = None
    given: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)

    def cut(self) -> Segment:
        """What has come so far, as a segment. The stream goes on after it."""
        tokens, logprobs, masses = self.tokens, self.logprobs, self.masses
        self.tokens, self.logprobs, self.masses = [], [], []
        self.given += len(tokens)
        return Segment(tokens, logprobs, [math.nan] * len(tokens), [self.version] * len(tokens), self.status, masses)


_DIED = (
    "vLLM's EngineCore has died, or one of its workers. Their messages above say why; if there are none, it was "
    "killed, often for lack of memory. Start the engine again and give it the unfinished requests."
)


def check_temperature(temperature: float) -> None:
    """vLLM would raise a lower temperature to its own lowest one, with only a warning."""
    if temperature != 0 and not _LOWEST <= temperature <= _HIGHEST:
        raise ValueError(
            f"sampling.temperature={temperature} is not one that vLLM samples at. Set it to 0 (greedy) or to a number "
            f"between {_LOWEST} and {_HIGHEST}, or sample with the in-process engine."
        )


def check_tokens(requests: Sequence[Request], vocabulary: int) -> None:
    """vLLM itself does not refuse a token that the model does not have: its worker fails, and EngineCore with it."""
    for index, request in enumerate(requests):
        least, most = min(request.context), max(request.context)
        if least < 0 or most >= vocabulary:
            raise ValueError(
                f"request {index} (seed {request.seed}) has the token {least if least < 0 else most} in its context, "
                f"but the model's vocabulary has {vocabulary} tokens. Use the model's own tokenizer."
            )


async def _cancelled() -> None:
    """Cancel all other tasks of this loop and wait for their end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _parameters(request: Request, sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=request.max_new_tokens,
        stop_token_ids=sorted(sampling.stop_ids),
        ignore_eos=True,  # only our own stop tokens end a response
        top_p=sampling.top_p if sampling.truncates else 1.0,
        top_k=sampling.top_k if sampling.truncates else 0,
        min_p=sampling.min_p if sampling.truncates else 0.0,
        logprobs=int(sampling.truncates),  # of the sampled token only, and log m in a place of its own
        seed=response_seed(request.seed, request.position, 0),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
