"""The options of `tandem start`, checked and handed to `start.py`. Imports neither Ray nor torch."""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.options import (
    ClusterOption,
    ConfigOption,
    MetricsPortOption,
    ReadyFileOption,
    RedisOption,
    SizesFileOption,
    VerboseOption,
)
from cluster.ray_node_settings import LOOPBACK_IP, NodeOffer
from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.types import Role

HeadOption = Annotated[bool, typer.Option("--head", help="Start a head: Ray's, the controller, a router.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="Join the head there. Needs --redis-url.")
]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Head: where nodes join; 0: the lost head's, or a free one.")
]
NodeIpOption = Annotated[
    str | None, typer.Option("--node-ip", help="This machine's address for the others. Default 127.0.0.2: no others.")
]
PrefillSlotsOption = Annotated[
    int | None, typer.Option("--prefill-slots", min=0, help="Ranks of prefill workers to take. Default: one per core.")
]
DecodeSlotsOption = Annotated[
    int | None, typer.Option("--decode-slots", min=0, help="Ranks of decode workers to take. Default: one per core.")
]
NoWorkersOption = Annotated[bool, typer.Option("--no-workers", help="Head: take no workers, only nodes do.")]
NoRouterOption = Annotated[bool, typer.Option("--no-router", help="Head: routers run elsewhere (`tandem router`).")]
HandOverOption = Annotated[
    bool | None,
    typer.Option(
        "--hand-over/--end-cluster",
        help="Head: whether SIGTERM leaves nodes and workers to the next head, or ends them. "
        "Default: hand over with --no-router and --redis-url, else end.",
    ),
]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Where the node is, as in rack=r7; repeatable.")
]


def start(
    head: HeadOption = False,
    address: AddressOption = None,
    config: ConfigOption = None,
    redis_url: RedisOption = None,
    cluster: ClusterOption = None,
    port: PortOption = 0,
    node_ip: NodeIpOption = None,
    prefill_slots: PrefillSlotsOption = None,
    decode_slots: DecodeSlotsOption = None,
    no_workers: NoWorkersOption = False,
    no_router: NoRouterOption = False,
    hand_over: HandOverOption = None,
    sizes_file: SizesFileOption = None,
    metrics_port: MetricsPortOption = None,
    label: LabelOption = None,
    ready_file: ReadyFileOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Start a head that nodes join, or a node that joins one; both until Ctrl-C or SIGTERM.

    A node that is stopped first has its workers moved elsewhere. A head that is stopped ends the cluster, unless it
    hands over; one that is lost is started again with the same --redis-url, and finds nodes and workers as they are.
    A head without --redis-url starts a Redis for this machine only.
    """
    from cluster.config_file import load_config

    _check(head=head, address=address, port=port, only_head=_given(no_workers, no_router, hand_over, sizes_file))
    _check_ip(node_ip)
    overrides = {"registry.redis_url": redis_url, "cluster": cluster, "controller_metrics_port": metrics_port}
    settings = load_config(config, overrides)
    if hand_over and not settings.registry.redis_url:
        raise ConfigError("a head that hands over needs a Redis that outlives it: give --redis-url", param="redis_url")
    from tandem.model.native import check_choice

    check_choice()
    if head:
        _check_start(settings, has_router=not no_router, has_workers=not no_workers)

    from cluster.processes import usable_cores
    from cluster.start import HeadOptions, parse_labels, run_head, run_member, slot_resources

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    common: dict[str, Any] = {"labels": parse_labels(label or ())} | ({"node_ip": node_ip} if node_ip else {})
    default = 0 if no_workers else len(usable_cores())
    chosen = {Role.PREFILL: prefill_slots, Role.DECODE: decode_slots}
    slots = {role: default if number is None else number for role, number in chosen.items()}
    if address is None:
        options = HeadOptions(
            joinable=True,
            port=port,
            slots=slots,
            has_router=not no_router,
            hands_over=bool(no_router and settings.registry.redis_url) if hand_over is None else hand_over,
            sizes_file="" if sizes_file is None else str(sizes_file),
            **common,
        )
        run_head(settings, options, ready_file=ready_file, verbose=verbose)
    else:
        offer = NodeOffer(resources=slot_resources(slots), **common)
        run_member(
            settings, offer, address=address, metrics_port=metrics_port, ready_file=ready_file, verbose=verbose
        )


def _given(no_workers: bool, no_router: bool, hand_over: bool | None, sizes_file: Path | None) -> list[str]:
    """Options of a head alone that were given."""
    given = {
        "--no-workers": no_workers,
        "--no-router": no_router,
        "--hand-over": hand_over is not None,
        "--sizes-file": sizes_file is not None,
    }
    return [name for name, is_given in given.items() if is_given]


def _check(*, head: bool, address: str | None, port: int, only_head: list[str]) -> None:
    if head == (address is not None):
        raise ConfigError("give either --head or --address HOST:PORT")
    heads = [*only_head, *(["--port"] if port else [])]
    if address is not None and heads:
        which = "is a head's: leave it out" if len(heads) == 1 else "are a head's: leave them out"
        raise ConfigError(f"{' and '.join(heads)} {which} with --address")
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise ConfigError(f"--address must be HOST:PORT, got {address!r}")


def _check_start(settings: ClusterConfig, *, has_router: bool, has_workers: bool) -> None:
    """What a head would fail at anyway: it needs the model only for a router or workers of its own."""
    from cluster.preflight import check_ports
    from tandem.model.check import check_model

    if has_router or has_workers:
        check_model(settings.model.source)
    if has_router:
        check_ports(settings.router, has_port_options=False)


def _check_ip(node_ip: str | None) -> None:
    try:
        ipaddress.ip_address(node_ip or LOOPBACK_IP)
    except ValueError as exc:
        raise ConfigError(f"--node-ip must be an IP address, got {node_ip!r}", param="node_ip") from exc
    NodeOffer(node_ip=node_ip or LOOPBACK_IP, resources={})
