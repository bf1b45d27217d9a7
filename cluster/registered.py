"""The workers and the prefix store of one node: those that registered under its address."""

from __future__ import annotations

from tandem.prefix_store.registry import StoreRecord, StoreRegistry
from tandem.registry import Registry, WorkerRecord


def is_at(record: WorkerRecord, node_ip: str) -> bool:
    """Whether the worker listens on this address."""
    return _is_host(record.address, node_ip)


def _is_host(address: str, node_ip: str) -> bool:
    return address.rpartition(":")[0].strip("[]") == node_ip


async def workers_at(registry: Registry, node_ip: str) -> list[WorkerRecord]:
    """Those that live, by id. Raises RedisError."""
    return [record for record in await registry.workers() if is_at(record, node_ip)]


async def stores_at(stores: StoreRegistry, node_ip: str) -> list[StoreRecord]:
    """Its store, if it has one. Raises RedisError."""
    return [record for record in await stores.stores() if _is_host(record.address, node_ip)]
