"""What a request does when nobody can take it: waits for the worker that is coming, or fails at once.

Over a real server for what workers and the controller say; only the legs are scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.embedded_redis import EmbeddedRedis
from router.dispatch import DispatchResult, Step
from router.dispatcher import Recovery, WorkerDispatcher
from router.lifecycle import Leg
from router.policy import Route
from router.retrying import RESTART_S, Means, RetryingDispatch
from tandem.errors import HandoffFailed, TandemError, WorkerUnavailable
from tandem.pool_state import PoolState, SeenState, SeenWorker
from tandem.registry import Registry, WorkerRecord
from tandem.types import Epoch, FinishReason, Request, Role, TokenStep
from tests.cached_router import absent_workers
from tests.factories import CLUSTER_KEY
from tests.pair import make_live_request, until

STEP = TokenStep(position=0, token_id=7, finish_reason=FinishReason.LENGTH)
PREFILL, DECODE = absent_workers()


class Attempt:
    """Gives one token, or fails on a leg."""

    def __init__(self, route: Route, error: TandemError | None, leg: Leg) -> None:
        self.route = route
        self.failed_leg: Leg | None = None
        self._error, self._leg = error, leg

    async def __aiter__(self) -> AsyncIterator[Step]:
        if self._error is not None:
            self.failed_leg = self._leg
            raise self._error
        yield STEP

    def stop(self, choice: int) -> None:
        raise AssertionError("nobody asks for it")

    async def finish(self) -> DispatchResult:
        raise AssertionError("nobody asks for it")

    async def abort(self) -> None:
        return None


@dataclass(kw_only=True)
class Scene:
    """A router's knowledge of the cluster, and what those say from whom it has it."""

    registry: Registry
    state: PoolState
    dispatcher: WorkerDispatcher
    opened: list[tuple[Request, Route]]
    failures: list[TandemError]
    """Of the first attempts, by the decode leg."""

    def means(self, *, patience_s: float) -> Means:
        return Means(tracker=self.dispatcher.tracker, open=self._open, patience_s=patience_s)

    def _open(self, request: Request, route: Route) -> Attempt:
        self.opened.append((request, route))
        return Attempt(route, self.failures.pop(0) if self.failures else None, "decode")

    def dispatch(self, *, patience_s: float = 20.0, timeout_s: float = 30.0) -> RetryingDispatch:
        request = make_live_request([1, 2, 3], timeout_s=timeout_s, max_tokens=2)
        return RetryingDispatch(request, self.means(patience_s=patience_s))

    async def says(self, decode: SeenState, *, is_known: Callable[[], bool]) -> None:
        """The controller: both workers, and how the decode worker does. Returns when the router knows."""
        seen = [SeenWorker(worker_id=DECODE.worker_id, role=Role.DECODE, state=decode)]
        await self.state.show([SeenWorker(worker_id=PREFILL.worker_id, role=Role.PREFILL, state="ready"), *seen])
        await until(is_known)

    async def registers(self, *records: WorkerRecord) -> None:
        for record in records:
            await self.registry.put(record)
        wanted = {(record.worker_id, record.epoch) for record in records}
        await until(lambda: wanted <= {w.incarnation for w in self.dispatcher.tracker.view().workers})

    async def loses_decode(self) -> None:
        await self.registry.remove(DECODE.worker_id)
        await until(lambda: not self.dispatcher.tracker.view().pairs())

    def is_coming(self) -> bool:
        return Role.DECODE in self.dispatcher.tracker.view().coming


def play(body: Callable[[Scene], Awaitable[None]], *, failures: Sequence[TandemError] = ()) -> None:
    async def run() -> None:
        redis = EmbeddedRedis()
        await redis.start()
        registry, state = Registry(redis.url, cluster="c", ttl_s=60), PoolState(redis.url, cluster="c")
        recovery = Recovery(state=state, patience_s=20.0)
        dispatcher = WorkerDispatcher(registry, key=CLUSTER_KEY, on_change=lambda: None, recovery=recovery)
        await dispatcher.start()
        scene = Scene(registry=registry, state=state, dispatcher=dispatcher, opened=[], failures=list(failures))
        try:
            async with asyncio.timeout(30):
                await body(scene)
        finally:
            await dispatcher.close()
            await state.close()
            await registry.close()
            redis.stop()

    asyncio.run(run())


