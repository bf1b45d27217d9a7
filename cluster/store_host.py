"""One node's prefix store, put together: memory, tiers, transport, services, announcements and its record in Redis.

Owns the order of bring-up and tear-down. Runs in the caller's event loop; `store_process.py` gives it a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import torch
from redis.exceptions import RedisError

from cluster.store_settings import StoreHostSettings
from kv_transfer.block_fetch import PeerTier, StoreIdentity
from kv_transfer.block_serve import PEER_SERVICE, PeerServicer
from kv_transfer.links import LinkTable
from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from tandem.kv.eviction import Lrfu
from tandem.kv.tiering import Tier
from tandem.observability.server import MetricsServer, serve_metrics
from tandem.observability.store_metrics import StoreMetrics
from tandem.prefix_store.announce import Announcer, AnnouncerSettings
from tandem.prefix_store.disk import DiskTier
from tandem.prefix_store.follow import PrefixIndexFollower
from tandem.prefix_store.host import HostTier
from tandem.prefix_store.parts import StoreParts
from tandem.prefix_store.registry import StoreRecord, StoreRegistry, owner_of
from tandem.prefix_store.service import SERVICE, PrefixStoreServicer
from tandem.prefix_store.slab import Slab
from tandem.prefix_store.store import NodeStore
from tandem.registry import Registry
from tandem.rpc.authentication import CallGuard
from tandem.rpc.channels import Channels
from tandem.rpc.server import RpcServer, start_server
from tandem.rpc.tandem.v1 import store_pb2_grpc
from tandem.secret import ClusterKey
from tandem.tasks import cancel_all
from tandem.types import BlockHash, Epoch, WorkerId

logger = logging.getLogger(__name__)

_THREADS = 2


class StoreHost:
    """`start`, then `stop`; both on one event loop."""

    def __init__(self, settings: StoreHostSettings, key: ClusterKey) -> None:
        self.settings = settings
        self.record: StoreRecord
        self.store: NodeStore
        self.remote: PeerTier
        self.service: PrefixStoreServicer
        self._key = key
        self._owner = owner_of(settings.node)
        self._ends = AsyncExitStack()
        self._registry = StoreRegistry(
            settings.redis_url, cluster=settings.config.cluster, ttl_s=settings.config.registry.ttl_s
        )

    async def start(self) -> StoreRecord:
        """Serves and is registered when it returns. Raises TandemError, or RedisError when Redis is not there."""
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Deregisters, refuses new calls, waits for writes to disk, frees everything. Idempotent."""
        await self._ends.aclose()
        await self._registry.close()

    async def _start(self) -> StoreRecord:
        settings = self.settings
        epoch = await self._next_epoch()
        metrics = StoreMetrics()
        announcer = self._announcer(epoch)
        slab = Slab(num_slots=settings.store.num_slots, block_bytes=settings.store.block_bytes)
        self._ends.callback(slab.close)
        transport = make_transport(
            settings.config.transfer.transport, worker_id=WorkerId(self._owner), host=settings.host
        )
        self._ends.push_async_callback(asyncio.to_thread, transport.close)
        transport.lend(slab.fd, torch.from_numpy(slab.everything))
        remote = self._make_remote(epoch, transport)
        parts = StoreParts(
            settings=settings.store,
            host=HostTier(
                slab,
                policy=Lrfu(),
                quotas=settings.tenant_quotas,
                tenant_share=settings.tenant_share,
                on_change=lambda added, removed: announcer.changed(Tier.HOST, added, removed),
            ),
            disk=await self._disk(announcer),
            remote=remote,
            pool=self._ends.enter_context(ThreadPoolExecutor(_THREADS, thread_name_prefix="store")),
            metrics=metrics,
        )
        self.store = NodeStore(parts)
        self._ends.push_async_callback(self.store.close)
        server = await self._serve(slab.fd, epoch, transport=transport)
        scraped = await serve_metrics(metrics.registry, settings.host)
        self._ends.push_async_callback(scraped.stop)
        announcer.start()
        return await self._register(epoch, transport, server=server, metrics=scraped)

    async def _next_epoch(self) -> Epoch:
        config = self.settings.config
        registry = Registry(self.settings.redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
        try:
            return await registry.next_epoch()
        finally:
            await registry.close()

    def _announcer(self, epoch: Epoch) -> Announcer:
        config = self.settings.config
        settings = AnnouncerSettings(
            redis_url=self.settings.redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s
        )
        announcer = Announcer(settings, owner=self._owner, epoch=epoch)
        self._ends.push_async_callback(announcer.close)
        return announcer

    async def _disk(self, announcer: Announcer) -> DiskTier | None:
        settings = self.settings
        if not settings.disk_directory:
            return None

        def changed(added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
            announcer.changed(Tier.DISK, added, removed)

        def opened() -> DiskTier:
            return DiskTier(
                settings.disk_directory,
                block_bytes=settings.store.block_bytes,
                capacity_bytes=settings.disk_bytes,
                identity=settings.store.fingerprint,
                quotas=settings.tenant_quotas,
                tenant_share=settings.tenant_share,
                on_change=changed,
            )

        disk = await asyncio.to_thread(opened)
        self._ends.push_async_callback(asyncio.to_thread, disk.close)
        announcer.changed(Tier.DISK, disk.names(), ())
        return disk

    def _identity(self, epoch: Epoch) -> StoreIdentity:
        store = self.settings.store
        return StoreIdentity(
            owner=WorkerId(self._owner), epoch=epoch, fingerprint=store.fingerprint, block_bytes=store.block_bytes
        )

    def _make_remote(self, epoch: Epoch, transport: Transport) -> PeerTier:
        self._follower = follower = PrefixIndexFollower(self.settings.redis_url, cluster=self.settings.config.cluster)
        self._ends.push_async_callback(follower.close)
        follower.start()
        channels = Channels(self._key)
        self._ends.push_async_callback(channels.close)
        self.remote = PeerTier(
            self._identity(epoch), transport=transport, key=self._key, index=follower.index, channels=channels
        )
        return self.remote

    async def _serve(self, fd: int, epoch: Epoch, *, transport: Transport) -> RpcServer:
        self.service = service = PrefixStoreServicer(self.store, fd, node=self.settings.node)
        floor = self.settings.config.transfer
        links = LinkTable(transport, min_gbps=floor.min_gbps, strict=floor.strict)
        peers = PeerServicer(self.store, self._identity(epoch), transport=transport, links=links, key=self._key)
        self.store.metrics.sampled_by(lambda: replace(service.sample(), num_slow_links=peers.num_slow_links))

        def register(server: grpc.aio.Server) -> None:
            store_pb2_grpc.add_PrefixStoreServicer_to_server(service, server)
            store_pb2_grpc.add_PrefixStorePeerServicer_to_server(peers, server)

        service.start()
        self._ends.push_async_callback(service.close)
        self._ends.callback(peers.close)
        server = await start_server(
            self.settings.host, 0, register, [SERVICE, PEER_SERVICE], guard=CallGuard(self._key)
        )
        self._ends.push_async_callback(server.stop, 0.0)
        await server.set_serving(True)
        return server

    async def _register(
        self, epoch: Epoch, transport: Transport, *, server: RpcServer, metrics: MetricsServer
    ) -> StoreRecord:
        store = self.settings.store
        self.record = StoreRecord(
            node=self.settings.node,
            owner=self._owner,
            address=server.address,
            epoch=epoch,
            fingerprint=store.fingerprint,
            block_bytes=store.block_bytes,
            transport=transport.name,
            transport_address=transport.address().hex(),
            metrics_url=metrics.url,
            capacity_blocks=store.num_slots,
            pid=os.getpid(),
        )
        await self._registry.put(self.record)
        heartbeat = asyncio.ensure_future(self._beat())
        self._ends.push_async_callback(self._leave, heartbeat)
        return self.record

    async def _beat(self) -> None:
        """Renews the record and looks who else is there."""
        while True:
            try:
                await self._registry.put(self.record)
                peers = await self._registry.stores()
            except RedisError as exc:
                logger.warning("the store's registration is not renewed, Redis is away: %s", exc)
            else:
                self._follower.follow(self.remote.set_peers(peers))
            await asyncio.sleep(self.settings.config.registry.heartbeat_s)

    async def _leave(self, heartbeat: asyncio.Task[None]) -> None:
        await cancel_all([heartbeat])
        try:
            await self._registry.remove(self.settings.node)
        except RedisError as exc:
            logger.warning("the store's registration is not removed, Redis is away: %s", exc)
