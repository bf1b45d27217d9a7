"""What a worker has of the prefix store beyond its own memory: its node's store, and a voice in the cluster's index."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tandem.kv.layout import KvLayout
from tandem.kv.tiering import WritePolicy
from tandem.prefix_store.announce import Announcer, AnnouncerSettings
from tandem.prefix_store.client import StoreClient
from tandem.prefix_store.client_session import ClientIdentity
from tandem.prefix_store.registry import StoreRegistry
from tandem.types import Epoch
from tandem.worker.host import WorkerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTiers:
    """Owned by the worker, which closes them."""

    client: StoreClient | None = None
    announcer: Announcer | None = None
    write_policy: WritePolicy = "through"
    stores: StoreRegistry | None = None

    async def close(self) -> None:
        """Detaches, withdraws what was announced. Idempotent."""
        if self.client is not None:
            await self.client.close()
        if self.announcer is not None:
            await self.announcer.close()
        if self.stores is not None:
            await self.stores.close()


NO_TIERS = PrefixTiers()
"""The worker's own memory alone."""


async def open_tiers(
    settings: WorkerSettings, epoch: Epoch, layout: KvLayout, *, fingerprint: str, num_ranks: int = 1
) -> PrefixTiers:
    """Announces this worker's blocks, and attaches it to its node's store where there is to be one.

    A worker of several ranks keeps prefixes in its own blocks only: the store takes whole blocks, of which no rank has
    more than a part.

    Raises IncompatiblePeer when the store is of another model.
    """
    config = settings.config
    if not config.prefix_store.enabled:
        return NO_TIERS
    announcer = Announcer(
        AnnouncerSettings(
            redis_url=settings.redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s
        ),
        owner=settings.worker_id,
        epoch=epoch,
    )
    announcer.start()
    if num_ranks > 1 and config.prefix_store.host_bytes:
        logger.warning("%s has %d ranks: it does not use its node's prefix store", settings.worker_id, num_ranks)
    if num_ranks > 1 or not config.prefix_store.host_bytes:
        return PrefixTiers(announcer=announcer)
    stores = StoreRegistry(settings.redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
    identity = ClientIdentity(
        worker_id=settings.worker_id,
        fingerprint=fingerprint,
        block_bytes=layout.num_layers * layout.block_layer_bytes,
        num_layers=layout.num_layers,
    )
    client = await StoreClient.attach(stores.locate(settings.store_node), key=settings.key, identity=identity)
    policy = config.prefix_store.host_write
    return PrefixTiers(client=client, announcer=announcer, write_policy=policy, stores=stores)
