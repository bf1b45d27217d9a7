"""Carries requests to workers: opens both legs, feeds the lifecycle, and closes what it must.

Owns tasks and calls; where a request goes is `policy.py`'s, what events mean is `lifecycle.py`'s, what follows a failed
attempt is `retrying.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc

from router.dispatch import Dispatch, DispatchResult, ServedModel, Step
from router.lifecycle import Action, Emit, Fail, Leg, OpenPrefill, RequestLifecycle, StopChoice
from router.policy import Route, num_decode_blocks
from router.prefix_hits import PrefixHits
from router.retrying import Means, RetryingDispatch
from router.tracker import WorkerTracker
from router.view import WorkerView
from tandem.errors import HandoffFailed, TandemError, WorkerUnavailable
from tandem.observability.metrics import RouterMetrics
from tandem.pool_state import PoolState
from tandem.registry import Registry
from tandem.rpc.convert import (
    decode_request_to_proto,
    decoded_token_from_proto,
    first_token_from_proto,
    logprobs_from_proto,
    prefill_request_to_proto,
)
from tandem.rpc.status import from_rpc_error, is_typed
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.secret import ClusterKey
from tandem.tasks import cancel_all
from tandem.types import HandoffId, PromptScores, Request, TokenLogprobs, TokenStep

logger = logging.getLogger(__name__)

LegBody = Callable[[WorkerView], Awaitable[None]]

STOP_TIMEOUT_S = 5.0
TIMINGS_TIMEOUT_S = 2.0
"""How long a request that is complete waits for its legs to say how long they took."""


class LegDispatch:
    """One attempt at a request, on one route: both legs until they end. Event loop only."""

    def __init__(self, request: Request, to: Route, tracker: WorkerTracker) -> None:
        self._request = request
        self._route = to
        self._tracker = tracker
        self._handoff_id = HandoffId(uuid.uuid4().hex)
        self._lifecycle = RequestLifecycle(has_decode=to.decode is not None, num_choices=request.num_choices)
        self._steps: asyncio.Queue[Step | Fail] = asyncio.Queue()
        self._prompt_scores: list[TokenLogprobs] | None = []
        """None once they were given."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._prefill_timings: common_pb2.PrefillTimings | None = None
        self._decode_timings: common_pb2.DecodeTimings | None = None
        self._discharge: dict[Leg, Callable[[], None]] = {}
        self.route = to
        self._closed = False
        self.on_over: Callable[[], None] = lambda: None
        self.failed_leg: Leg | None = None
        """Set before the iterator raises."""

    def start(self) -> None:
        """Charges both workers, so that the next request sees it, and opens the first leg."""
        self._charge(self._route)
        if self._route.decode is not None:
            self._spawn("decode", self._run_decode, self._route.decode)
        self._perform(self._lifecycle.start())

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Steps in order; raises TandemError."""
        while not (self._lifecycle.complete and self._steps.empty()):
            step = await self._steps.get()
            if isinstance(step, Fail):
                self.failed_leg = step.leg
                raise step.error
            yield step

    def stop(self, choice: int) -> None:
        """No more of this choice is wanted."""
        self._perform(self._lifecycle.stop(choice))

    async def finish(self) -> DispatchResult:
        """Waits briefly for the timings of a complete request, stops a request that is not, and reports."""
        if self._lifecycle.complete and self._tasks:
            await asyncio.wait(self._tasks, timeout=TIMINGS_TIMEOUT_S)
        await self.abort()
        decode = self._route.decode
        return DispatchResult(
            prefill_worker=self._route.prefill.worker_id,
            decode_worker=None if decode is None else decode.worker_id,
            prefill=self._prefill_timings,
            decode=self._decode_timings,
        )

    async def abort(self) -> None:
        """Stops both legs. Idempotent."""
        self._closed = True
        await cancel_all(self._tasks | self._stopping)

    def _charge(self, to: Route) -> None:
        num_tokens = len(self._request.prompt_token_ids) - to.num_cached_tokens
        self._tracker.metrics.predicted_tokens.inc(to.num_cached_tokens)
        self._discharge["prefill"] = self._tracker.charge(
            to.prefill.worker_id, num_tokens=num_tokens, num_cached_tokens=to.num_cached_tokens
        )
        if to.decode is not None:
            num_blocks = num_decode_blocks(self._request, to.decode.block_size, num_held=to.num_held_blocks)
            self._discharge["decode"] = self._tracker.charge(
                to.decode.worker_id, num_blocks=num_blocks, num_held_blocks=to.num_held_blocks
            )

    # --- legs

    def _spawn(self, leg: Leg, body: LegBody, worker: WorkerView) -> None:
        task = asyncio.create_task(self._run_leg(leg, body, worker))
        self._tasks.add(task)
        task.add_done_callback(self._leg_over)

    def _leg_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            for discharge in self._discharge.values():
                discharge()
            self.on_over()

    async def _run_leg(self, leg: Leg, body: LegBody, worker: WorkerView) -> None:
        try:
            await body(worker)
        except grpc.aio.AioRpcError as exc:
            error = from_rpc_error(exc)
            if exc.code() is grpc.StatusCode.UNAVAILABLE and not is_typed(exc):
                self._tracker.suspect(worker.worker_id, worker.epoch)
                error = WorkerUnavailable(f"lost {leg} worker {worker.worker_id}: {error.message}", retry_after_s=1.0)
            self._perform(self._lifecycle.leg_failed(leg, error))
        except TandemError as error:
            self._perform(self._lifecycle.leg_failed(leg, error))
        else:
            self._perform(self._lifecycle.leg_done(leg))
        finally:
            self._discharge[leg]()

    async def _run_decode(self, worker: WorkerView) -> None:
        stub = worker_pb2_grpc.DecodeWorkerStub(self._tracker.channels.get(worker.address))
        message = decode_request_to_proto(self._request, now=time.monotonic(), handoff_id=self._handoff_id)
        async for event in stub.Decode(message):
            kind = event.WhichOneof("event")
            if kind == "accepted":
                self._perform(self._lifecycle.accepted())
            elif kind == "token":
                self._on_token(decoded_token_from_proto(event.token))
            elif kind == "done":
                self._decode_timings = event.done.timings

    async def _run_prefill(self, worker: WorkerView) -> None:
        stub = worker_pb2_grpc.PrefillWorkerStub(self._tracker.channels.get(worker.address))
        message = prefill_request_to_proto(self._request, now=time.monotonic(), handoff=self._target())
        async for event in stub.Prefill(message):
            kind = event.WhichOneof("event")
            if kind == "first_token":
                self._give_scores()
                self._on_token(first_token_from_proto(event.first_token))
            elif kind == "prompt_logprobs" and self._prompt_scores is not None:
                self._prompt_scores += map(logprobs_from_proto, event.prompt_logprobs.tokens)
            elif kind == "done":
                self._prefill_timings = event.done.timings

    def _on_token(self, step: TokenStep) -> None:
        if step.choice >= self._request.num_choices:
            raise HandoffFailed(f"a worker sent a token of choice {step.choice}, which was not asked for")
        self._perform(self._lifecycle.token(step))

    def _give_scores(self) -> None:
        """Whole and once, before the first token: an attempt that fails earlier has given nothing."""
        if self._request.sampling.num_prompt_logprobs is not None and self._prompt_scores is not None:
            self._steps.put_nowait(PromptScores(logprobs=tuple(self._prompt_scores)))
            self._prompt_scores = None

    def _target(self) -> worker_pb2.HandoffTarget | None:
        decode = self._route.decode
        if decode is None:
            return None
        return worker_pb2.HandoffTarget(
            handoff_id=self._handoff_id,
            decode_worker_id=decode.worker_id,
            decode_address=decode.address,
            decode_epoch=decode.epoch,
        )

    # --- actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Emit(step=step):
                    self._steps.put_nowait(step)
                case OpenPrefill() if not self._closed:
                    self._spawn("prefill", self._run_prefill, self._route.prefill)
                case StopChoice(choice=choice) if not self._closed:
                    self._stop_choice(choice)
                case Fail():
                    self._steps.put_nowait(action)
                    for task in self._tasks:
                        if task is not asyncio.current_task():
                            task.cancel()

    def _stop_choice(self, choice: int) -> None:
        """Tells the decode worker; when it cannot be told, its leg says so."""
        decode = self._route.decode
        assert decode is not None
        stub = worker_pb2_grpc.WorkerStub(self._tracker.channels.get(decode.address))
        message = worker_pb2.AbortRequest(request_id=self._request.request_id, choice=choice)
        task = asyncio.create_task(_ignore_lost(stub.Abort(message, timeout=STOP_TIMEOUT_S)))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


async def _ignore_lost(call: Awaitable[worker_pb2.AbortResponse]) -> None:
    try:
        await call
    except grpc.aio.AioRpcError as exc:
        logger.info("a decode worker could not be told to stop a choice: %s", exc.details())


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How a router learns of workers that are being started, and how long a request without output waits for one."""

    state: PoolState
    patience_s: float


