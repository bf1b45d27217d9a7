"""`tandem controller`: a controller alone, beside a Ray head that somebody else runs; in the foreground until a signal.

The process that the sidecar of a KubeRay head pod runs. Ending it touches no worker.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.options import ClusterOption, ConfigOption, MetricsPortOption, RedisOption, SizesFileOption
from tandem.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from cluster.process_settings import ProcessSettings

RayAddressOption = Annotated[
    str,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Ray's head; a node of it must run on this machine, in sight of this process.",
    ),
]


def controller(
    ray_address: RayAddressOption,
    config: ConfigOption = None,
    redis_url: RedisOption = None,
    cluster: ClusterOption = None,
    sizes_file: SizesFileOption = None,
    metrics_port: MetricsPortOption = None,
) -> None:
    """Run the part that keeps the pools at their sizes, for a Ray that runs already. SIGTERM ends it alone.

    Waits for Ray and Redis. One controller of a cluster acts, others stand by. Ray's token is taken from
    $RAY_AUTH_TOKEN, or from Redis where `tandem start --head` has put it.
    """
    from cluster.config_file import load_config

    overrides = {"registry.redis_url": redis_url, "cluster": cluster, "controller_metrics_port": metrics_port}
    settings = load_config(config, overrides)
    host, _, port = ray_address.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(f"--ray-address must be HOST:PORT, got {ray_address!r}")
    if not settings.registry.redis_url:
        raise ConfigError("a controller needs the cluster's Redis: give --redis-url", param="redis_url")

    from cluster.pools import WORKER_CLASSES
    from cluster.process_settings import ProcessSettings
    from tandem.observability.logging import setup_logging

    setup_logging()
    told = ProcessSettings(
        config=settings,
        redis_url=settings.registry.redis_url,
        ray_address=ray_address,
        worker_host="",
        classes=WORKER_CLASSES,
        holder=f"{socket.gethostname()}-{os.getpid()}",
        sizes_file="" if sizes_file is None else str(sizes_file),
        metrics_host=host.strip("[]"),
    )
    asyncio.run(run_alone(told))


async def run_alone(settings: ProcessSettings) -> None:
    """Until a signal. Raises TandemError when it cannot start."""
    from cluster.controller_log import LoggedEvents
    from cluster.embedded_redis import check_redis
    from cluster.head_record import adopt_token
    from cluster.patience import patiently
    from cluster.run_controller import run

    events = LoggedEvents()
    await patiently(lambda: check_redis(settings.redis_url), events.note)
    await patiently(lambda: _check_ray(settings.ray_address), events.note)
    await adopt_token(settings.redis_url, cluster=settings.config.cluster)
    await run(settings, events)


async def _check_ray(address: str) -> None:
    from cluster.raylet import raylets, serves

    if not await asyncio.to_thread(serves, address):
        raise ClusterError(f"Ray's head does not answer at {address}")
    if not await asyncio.to_thread(lambda: any(True for _ in raylets())):
        raise ClusterError(
            "no Ray node is to be seen on this machine; in a pod, its containers must share their processes "
            "(shareProcessNamespace)"
        )
