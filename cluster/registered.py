"""The workers of one node, as the registry has them: those that registered under its address."""

from __future__ import annotations

from tandem.registry import Registry, WorkerRecord


def is_at(record: WorkerRecord, node_ip: str) -> bool:
    """Whether the worker listens on this address."""
    return record.address.rpartition(":")[0].strip("[]") == node_ip


async def workers_at(registry: Registry, node_ip: str) -> list[WorkerRecord]:
    """Those that live, by id. Raises RedisError."""
    return [record for record in await registry.workers() if is_at(record, node_ip)]
