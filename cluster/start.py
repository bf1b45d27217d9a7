"""`tandem start`: a head that nodes join, or a node that joins one; in the foreground until a signal ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import typer

from cluster.cluster_info import ClusterInfo
from cluster.console import make_console
from cluster.display import ConsoleProgress
from cluster.head import HeadOptions, slot_resources
from cluster.launch import ClusterLauncher
from cluster.member import Member, MemberInfo
from cluster.ray_node_settings import NodeOffer
from cluster.serve import serve
from tandem.config import ClusterConfig
from tandem.errors import ConfigError


def parse_labels(words: Sequence[str]) -> dict[str, str]:
    """From KEY=VALUE words. Raises ConfigError."""
    labels = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not (separator and key and value):
            raise ConfigError(f"--label must be KEY=VALUE, got {word!r}", param="label")
        labels[key] = value
    return labels


def run_head(config: ClusterConfig, options: HeadOptions, *, ready_file: Path | None, verbose: bool) -> None:
    """Starts Redis (unless one is given), head, controller and perhaps a router; until a signal. Raises TandemError."""
    console = make_console(stderr=True)
    with ConsoleProgress(console) as progress:

        async def on_ready(info: ClusterInfo) -> None:
            progress.pause()
            _print_head(info, config.cluster)

        launcher = ClusterLauncher(config, progress=progress, verbose=verbose, head=options)
        serving = serve(
            launcher,
            ready_file=ready_file,
            on_ready=on_ready,
            on_stop=progress.stopping,
            on_force=progress.forced,
        )
        asyncio.run(serving)


def _print_head(info: ClusterInfo, cluster: str) -> None:
    name = "" if cluster == ClusterConfig().cluster else f" --cluster {cluster}"
    typer.echo(f"head is up after {info.total_s:.1f} s at {info.head}")
    if info.grpc:
        typer.echo(f"gRPC   {info.grpc}")
        typer.echo(f"HTTP   {info.http}")
    typer.echo(f"join   tandem start --address {info.head} --redis-url {info.redis}{name}")


def run_member(
    config: ClusterConfig,
    offer: NodeOffer,
    *,
    address: str,
    metrics_port: int | None,
    ready_file: Path | None,
    verbose: bool,
) -> None:
    """Joins the head at `address`; stays until a signal or the cluster's end. Raises TandemError."""
    console = make_console(stderr=True)

    def note(text: str) -> None:
        console.print(text, markup=False)

    async def on_ready(info: MemberInfo) -> None:
        slots = json.dumps(dict(offer.resources))
        typer.echo(f"joined {info.head} after {info.total_s:.1f} s as {info.node_ip}, offering {slots}")
        if info.metrics:
            typer.echo(f"metrics of its workers at {info.metrics}")

    def on_stop(has_joined: bool) -> None:
        does = "leaving: this node's workers move elsewhere" if has_joined else "stopping"
        note(f"{does}; once more to end at once")

    async def run() -> None:
        member = Member(
            config, address=address, offer=offer, note=note, metrics_port=metrics_port, verbose=verbose
        )
        await serve(
            member,
            ready_file=ready_file,
            on_ready=on_ready,
            on_stop=on_stop,
            until=member.serve,
        )

    asyncio.run(run())


__all__ = ["HeadOptions", "parse_labels", "run_head", "run_member", "slot_resources"]
