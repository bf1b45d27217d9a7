"""Waiting for what others are still starting: Redis, the head. Says what it waits for, once for each reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from tandem.errors import ClusterError

T = TypeVar("T")

PATIENCE_S = 120.0
"""How long the parts of a cluster that start together wait for each other."""
_PAUSE_S = 1.0


async def patiently(
    attempt: Callable[[], Awaitable[T]], note: Callable[[str], None], *, patience_s: float = PATIENCE_S
) -> T:
    """The result of `attempt`, made again while it raises ClusterError; its last error when time is up."""
    give_up_s = asyncio.get_running_loop().time() + patience_s
    told = ""
    while True:
        try:
            return await _as_cluster_error(attempt)
        except ClusterError as exc:
            left_s = give_up_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise
            if exc.message != told:
                told = exc.message
                note(f"{told}; trying again for {left_s:.0f} s")
            await asyncio.sleep(min(_PAUSE_S, left_s))


async def _as_cluster_error(attempt: Callable[[], Awaitable[T]]) -> T:
    try:
        return await attempt()
    except RedisError as exc:
        raise ClusterError(f"Redis is away: {exc}") from exc
