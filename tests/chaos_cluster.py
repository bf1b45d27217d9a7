"""The cluster of the chaos test: its configuration, its router's dispatcher, and what stands for its controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router.dispatcher import Recovery, WorkerDispatcher
from router.prefix_hits import PrefixHits
from tandem.config import TransportName, from_mapping, to_mapping
from tandem.pool_state import PoolState, SeenWorker
from tandem.prefix_store.follow import PrefixIndexFollower
from tandem.registry import Registry
from tandem.types import Role, WorkerId
from tests.factories import CLUSTER_KEY
from tests.hash_executor import BLOCK_SIZE, SPEC
from tests.pair import until

LEASE_S = 1.0
SETTLE_S = 60.0
POOL_SIZE = 2
_CLUSTER = "chaos"
_TTL_S = 1.0


def names(role: Role) -> list[WorkerId]:
    """The workers of a pool."""
    return [WorkerId(f"{role}-{number}") for number in range(POOL_SIZE)]


def settings_of(worker_id: WorkerId, *, transport: TransportName, redis_url: str, seed: int) -> dict[str, Any]:
    """Of one worker: blocks are few, so that requests wait for some and make room for one another."""
    config = from_mapping(
        {
            "cluster": _CLUSTER,
            "model": {"source": SPEC.name, "block_size": BLOCK_SIZE, "max_context_tokens": SPEC.max_context_tokens},
            "prefill": {"num_blocks": 64, "max_batch_tokens": 64},
            "decode": {"num_blocks": 64, "swap_blocks": 32},
            "transfer": {"transport": transport, "lease_s": LEASE_S, "layers_per_message": 2},
            "registry": {"heartbeat_s": 0.2, "ttl_s": _TTL_S},
        }
    )
    own = {"worker_id": worker_id, "redis_url": redis_url, "host": "127.0.0.1", "cores": ()}
    return {"config": to_mapping(config), "seed": seed, **own}


@asynccontextmanager
async def running_dispatcher(redis_url: str) -> AsyncIterator[WorkerDispatcher]:
    """A router's, with all that it follows; the controller's word that workers which died are started again is ours."""
    registry, state = Registry(redis_url, cluster=_CLUSTER, ttl_s=_TTL_S), PoolState(redis_url, cluster=_CLUSTER)
    follower = PrefixIndexFollower(redis_url, cluster=_CLUSTER)
    dispatcher = WorkerDispatcher(
        registry,
        key=CLUSTER_KEY,
        on_change=lambda: None,
        hits=PrefixHits(follower),
        recovery=Recovery(state=state, patience_s=SETTLE_S),
    )
    follower.start()
    await dispatcher.start()
    controller = asyncio.create_task(_say_who_is_there(state))
    try:
        await until(lambda: len(dispatcher.tracker.view().workers) == 2 * POOL_SIZE)
        yield dispatcher
    finally:
        controller.cancel()
        await dispatcher.close()
        await follower.close()
        await state.close()
        await registry.close()


async def _say_who_is_there(state: PoolState) -> None:
    while True:
        await state.show(
            [SeenWorker(worker_id=name, role=role, state="ready") for role in Role for name in names(role)]
        )
        await asyncio.sleep(5.0)


async def all_is_free(dispatcher: WorkerDispatcher) -> None:
    """Every worker answers and holds nothing."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        statuses = [s for s in await dispatcher.tracker.statuses() if s.state == "ready" and not s.is_late]
        busy = [s for s in statuses if s.num_free_blocks != s.num_blocks or s.num_handoffs or s.num_running]
        if len(statuses) == 2 * POOL_SIZE and not busy:
            return
        assert asyncio.get_running_loop().time() < deadline, statuses
        await asyncio.sleep(0.05)