async def steps(dispatch: RetryingDispatch) -> list[Any]:
    return [step async for step in dispatch]


def test_a_request_waits_for_the_only_worker_of_a_pool_that_is_started_again() -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL)
        await scene.says("lost", is_known=scene.is_coming)
        answer = asyncio.create_task(steps(scene.dispatch()))
        await asyncio.sleep(0)
        assert not scene.opened
        await scene.registers(replace(DECODE, epoch=Epoch(2)))
        assert await answer == [STEP]

    play(body)


def test_an_attempt_that_lost_the_only_worker_is_made_again_with_its_successor() -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL, DECODE)
        await scene.says("ready", is_known=lambda: True)
        dispatch = scene.dispatch()
        await scene.loses_decode()
        await until(scene.is_coming)
        answer = asyncio.create_task(steps(dispatch))
        await asyncio.sleep(0)
        await scene.registers(replace(DECODE, epoch=Epoch(2)))
        assert await answer == [STEP]
        routes = [None if to.decode is None else to.decode.epoch for _, to in scene.opened]
        assert routes == [DECODE.epoch, 2]
        assert scene.opened[0][0].request_id != scene.opened[1][0].request_id

    play(body, failures=[WorkerUnavailable("lost decode worker decode-0")])


def test_a_failed_handoff_shows_that_a_worker_has_died_and_its_successor_is_waited_for() -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL, DECODE)  # nobody answers at their addresses
        await scene.says("ready", is_known=lambda: True)
        await until(lambda: len(scene.dispatcher.tracker._seen) == 2)
        answer = asyncio.create_task(steps(scene.dispatch()))
        await until(lambda: not scene.dispatcher.tracker.view().workers)
        await scene.registers(replace(PREFILL, epoch=Epoch(2)), replace(DECODE, epoch=Epoch(2)))
        assert await answer == [STEP]

    play(body, failures=[HandoffFailed("the stream broke off")])


@pytest.mark.parametrize("state", ["failed", "draining"])
def test_nobody_waits_for_a_worker_that_will_not_serve(state: SeenState) -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL)
        await scene.says(state, is_known=lambda: len(scene.dispatcher.tracker._seen) == 2)
        with pytest.raises(WorkerUnavailable, match="no compatible pair"):
            scene.dispatch()

    play(body)


def test_patience_has_an_end_and_the_client_is_told_when_to_come_again() -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL)
        await scene.says("lost", is_known=scene.is_coming)
        with pytest.raises(WorkerUnavailable, match="not ready yet") as caught:
            await steps(scene.dispatch(patience_s=0.1))
        assert caught.value.retry_after_s == RESTART_S

    play(body)


def test_a_request_that_waits_ends_when_the_worker_turns_out_not_to_come() -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL)
        await scene.says("starting", is_known=scene.is_coming)
        answer = asyncio.create_task(steps(scene.dispatch()))
        await asyncio.sleep(0)
        await scene.says("failed", is_known=lambda: not scene.is_coming())
        with pytest.raises(WorkerUnavailable, match="no compatible pair"):
            await answer

    play(body)


def test_a_request_that_waits_can_be_given_up() -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL)
        await scene.says("lost", is_known=scene.is_coming)
        dispatch = scene.dispatch()
        answer = asyncio.create_task(steps(dispatch))
        await asyncio.sleep(0)
        answer.cancel()
        await dispatch.abort()
        await scene.registers(DECODE)
        assert answer.cancelled()
        assert not scene.opened

    play(body)


def test_the_model_is_still_known_while_its_only_worker_is_started_again() -> None:
    async def body(scene: Scene) -> None:
        await scene.registers(PREFILL, DECODE)
        await scene.says("ready", is_known=lambda: True)
        await until(lambda: len(scene.dispatcher.tracker._seen) == 2)
        await scene.loses_decode()
        served = scene.dispatcher.model()
        assert served is not None
        assert served.name == DECODE.model
        assert not scene.dispatcher.ready()
        await scene.says("failed", is_known=lambda: not scene.is_coming())
        assert scene.dispatcher.model() is None
        assert (await scene.dispatcher.status()).model == DECODE.model

    play(body)
