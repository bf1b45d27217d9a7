"""Tells the cluster through Redis which blocks an owner has, in batches and with a snapshot whenever that is due.

Redis is a cache of what owners say: when it was away, lost its memory, or did not take a batch for certain, the owner
writes all it has anew under a new epoch of announcement. So losing Redis loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from tandem.prefix_store.announce_keys import ANNOUNCED, APPLY, RENEW, OwnerKeys
from tandem.redis_access import connect_redis
from tandem.tasks import cancel_all
from tandem.types import BlockHash, Epoch

logger = logging.getLogger(__name__)

_BATCH_NAMES = 4096
_SNAPSHOT_NAMES = 1000
_STREAM_ENTRIES = 10_000
_LONGEST_BACKOFF_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnouncerSettings:
    """`period_s`: how long changes gather before they are told; `ttl_s`: how long they stand without a renewal."""

    redis_url: str
    cluster: str
    ttl_s: float = 5.0
    period_s: float = 0.05


class Announcer:
    """One owner's voice. `changed` may be called from any thread, the rest on the event loop."""

    def __init__(self, settings: AnnouncerSettings, *, owner: str, epoch: Epoch) -> None:
        self.num_snapshots = 0
        self._settings = settings
        self._keys = OwnerKeys(cluster=settings.cluster, owner=owner)
        self._owner = owner
        self._owner_epoch = epoch
        self._redis = connect_redis(settings.redis_url)
        self._lock = threading.Lock()
        self._held: dict[str, set[BlockHash]] = {tier: set() for tier in ANNOUNCED}
        self._pending: dict[str, dict[BlockHash, bool]] = {tier: {} for tier in ANNOUNCED}
        self._seq = 0
        self._epoch = ""
        self._renewed_s = 0.0
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def changed(self, tier: str, added: Iterable[BlockHash], removed: Iterable[BlockHash]) -> None:
        """These came to a tier, those went. Any thread; returns at once."""
        with self._lock:
            held, pending = self._held[tier], self._pending[tier]
            for name in added:
                held.add(name)
                pending[name] = True
            for name in removed:
                held.discard(name)
                pending[name] = False

    def start(self) -> None:
        """Tells from now on."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Takes all that was told back, if Redis is there. Idempotent."""
        if self._task is not None:
            await cancel_all([self._task])
            self._task = None
            try:
                await self._redis.delete(*self._all_keys())
            except RedisError as exc:
                logger.info("announcements of %s not withdrawn, Redis is away: %s", self._owner, exc)
        await self._redis.aclose()

    def _all_keys(self) -> list[str]:
        return [self._keys.meta, self._keys.stream, *(self._keys.tier(tier) for tier in self._held)]

    async def _run(self) -> None:
        backoff_s = self._settings.period_s
        while True:
            try:
                await self._turn()
                backoff_s = self._settings.period_s
                self._note_away("")
            except RedisError as exc:
                self._epoch = ""  # what was sent may have been taken or not
                self._note_away(str(exc) or type(exc).__name__)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _turn(self) -> None:
        if not self._epoch:
            await self._snapshot()
        for tier, changes in self._take_pending().items():
            for start in range(0, len(changes), _BATCH_NAMES):
                if not await self._apply(tier, changes[start : start + _BATCH_NAMES]):
                    self._epoch = ""
                    return
        if time.monotonic() - self._renewed_s > self._settings.ttl_s / 4 and not await self._renew():
            self._epoch = ""

    def _take_pending(self) -> dict[str, list[tuple[BlockHash, bool]]]:
        with self._lock:
            taken = {tier: list(pending.items()) for tier, pending in self._pending.items() if pending}
            for tier in taken:
                self._pending[tier] = {}
        return taken

    async def _apply(self, tier: str, changes: Sequence[tuple[BlockHash, bool]]) -> bool:
        keys = [self._keys.meta, self._keys.stream, self._keys.tier(tier)]
        names = (b"".join(name for name, is_there in changes if is_there == kind) for kind in (True, False))
        ttl_ms = round(self._settings.ttl_s * 1000)
        words: list[str | int | bytes] = [self._epoch, self._seq + 1, tier, ttl_ms, _STREAM_ENTRIES, *names]
        taken = await self._redis.eval(APPLY, len(keys), *keys, *words)
        self._seq += int(taken)
        return bool(taken)

    async def _renew(self) -> bool:
        keys = self._all_keys()
        ttl_ms = round(self._settings.ttl_s * 1000)
        self._renewed_s = time.monotonic()
        return bool(await self._redis.eval(RENEW, len(keys), *keys, self._epoch, ttl_ms))

    async def _snapshot(self) -> None:
        with self._lock:
            held = {tier: list(names) for tier, names in self._held.items()}
            self._pending = {tier: {} for tier in held}
        self.num_snapshots += 1
        epoch = f"{self._owner_epoch}.{self.num_snapshots}"
        ttl_ms = round(self._settings.ttl_s * 1000)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(*self._all_keys())
            for tier, names in held.items():
                for start in range(0, len(names), _SNAPSHOT_NAMES):
                    pipe.sadd(self._keys.tier(tier), *names[start : start + _SNAPSHOT_NAMES])
            pipe.hset(self._keys.meta, mapping={"epoch": epoch, "seq": 0})
            for key in self._all_keys():
                pipe.pexpire(key, ttl_ms)
            await pipe.execute()
        self._epoch, self._seq, self._renewed_s = epoch, 0, time.monotonic()

    def _note_away(self, why: str) -> None:
        if bool(why) != self._is_away:
            self._is_away = bool(why)
            logger.warning("blocks of %s are not announced: %s", self._owner, why) if why else logger.info(
                "blocks of %s are announced again", self._owner
            )
