"""Follows what owners announce and keeps a `PrefixIndex` of it: snapshot, then batches, a snapshot again at any gap.

While Redis is away the index stays as it was; when it is back, with or without its memory, the index returns by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from tandem.kv.prefix_index import PrefixIndex
from tandem.prefix_store.announce_keys import ANNOUNCED, OwnerKeys, batch_of, names_in
from tandem.redis_access import connect_redis
from tandem.tasks import cancel_all

logger = logging.getLogger(__name__)

_BLOCK_S = 0.2
_POLL_S = 1.0
_LONGEST_BACKOFF_S = 2.0
_MAX_ENTRIES = 500


@dataclass(slots=True)
class _Followed:
    last_id: bytes = b"0-0"
    is_due: bool = True
    """A snapshot is."""
    seen: tuple[str, int] | None = None
    """Where the owner stood at the last poll, if the index was behind it then."""


class PrefixIndexFollower:
    """Event loop only. `index` may be read at any time between awaits."""

    def __init__(self, redis_url: str, *, cluster: str) -> None:
        self.index = PrefixIndex()
        self.num_snapshots = 0
        self._cluster = cluster
        self._redis = connect_redis(redis_url)
        self._followed: dict[str, _Followed] = {}
        self._polled_s = 0.0
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def follow(self, owners: Iterable[str]) -> None:
        """Follows these from now on, and no others."""
        wanted = set(owners)
        for owner in self._followed.keys() - wanted:
            self.index.drop(owner)
        self._followed = {owner: self._followed.get(owner) or _Followed() for owner in wanted}

    def start(self) -> None:
        """Follows from now on."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            await cancel_all([self._task])
        await self._redis.aclose()

    async def _run(self) -> None:
        backoff_s = _BLOCK_S
        while True:
            try:
                await self._turn()
                backoff_s = _BLOCK_S
                self._is_away = False
            except RedisError as exc:
                if not self._is_away:
                    logger.warning("announcements of blocks are not followed: %s", exc)
                self._is_away = True
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _turn(self) -> None:
        for owner, followed in list(self._followed.items()):
            if followed.is_due:
                followed.is_due = False
                try:
                    await self._snapshot(owner, followed)
                except ValueError as exc:
                    logger.warning("what %s announces cannot be read: %s", owner, exc)
                    self.index.drop(owner)
                except BaseException:
                    followed.is_due = True
                    raise
        if time.monotonic() - self._polled_s > _POLL_S:
            await self._poll()
            self._polled_s = time.monotonic()
        await self._read()

    def _keys(self, owner: str) -> OwnerKeys:
        return OwnerKeys(cluster=self._cluster, owner=owner)

    async def _snapshot(self, owner: str, followed: _Followed) -> None:
        keys = self._keys(owner)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(keys.meta, "epoch", "seq")
            pipe.xrevrange(keys.stream, count=1)
            for tier in ANNOUNCED:
                pipe.smembers(keys.tier(tier))
            (epoch, seq), newest, *sets = await pipe.execute()
        if self._followed.get(owner) is not followed:
            return
        if epoch is None:
            self.index.drop(owner)  # it says nothing now; the next poll looks again
        else:
            held = {str(tier): names_in(b"".join(names)) for tier, names in zip(ANNOUNCED, sets, strict=True)}
            self.index.reset(owner, epoch=epoch.decode(), seq=int(seq), tiers=held)
            self.num_snapshots += 1
        followed.last_id = newest[0][0] if newest else b"0-0"
        followed.seen = None

    async def _poll(self) -> None:
        """Finds what no batch tells: owners that are gone, began anew, or are ahead of us for good."""
        followed = list(self._followed.items())
        async with self._redis.pipeline(transaction=False) as pipe:
            for owner, _ in followed:
                pipe.hmget(self._keys(owner).meta, "epoch", "seq")
            answers = await pipe.execute()
        for (owner, state), (epoch, seq) in zip(followed, answers, strict=True):
            known = self.index.position(owner)
            stands = _standing(owner, epoch, seq)
            if stands is None:
                self.index.drop(owner)
            elif known is None or known[0] != stands[0] or (known[1] < stands[1] and state.seen == known):
                state.is_due = True
            state.seen = known

    async def _read(self) -> None:
        streams = {self._keys(owner).stream: owner for owner in self._followed if self.index.position(owner)}
        if not streams:
            await asyncio.sleep(_BLOCK_S)
            return
        places = {stream: self._followed[owner].last_id for stream, owner in streams.items()}
        block_ms = round(1000 * _BLOCK_S)
        answer: Any = await self._redis.xread(places, count=_MAX_ENTRIES, block=block_ms)  # type: ignore[arg-type]
        for stream, entries in answer or ():
            owner = streams[stream.decode()]
            if owner in self._followed:
                self._take(owner, entries)

    def _take(self, owner: str, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        followed = self._followed[owner]
        for entry_id, fields in entries:
            followed.last_id = entry_id
            try:
                follows = self.index.apply(owner, batch_of(fields))
            except ValueError as exc:
                logger.warning("passed over an announcement of %s: %s", owner, exc)
                follows = False
            if not follows:
                followed.is_due = True
                return


def _standing(owner: str, epoch: bytes | None, seq: bytes | None) -> tuple[str, int] | None:
    """(epoch, number of the last batch); None for an owner that says nothing, or nothing that can be read."""
    try:
        return None if epoch is None or seq is None else (epoch.decode(), int(seq))
    except ValueError as exc:
        logger.warning("what %s announces cannot be read: %s", owner, exc)
        return None
