"""`tandem probe` and what else runs beside a node's workers, on their machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cluster.options import ClusterOption, ConfigOption, RedisOption, ThisNodeOption
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


