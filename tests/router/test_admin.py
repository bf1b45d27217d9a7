"""What operators ask through the router, against a real server for the desired state."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from cluster.embedded_redis import EmbeddedRedis
from router.admin import PoolAdmin
from router.dispatcher import Recovery, WorkerDispatcher
from tandem.errors import InvalidRequest, RequestNotFound, WorkerUnavailable
from tandem.pool_state import PoolState, SeenState, SeenWorker
from tandem.registry import Registry, WorkerRecord
from tandem.types import Epoch, Role, WorkerId
from tests.factories import CLUSTER_KEY

T = TypeVar("T")

RECORD = WorkerRecord(
    worker_id=WorkerId("decode-0"),
    role=Role.DECODE,
    address="127.0.0.1:1",
    epoch=Epoch(1),
    fingerprint="f",
    model="m",
    max_context_tokens=64,
    num_blocks=4,
    block_size=16,
    transport="shm",
    pid=1,
)


def with_admin(body: Callable[[PoolAdmin, PoolState, EmbeddedRedis], Awaitable[T]]) -> T:
    """Runs `body` over a real server in which decode-0 is registered."""

    async def run() -> T:
        redis = EmbeddedRedis()
        await redis.start()
        registry = Registry(redis.url, cluster="c", ttl_s=60)
        await registry.put(RECORD)
        state = PoolState(redis.url, cluster="c")
        known = asyncio.Event()
        recovery = Recovery(state=state, patience_s=0.0)
        dispatcher = WorkerDispatcher(registry, key=CLUSTER_KEY, on_change=known.set, recovery=recovery)
        await dispatcher.start()
        try:
            await known.wait()
            return await body(PoolAdmin(state, dispatcher), state, redis)
        finally:
            await dispatcher.close()
            await state.close()
            await registry.close()
            redis.stop()

    return asyncio.run(run())


def test_sizes_are_written_as_desired_state_and_a_pool_left_out_stays() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        await admin.set_sizes({Role.PREFILL: 3, Role.DECODE: 2})
        sizes = await admin.set_sizes({Role.DECODE: 0})
        assert (sizes.prefill, sizes.decode) == (3, 0)
        desired = await state.get()
        assert desired.prefill is not None
        assert desired.prefill.size == 3

    with_admin(body)


@pytest.mark.parametrize("sizes", [{}, {Role.PREFILL: -1}, {Role.DECODE: 5000}])
def test_impossible_sizes_are_refused(sizes: dict[Role, int]) -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        with pytest.raises(InvalidRequest):
            await admin.set_sizes(sizes)

    with_admin(body)


def test_only_a_registered_worker_can_be_drained() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        await admin.drain(WorkerId("decode-0"))
        assert (await state.get()).drain == {"decode-0"}
        with pytest.raises(RequestNotFound, match="decode-0"):
            await admin.drain(WorkerId("decode-7"))

    with_admin(body)


def test_each_restart_is_a_new_generation() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        assert [await admin.restart("prefill"), await admin.restart("prefill")] == [1, 2]
        with pytest.raises(InvalidRequest, match="prefill or decode"):
            await admin.restart("both")

    with_admin(body)


def test_the_status_has_the_pools_and_whether_somebody_controls_them() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        await admin.set_sizes({Role.DECODE: 2})
        assert not (await admin.status()).has_controller
        assert await state.hold_lease("me", ttl_s=60)
        status = await admin.status()
        assert status.has_controller
        assert [(p.role, p.desired, p.num_ready) for p in status.pools] == [("prefill", 0, 0), ("decode", 2, 0)]

    with_admin(body)


def test_workers_that_start_or_are_lost_are_in_the_status() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        seen: dict[str, SeenState] = {"decode-0": "ready", "decode-1": "lost", "decode-2": "starting"}
        seen["decode-3"] = "draining"
        await state.show([SeenWorker(worker_id=WorkerId(w), role=Role.DECODE, state=s) for w, s in seen.items()])
        while len((await admin.status()).workers) < 3:  # noqa: ASYNC110  the router polls
            await asyncio.sleep(0.02)
        states = {worker.worker_id: worker.state for worker in (await admin.status()).workers}
        assert states == {"decode-0": "unreachable", "decode-1": "lost", "decode-2": "starting"}

    with_admin(body)


def test_a_worker_that_no_node_has_room_for_waits_and_the_status_says_for_what() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        why = "too few free GPUs on the nodes"
        await state.set_size(Role.DECODE, 2)
        waiting = SeenWorker(worker_id=WorkerId("decode-1"), role=Role.DECODE, state="starting", waits_for=why)
        await state.show([waiting])
        while len((await admin.status()).workers) < 2:  # noqa: ASYNC110  the router polls
            await asyncio.sleep(0.02)
        status = await admin.status()
        [worker] = [worker for worker in status.workers if worker.waits_for]
        assert (worker.worker_id, worker.state, worker.waits_for) == ("decode-1", "waiting", why)
        assert {pool.role: pool.num_unplaced for pool in status.pools} == {"prefill": 0, "decode": 1}

    with_admin(body)


def test_a_worker_that_is_slow_to_answer_and_renews_its_registration_is_ready() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
            record = replace(RECORD, address=f"127.0.0.1:{silent.getsockname()[1]}", epoch=Epoch(2))
            registry = Registry(redis.url, cluster="c", ttl_s=60)
            await registry.put(record)
            await registry.close()
            while not (await admin.status()).workers[0].is_late:  # noqa: ASYNC110  the router polls
                await asyncio.sleep(0.02)
            status = await admin.status()
        assert [(w.state, w.num_blocks) for w in status.workers] == [("ready", RECORD.num_blocks)]
        assert {pool.role: pool.num_ready for pool in status.pools} == {"prefill": 0, "decode": 1}

    with_admin(body)


def test_without_redis_sizes_cannot_be_changed_and_the_status_still_answers() -> None:
    async def body(admin: PoolAdmin, state: PoolState, redis: EmbeddedRedis) -> None:
        redis.stop()
        with pytest.raises(WorkerUnavailable, match="Redis"):
            await admin.set_sizes({Role.DECODE: 2})
        assert [worker.worker_id for worker in (await admin.status()).workers] == ["decode-0"]

    with_admin(body)
