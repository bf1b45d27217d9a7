"""`tandem probe`, `drain-node` and `node-metrics`: what runs beside a node's workers, on their machine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from cluster.options import ClusterOption, ConfigOption, MetricsPortOption, RedisOption, ThisNodeOption
from cluster.probe import Question
from tandem.config import ClusterConfig
from tandem.errors import ConfigError

ForOption = Annotated[
    Question,
    typer.Option(
        "--for",
        help="live: this node's Ray answers. ready: and every worker registered here is ready, if there is one. "
        "router-admitted: a worker is registered here, and every one is ready, so that routers admit it.",
    ),
]


TimeoutOption = Annotated[float, typer.Option("--timeout", min=0, help="Longest wait in seconds.")]


def probe(
    node_ip: ThisNodeOption,
    question: ForOption = Question.READY,
    config: ConfigOption = None,
    redis_url: RedisOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Ask how this node is: exit status 0 for yes, 1 for no. For the probes of a pod; only `live` needs no Redis."""
    from cluster.probe import ask

    needs_redis = question is not Question.LIVE
    settings = _settings(config, redis_url=redis_url, cluster=cluster, needs_redis=needs_redis)
    typer.echo(asyncio.run(ask(question, settings, node_ip=node_ip)))


def _settings(
    config: Path | None, *, redis_url: str | None, cluster: str | None, needs_redis: bool = True
) -> ClusterConfig:
    from cluster.config_file import load_config

    settings = load_config(config, {"registry.redis_url": redis_url, "cluster": cluster})
    if needs_redis and not settings.registry.redis_url:
        raise ConfigError("give --redis-url, or registry.redis_url in the configuration", param="redis_url")
    return settings




def drain_node(
    node_ip: ThisNodeOption,
    timeout_s: TimeoutOption = 300.0,
    config: ConfigOption = None,
    redis_url: RedisOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Take the workers off this node: they finish what they have, and start elsewhere. For a pod's preStop hook.

    Exit status 1 when some are still there after the time; they are named.
    """
    from cluster import node_drain

    settings = _settings(config, redis_url=redis_url, cluster=cluster)
    left = asyncio.run(node_drain.drain_node(settings, node_ip=node_ip, timeout_s=timeout_s, note=_note))
    typer.echo(f"left {node_ip}: {', '.join(left) or 'there was no worker'}")


def node_metrics(
    node_ip: ThisNodeOption,
    port: MetricsPortOption = 0,
    config: ConfigOption = None,
    redis_url: RedisOption = None,
    cluster: ClusterOption = None,
) -> None:
    """Serve the metrics of this node's workers on one page, for nodes that `tandem start` does not run."""
    settings = _settings(config, redis_url=redis_url, cluster=cluster)
    asyncio.run(_serve_metrics(settings, node_ip=node_ip, port=port or 0))


async def _serve_metrics(settings: ClusterConfig, *, node_ip: str, port: int) -> None:
    """Until a signal."""
    from cluster.federation import serve_node_metrics
    from tandem.prefix_store.registry import StoreRegistry
    from tandem.registry import Registry

    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    registry = Registry(settings.registry.redis_url, cluster=settings.cluster, ttl_s=settings.registry.ttl_s)
    stores = StoreRegistry(settings.registry.redis_url, cluster=settings.cluster, ttl_s=settings.registry.ttl_s)
    server = await serve_node_metrics(registry, stores, node_ip=node_ip, port=port)
    try:
        typer.echo(f"metrics at {server.url}")
        await stopping.wait()
    finally:
        await server.stop()
        await stores.close()
        await registry.close()


def _note(text: str) -> None:
    typer.echo(text, err=True)
