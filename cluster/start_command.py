"""The options of `tandem start`, checked and handed to `start.py`. Imports neither Ray nor torch."""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.ray_node_settings import LOOPBACK_IP, NodeOffer
from tandem.errors import ConfigError
from tandem.types import Role

HeadOption = Annotated[bool, typer.Option("--head", help="Start a head: Ray's, the controller, a router.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="Join the head there. Needs --redis-url.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML or JSON file; options override it.")]
RedisOption = Annotated[
    str | None,
    typer.Option("--redis-url", help="The cluster's Redis; a head without one starts it, for this machine only."),
]
ClusterOption = Annotated[str | None, typer.Option("--cluster", help="Name of the cluster in that Redis.")]
PortOption = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Head: where nodes join; 0: the lost head's, or a free one.")
]
NodeIpOption = Annotated[
    str | None, typer.Option("--node-ip", help="This machine's address for the others. Default 127.0.0.2: no others.")
]
PrefillSlotsOption = Annotated[
    int | None, typer.Option("--prefill-slots", min=0, help="Prefill workers to take. Default: one per core.")
]
DecodeSlotsOption = Annotated[
    int | None, typer.Option("--decode-slots", min=0, help="Decode workers to take. Default: one per core.")
]
NoWorkersOption = Annotated[bool, typer.Option("--no-workers", help="Head: take no workers, only nodes do.")]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Where the node is, as in rack=r7; repeatable.")
]
ReadyFileOption = Annotated[Path | None, typer.Option("--ready-file", help="Written (JSON) once it is up.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show all logs.")]


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
    label: LabelOption = None,
    ready_file: ReadyFileOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Start one node of a cluster of several, until Ctrl-C: a head, or a node that joins one.

    A node that is stopped has its workers moved elsewhere first. A head that is stopped ends the cluster; one that is
    lost is started again with the same --redis-url, and finds nodes and workers as they are.
    """
    from cluster.config_file import load_config
    from cluster.preflight import check_start

    _check(head=head, address=address, no_workers=no_workers, port=port)
    _check_ip(node_ip)
    settings = load_config(config, {"registry.redis_url": redis_url, "cluster": cluster})

    if address is None:
        check_start(settings, has_port_options=False)

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
        options = HeadOptions(joinable=True, port=port, slots=slots, **common)
        run_head(settings, options, ready_file=ready_file, verbose=verbose)
    else:
        offer = NodeOffer(resources=slot_resources(slots), **common)
        run_member(settings, offer, address=address, ready_file=ready_file, verbose=verbose)


def _check(*, head: bool, address: str | None, no_workers: bool, port: int) -> None:
    if head == (address is not None):
        raise ConfigError("give either --head or --address HOST:PORT")
    if address is not None and (no_workers or port):
        raise ConfigError("--no-workers and --port are a head's: leave them out with --address")
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise ConfigError(f"--address must be HOST:PORT, got {address!r}")


def _check_ip(node_ip: str | None) -> None:
    try:
        ipaddress.ip_address(node_ip or LOOPBACK_IP)
    except ValueError as exc:
        raise ConfigError(f"--node-ip must be an IP address, got {node_ip!r}", param="node_ip") from exc
    NodeOffer(node_ip=node_ip or LOOPBACK_IP, resources={})
