"""Real prefix stores for tests: whole nodes in this event loop, their clients, blocks whose bytes are their names'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from cluster.store_host import StoreHost
from cluster.store_settings import StoreHostSettings
from tandem.config import ClusterConfig, RegistryConfig, TransferConfig
from tandem.kv.hashing import CacheIdentity, block_hashes, root_hash
from tandem.prefix_store.client import Locate, StoreClient, at
from tandem.prefix_store.client_session import ClientIdentity
from tandem.prefix_store.holdings import Grant, Loan
from tandem.prefix_store.settings import StoreSettings
from tandem.prefix_store.slab import block_digest
from tandem.types import BlockHash, WorkerId
from tests.factories import CLUSTER_KEY

FINGERPRINT = "ab" * 16
NUM_LAYERS = 2
BLOCK_BYTES = 8192
CLUSTER = "test"
SETTLE_S = 10.0


def chain(num_blocks: int, seed: int = 0) -> list[BlockHash]:
    """Names of a prefix; other seeds have nothing in common with it."""
    root = root_hash(CacheIdentity(fingerprint=FINGERPRINT, salt=str(seed)))
    return list(block_hashes(root, range(num_blocks), 1))


def payload(name: BlockHash, num_bytes: int = BLOCK_BYTES) -> torch.Tensor:
    """The bytes that a block of this name has in tests."""
    return torch.frombuffer(bytearray(name * (num_bytes // len(name))), dtype=torch.uint8)


def node_settings(redis_url: str, node: str = "n1", **changes: Any) -> StoreHostSettings:
    """A small store; names among `changes` that are the store's own go to it."""
    disk: Path | None = changes.pop("disk", None)
    transfer = {name: changes.pop(name) for name in ("transport", "min_gbps", "strict") if name in changes}
    quotas = changes.pop("tenant_quotas", {})
    store = {"fingerprint": FINGERPRINT, "block_bytes": BLOCK_BYTES, "num_slots": 16, "lease_s": 2.0, **changes}
    return StoreHostSettings(
        config=ClusterConfig(
            cluster=CLUSTER,
            registry=RegistryConfig(heartbeat_s=0.1, ttl_s=1.0),
            transfer=TransferConfig(**{"transport": "shm", **transfer}),
        ),
        redis_url=redis_url,
        node=node,
        host="127.0.0.1",
        store=StoreSettings(**store),
        disk_directory="" if disk is None else str(disk),
        disk_bytes=0 if disk is None else 4 << 20,
        tenant_quotas=quotas,
    )


@asynccontextmanager
async def store_node(redis_url: str, node: str = "n1", **changes: Any) -> AsyncIterator[StoreHost]:
    """A node's store, stopped at the end."""
    host = StoreHost(node_settings(redis_url, node, **changes), CLUSTER_KEY)
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


def identity(worker_id: str = "w", **changes: Any) -> ClientIdentity:
    """A worker whose blocks are those of `node_settings`."""
    values = {"fingerprint": FINGERPRINT, "block_bytes": BLOCK_BYTES, "num_layers": NUM_LAYERS, **changes}
    return ClientIdentity(worker_id=WorkerId(worker_id), **values)


@asynccontextmanager
async def client_of(where: StoreHost | Locate, worker_id: str = "w", **changes: Any) -> AsyncIterator[StoreClient]:
    """A client, closed at the end."""
    locate = at(where.record.address) if isinstance(where, StoreHost) else where
    timeout_s = changes.pop("timeout_s", 2.0)
    client = await StoreClient.attach(
        locate, key=CLUSTER_KEY, identity=identity(worker_id, **changes), timeout_s=timeout_s
    )
    try:
        yield client
    finally:
        await client.close()


def fill(grant: Grant, names: Sequence[BlockHash]) -> list[int]:
    """Writes the blocks of a grant; their digests."""
    digests = []
    for index in range(len(grant.slots)):
        block = grant.block(index)
        block.copy_(payload(names[grant.first + index], block.numel()))
        digests.append(block_digest(grant.block(index)))
    return digests


async def put(client: StoreClient, names: Sequence[BlockHash], *, tenant: str = "") -> int:
    """Puts a whole prefix; how many blocks were new and are visible."""
    grant = await client.put(names, tenant=tenant)
    return await grant.commit(fill(grant, names))


def is_right(loan: Loan, names: Sequence[BlockHash]) -> bool:
    """Whether every block of a loan has the bytes of its name."""
    blocks = [loan.block(index) for index in range(len(loan.slots))]
    return all(torch.equal(block, payload(name, block.numel())) for name, block in zip(names, blocks, strict=False))


async def until(condition: Callable[[], Any]) -> None:
    """Looks until the condition holds; it may be a coroutine function."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            value = condition()
            if await value if isinstance(value, Awaitable) else value:
                return
            await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Runs a test in an event loop, for half a minute at most."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())