class WorkerDispatcher:
    """A `Dispatcher` over the workers of the registry."""

    def __init__(
        self,
        registry: Registry,
        *,
        key: ClusterKey,
        on_change: Callable[[], None],
        metrics: RouterMetrics | None = None,
        hits: PrefixHits | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """Without `hits` prompts are not named: nothing of them is found or kept. Without `recovery` none waits."""
        state = None if recovery is None else recovery.state
        self.tracker = WorkerTracker(registry, key=key, on_change=self._changed, metrics=metrics, state=state)
        self._on_change = on_change
        self._hits = hits
        patience_s = 0.0 if recovery is None else recovery.patience_s
        self._means = Means(tracker=self.tracker, open=self._open, hits=hits, patience_s=patience_s)
        self._running: set[LegDispatch] = set()
        self._served: ServedModel | None = None
        """What was served last."""

    def _changed(self) -> None:
        self.model()
        if self._hits is not None:
            self._hits.follow(self.tracker.view().workers)
        self._on_change()

    async def start(self) -> None:
        """Starts to follow the registry."""
        await self.tracker.start()

    async def close(self) -> None:
        """Stops all requests and closes all channels."""
        await asyncio.gather(*(attempt.abort() for attempt in list(self._running)))
        await self.tracker.close()

    def dispatch(self, request: Request) -> Dispatch:
        """Routes and starts a request. Raises WorkerUnavailable when nobody can take it, and nobody is coming."""
        return RetryingDispatch(request, self._means)

    def _open(self, request: Request, to: Route) -> LegDispatch:
        attempt = LegDispatch(request, to, self.tracker)
        self._running.add(attempt)
        attempt.on_over = lambda: self._running.discard(attempt)
        attempt.start()
        return attempt

    def model(self) -> ServedModel | None:
        """The model of the ready pairs, or of those that were and will be again; None without one."""
        view = self.tracker.view()
        pairs = view.pairs()
        if not pairs:
            return self._served if view.may_recover() and self._means.patience_s > 0 else None
        self._served = ServedModel(
            name=pairs[0][0].model,
            max_context_tokens=min(min(p.max_context_tokens, d.max_context_tokens) for p, d in pairs),
            block_size=pairs[0][0].block_size,
            model_context_tokens=pairs[0][0].model_context_tokens,
            decode_blocks=min(d.num_blocks for _, d in pairs),
        )
        return self._served

    def ready(self) -> bool:
        """Whether some compatible pair takes requests."""
        return bool(self.tracker.view().pairs())

    async def status(self) -> inference_pb2.ClusterStatus:
        """What each worker says of itself now."""
        served = self.model() or self._served
        return inference_pb2.ClusterStatus(
            workers=await self.tracker.statuses(),
            num_running_requests=len(self._running),
            model="" if served is None else served.name,
        )
