"""Takes the workers off one node, whoever runs its Ray: `tandem drain-node`, before a pod is stopped.

The node is first closed in Ray, so that nothing new lands there; then the controller is asked to drain each of its
workers, until none is registered. Nothing is ended here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from cluster.head_record import adopt_token
from cluster.raylet import Raylet, find_raylet
from cluster.registered import workers_at
from tandem.config import ClusterConfig
from tandem.errors import ClusterError
from tandem.pool_state import PoolState
from tandem.registry import Registry
from tandem.types import WorkerId

logger = logging.getLogger(__name__)

LONGEST_DRAIN_S = 24 * 3600
"""Ray ends a drained node itself after this; it ends much sooner, when its workers have left."""
_DRAIN_CALL_S = 5.0
_POLL_S = 0.5


async def drain_node(
    config: ClusterConfig, *, node_ip: str, timeout_s: float, note: Callable[[str], None]
) -> list[WorkerId]:
    """Returns the workers that left, once none is registered there. Raises ClusterError with those that still are."""
    url, cluster = config.registry.redis_url, config.cluster
    registry, state = Registry(url, cluster=cluster, ttl_s=config.registry.ttl_s), PoolState(url, cluster=cluster)
    try:
        await workers_at(registry, node_ip)  # without Redis none can leave, and a head that went with it is waited for
        await adopt_token(url, cluster=cluster)
        await asyncio.to_thread(_close, node_ip, note)
        return await _move(registry, state, node_ip=node_ip, timeout_s=timeout_s)
    except RedisError as exc:
        raise ClusterError(f"the workers at {node_ip} cannot be drained, Redis is away: {exc}") from exc
    finally:
        await asyncio.gather(registry.close(), state.close())


async def _move(registry: Registry, state: PoolState, *, node_ip: str, timeout_s: float) -> list[WorkerId]:
    """Looks at the clock itself: a call to Redis that is cancelled at its very end may not tell anybody."""
    asked: list[WorkerId] = []
    ends_s = time.monotonic() + timeout_s
    while left := [record.worker_id for record in await workers_at(registry, node_ip)]:
        for worker_id in left:
            if worker_id not in asked:
                await state.ask_drain(worker_id)
                asked.append(worker_id)
        remaining_s = ends_s - time.monotonic()
        if remaining_s <= 0.0:
            raise ClusterError(f"still at {node_ip} after {timeout_s:g} s: {', '.join(left)}")
        await asyncio.sleep(min(_POLL_S, remaining_s))
    return asked


def _close(node_ip: str, note: Callable[[str], None]) -> None:
    """Without it the drain works too, but Ray may start a successor on the same node."""
    raylet = find_raylet(node_ip)
    if raylet is None:
        note(f"no Ray node runs here at {node_ip}: it is not closed to new workers")
    elif not close_node(raylet):
        note(f"Ray's head at {raylet.gcs_address} did not close the node at {node_ip} to new workers")


def close_node(raylet: Raylet) -> bool:
    """Asks Ray to place nothing there any more; whether it agreed. What runs goes on."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stubs leave it out
    from ray.exceptions import RpcError

    try:
        client = GcsClient(address=raylet.gcs_address)
    except (RpcError, RuntimeError) as exc:
        logger.warning("Ray's head is not reached: %s", exc)
        return False
    return ask_to_drain(client, raylet.node_id)


def ask_to_drain(client: object, node_id: str) -> bool:
    """The same with a client of Ray's GCS. False too when it did not answer in time."""
    from ray.core.generated import autoscaler_pb2
    from ray.exceptions import RpcError

    deadline_ms = int((time.time() + LONGEST_DRAIN_S) * 1000)
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    try:
        accepted, _ = client.drain_node(  # type: ignore[attr-defined]
            node_id, reason, "the node leaves", deadline_ms, timeout=_DRAIN_CALL_S
        )
    except (RpcError, RuntimeError) as exc:
        logger.warning("Ray's head did not take the node out: %s", exc)
        return False
    return bool(accepted)
