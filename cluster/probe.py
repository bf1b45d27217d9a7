"""What `tandem probe` asks of this node: one question, one answer; nothing is started and nothing is changed.

It runs every few seconds on every node: what a question does not need is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from tandem.config import ClusterConfig
from tandem.errors import ClusterError

if TYPE_CHECKING:
    from tandem.registry import WorkerRecord


class Question(StrEnum):
    """What may be asked."""

    LIVE = "live"
    READY = "ready"
    ROUTER_ADMITTED = "router-admitted"


async def ask(question: Question, config: ClusterConfig, *, node_ip: str) -> str:
    """The answer in words when it is yes; raises ClusterError with why when it is no.

    `live` looks at this machine alone: no Redis that is away can have it restarted.
    """
    if question is not Question.ROUTER_ADMITTED:
        _check_live(node_ip)
    if question is Question.LIVE:
        return f"the Ray node at {node_ip} answers"
    workers = await _workers(config, node_ip)
    _check_ready(workers)
    if question is Question.ROUTER_ADMITTED and not workers:
        raise ClusterError(f"no worker has registered at {node_ip}")
    names = ", ".join(worker.worker_id for worker in workers)
    return f"ready: {names}" if names else "ready, without workers"


def _check_live(node_ip: str) -> None:
    from cluster.raylet import find_raylet

    raylet = find_raylet(node_ip)
    if raylet is None:
        raise ClusterError(f"no Ray node runs here at {node_ip}")
    if not raylet.answers():
        raise ClusterError(f"the Ray node at {node_ip} (process {raylet.pid}) does not answer")


async def _workers(config: ClusterConfig, node_ip: str) -> list[WorkerRecord]:
    from redis.exceptions import RedisError

    from cluster.registered import workers_at
    from tandem.registry import Registry

    registry = Registry(config.registry.redis_url, cluster=config.cluster, ttl_s=config.registry.ttl_s)
    try:
        return await workers_at(registry, node_ip)
    except RedisError as exc:
        raise ClusterError(f"Redis is away: {exc}") from exc
    finally:
        await registry.close()


def _check_ready(workers: Sequence[WorkerRecord]) -> None:
    waiting = [f"{worker.worker_id} is {worker.state}" for worker in workers if worker.state != "ready"]
    if waiting:
        raise ClusterError(", ".join(waiting))
