"""Waiting until the pools are as they were asked to be. Conditions look at a status and remember nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tandem.errors import ClusterError
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus, PoolStatus, WorkerStatus
from tandem.types import Role

if TYPE_CHECKING:
    from cluster.client import Client

Condition = Callable[[ClusterStatus], bool]
_PERIOD_S = 0.3


def _workers(status: ClusterStatus, role: Role) -> list[WorkerStatus]:
    return [worker for worker in status.workers if worker.role == role]


def _pool(status: ClusterStatus, role: Role) -> PoolStatus:
    return next((pool for pool in status.pools if pool.role == role), PoolStatus(role=str(role)))


def is_scaled(roles: Sequence[Role]) -> Condition:
    """Each of these pools has the workers that are wanted of it now, all ready, and no others."""

    def holds(status: ClusterStatus) -> bool:
        return all(_is_settled(status, role) for role in roles)

    return holds


def is_drained(worker_id: str, epoch: int, role: Role) -> Condition:
    """This incarnation of the worker is gone and the pool is complete again."""

    def holds(status: ClusterStatus) -> bool:
        is_there = any(worker.worker_id == worker_id and worker.epoch == epoch for worker in status.workers)
        return not is_there and _is_settled(status, role)

    return holds


def is_restarted(role: Role, generation: int) -> Condition:
    """No worker is older than `generation`, and the pool is complete."""

    def holds(status: ClusterStatus) -> bool:
        is_new = all(worker.generation >= generation for worker in _workers(status, role))
        return is_new and _is_settled(status, role)

    return holds


def _is_settled(status: ClusterStatus, role: Role) -> bool:
    pool, workers = _pool(status, role), _workers(status, role)
    return len(workers) == pool.num_ready == pool.desired


def describe(pool: PoolStatus) -> str:
    """One line for people."""
    leaving = f", {pool.num_draining} draining" if pool.num_draining else ""
    unplaced = f", {pool.num_unplaced} wait for a node with room" if pool.num_unplaced else ""
    return f"{pool.role}: {pool.num_ready} of {pool.desired} ready{leaving}{unplaced}"


async def wait_until(
    client: Client, condition: Condition, roles: Sequence[Role], *, timeout_s: float | None
) -> ClusterStatus:
    """Asks until the condition holds; None asks once. Each change is a line on stderr.

    Raises ClusterError when time is up. A router that does not answer for a moment is asked again.
    """
    status = await client.status()
    if timeout_s is None:
        return status
    shown = ""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition(status):
                line = "; ".join(describe(_pool(status, role)) for role in roles)
                if line != shown:
                    print(line, file=sys.stderr)
                    shown = line
                await asyncio.sleep(_PERIOD_S)
                status = await _again(client, status)
    except TimeoutError as exc:
        hint = "" if status.has_controller else "; no controller acts"
        raise ClusterError(f"not done within {timeout_s:g} s: {shown}{hint}") from exc
    return status


async def _again(client: Client, last: ClusterStatus) -> ClusterStatus:
    try:
        return await client.status()
    except ClusterError:
        return last
