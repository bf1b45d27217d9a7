"""Draining lets what runs finish and takes nothing new; a broken engine is reported once and holds no lock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tandem.errors import DeadlineExceeded, TandemError, WorkerUnavailable
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import Role
from tests.legs import Legs
from tests.pair import Pair, make_prompt, monolithic, running_pair, until
from tests.stepped_executor import SteppedExecutor

PROMPT = make_prompt(40)


async def stopped_in(pair: Pair, role: Role) -> tuple[SteppedExecutor, asyncio.Task[list[int]]]:
    """A request that stands in this worker's engine."""
    executor = pair.prefill_executor if role is Role.PREFILL else pair.decode_executor
    executor.stop()
    task = asyncio.create_task(pair.run(PROMPT, max_tokens=9))
    await until(executor.stopped.is_set)
    return executor, task


@pytest.mark.parametrize("role", list(Role))
def test_a_draining_worker_refuses_new_legs_and_finishes_the_running_ones(gqa: Path, role: Role) -> None:
    async def drain() -> list[int]:
        async with running_pair(gqa) as pair:
            executor, running = await stopped_in(pair, role)
            drained = asyncio.create_task(drain_of(pair, role, timeout_s=20.0))
            worker = pair.prefill if role is Role.PREFILL else pair.decode
            await until(lambda: worker.is_draining)
            with pytest.raises(WorkerUnavailable, match="draining"):
                await pair.run(make_prompt(11))
            assert not drained.done()
            executor.go()
            tokens = await running
            await drained
            assert await status_of(pair, role) == "draining"
            return tokens

    assert asyncio.run(drain()) == monolithic(gqa, PROMPT, max_tokens=9)


async def drain_of(pair: Pair, role: Role, *, timeout_s: float) -> None:
    await pair.control_stub(role).Drain(worker_pb2.DrainRequest(timeout_s=timeout_s))


async def status_of(pair: Pair, role: Role) -> str:
    status = await pair.control_stub(role).GetStatus(worker_pb2.GetStatusRequest())
    assert status.num_free_blocks == status.num_blocks
    assert (status.num_running, status.num_waiting, status.num_handoffs) == (0, 0, 0)
    return status.state


@pytest.mark.parametrize("role", list(Role))
def test_a_drain_that_takes_too_long_says_so_and_goes_on(gqa: Path, role: Role) -> None:
    async def drain() -> list[int]:
        async with running_pair(gqa) as pair:
            executor, running = await stopped_in(pair, role)
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await drain_of(pair, role, timeout_s=0.05)
            assert isinstance(from_rpc_error(late.value), DeadlineExceeded)
            executor.go()
            tokens = await running
            await drain_of(pair, role, timeout_s=20.0)
            return tokens

    assert asyncio.run(drain()) == monolithic(gqa, PROMPT, max_tokens=9)


def test_idle_workers_drain_at_once(gqa: Path) -> None:
    async def drain() -> None:
        async with running_pair(gqa) as pair:
            await asyncio.gather(*(drain_of(pair, role, timeout_s=5.0) for role in Role))

    asyncio.run(drain())


@pytest.mark.parametrize("role", list(Role))
def test_a_worker_that_is_closed_ends_its_requests_with_a_typed_error(gqa: Path, role: Role) -> None:
    async def close() -> None:
        async with running_pair(gqa) as pair:
            executor, running = await stopped_in(pair, role)
            worker = pair.prefill if role is Role.PREFILL else pair.decode
            closing = asyncio.create_task(worker.close())
            await asyncio.wait({running})
            executor.go()
            await closing
            with pytest.raises(WorkerUnavailable, match="stopping"):
                await running

    asyncio.run(close())


@pytest.mark.parametrize("role", list(Role))
def test_an_engine_that_fails_is_reported_once_and_leaves_its_lock_free(gqa: Path, role: Role) -> None:
    async def crash() -> None:
        async with running_pair(gqa) as pair:
            executor = pair.prefill_executor if role is Role.PREFILL else pair.decode_executor
            executor.failure = RuntimeError("no such kernel")
            legs = await Legs(pair, PROMPT).open()
            await until(lambda: bool(pair.crashes))
            worker = pair.prefill if role is Role.PREFILL else pair.decode
            await until(lambda: not worker._engine._thread.is_alive())
            assert pair.crashes == [executor.failure]
            assert worker._engine.lock.acquire(blocking=False)
            worker._engine.lock.release()
            legs.decode.close()
            legs.prefill.close()

    asyncio.run(crash())


def test_a_worker_of_which_the_engine_failed_can_still_be_closed(gqa: Path) -> None:
    async def crash() -> list[TandemError | None]:
        async with running_pair(gqa) as pair:
            pair.decode_executor.failure = RuntimeError("no such kernel")
            legs = await Legs(pair, PROMPT, max_tokens=9).open()
            await until(lambda: bool(pair.crashes))
            assert await legs.prefill.error() is None
            await pair.decode.close()
            return [await legs.decode.error()]

    assert [type(error) for error in asyncio.run(crash())] == [WorkerUnavailable]
