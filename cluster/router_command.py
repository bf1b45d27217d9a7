"""`tandem router`: a router alone, for a cluster whose Redis is known; in the foreground until a signal ends it.

The process that a router pod runs. It needs no head: without workers, or without Redis, it lives and is not ready.
"""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.options import ClusterOption, ConfigOption, ReadyFileOption, RedisOption
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from router.dispatch import ServedModel
    from router.process import RouterEvents
    from tandem.config import ClusterConfig

HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")]
GrpcPortOption = Annotated[int | None, typer.Option("--grpc-port", help="gRPC port; 0 takes a free one.")]
HttpPortOption = Annotated[int | None, typer.Option("--http-port", help="HTTP port; 0 takes a free one.")]
HealthPortOption = Annotated[
    int | None, typer.Option("--health-port", help="Port for gRPC health checks alone, without TLS; 0: none.")
]


def router(
    config: ConfigOption = None,
    redis_url: RedisOption = None,
    cluster: ClusterOption = None,
    host: HostOption = None,
    grpc_port: GrpcPortOption = None,
    http_port: HttpPortOption = None,
    health_port: HealthPortOption = None,
    ready_file: ReadyFileOption = None,
) -> None:
    """Run one more router of a cluster. SIGTERM makes it unready, lets its streams end, then ends it."""
    from cluster.config_file import load_config
    from cluster.preflight import check_start

    overrides = {
        "registry.redis_url": redis_url,
        "cluster": cluster,
        "router.host": host,
        "router.grpc_port": grpc_port,
        "router.http_port": http_port,
        "router.health_port": health_port,
    }
    settings = load_config(config, overrides)
    if not settings.registry.redis_url:
        raise ConfigError("a router needs the cluster's Redis: give --redis-url", param="redis_url")
    check_start(settings)

    from tandem.observability.logging import setup_logging

    setup_logging()
    _run(settings, ready_file)


def _run(settings: ClusterConfig, ready_file: Path | None) -> None:
    from router.process import run_router

    try:
        asyncio.run(run_router(settings, redis_url=settings.registry.redis_url, events=_events(ready_file)))
    except KeyboardInterrupt as exc:  # before it listened
        raise typer.Exit(128 + signal.SIGINT) from exc
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def _events(ready_file: Path | None) -> RouterEvents:
    from cluster.serve import write_atomically
    from router.process import BoundRouter, RouterEvents

    class Printed(RouterEvents):
        """Says on stdout where it listens, and when requests are served."""

        def bound(self, router: BoundRouter) -> None:
            typer.echo(f"gRPC   {router.grpc}")
            typer.echo(f"HTTP   {router.http}")
            if router.health:
                typer.echo(f"health {router.health}")
            if ready_file is not None:
                write_atomically(ready_file, json.dumps(asdict(router)) + "\n")

        def serving(self, model: ServedModel | None) -> None:
            typer.echo("requests are served")

    return Printed()
