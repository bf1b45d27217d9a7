"""`tandem scale`, `drain` and `restart`: what operators ask of the pools, and the wait until it is so."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from cluster.access import Access
from cluster.options import JsonOption
from cluster.pool_wait import Condition, is_drained, is_restarted, is_scaled, wait_until
from tandem.errors import ConfigError, RequestNotFound
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus
from tandem.types import Role

WaitOption = Annotated[bool, typer.Option("--wait", help="Return only when it is done; progress goes to stderr.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0, help="Longest wait in seconds; then exit status 1.")]
DEFAULT_TIMEOUT_S = 600.0
_MOST_DIGITS = 9
"""Longer numbers do not fit the call's field; the router judges the others."""


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="POOL=SIZE...", help="prefill=3, decode=2, or both.")],
    access: Access,
    wait: WaitOption = False,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Change how many workers the pools have, while requests run. Workers that are too many finish what they have."""
    asyncio.run(_scale(parse_sizes(sizes), wait_s=timeout_s if wait else None, access=access, as_json=as_json))


def drain(
    worker: Annotated[str, typer.Argument(help="Id of a worker, as `tandem status` shows it.")],
    access: Access,
    wait: WaitOption = False,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Take one worker out: it finishes what it has, ends, and is replaced."""
    asyncio.run(_drain(worker, wait_s=timeout_s if wait else None, access=access, as_json=as_json))


def restart(
    pool: Annotated[str, typer.Argument(help="prefill or decode.")],
    access: Access,
    wait: WaitOption = False,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Replace every worker of a pool, one after another, each only when its successor is ready."""
    asyncio.run(_restart(parse_role(pool), wait_s=timeout_s if wait else None, access=access, as_json=as_json))


def parse_role(text: str) -> Role:
    """Raises ConfigError for anything but a pool's name."""
    try:
        return Role(text)
    except ValueError as exc:
        raise ConfigError(f"the pools are prefill and decode, not {text!r}", param="pool") from exc


def parse_sizes(texts: list[str]) -> dict[Role, int]:
    """From "prefill=3" and the like. Raises ConfigError."""
    sizes: dict[Role, int] = {}
    for text in texts:
        name, sign, number = text.partition("=")
        if not sign or not number.isdecimal():
            raise ConfigError(f"sizes are given as prefill=3 or decode=2, got {text!r}", param="sizes")
        role = parse_role(name)
        if len(number) > _MOST_DIGITS:
            raise ConfigError(f"{role} must be 0 to 1024, got {number}", param="sizes")
        if role in sizes:
            raise ConfigError(f"{role} is given twice", param="sizes")
        sizes[role] = int(number)
    return sizes


async def _scale(sizes: dict[Role, int], *, wait_s: float | None, access: Access, as_json: bool) -> None:
    from cluster.client import Client

    async with Client(access) as client:
        await client.set_pool_sizes(prefill=sizes.get(Role.PREFILL), decode=sizes.get(Role.DECODE))
        status = await wait_until(client, is_scaled(list(sizes)), list(sizes), timeout_s=wait_s)
    _print(status, list(sizes), as_json=as_json)


async def _drain(worker_id: str, *, wait_s: float | None, access: Access, as_json: bool) -> None:
    from cluster.client import Client

    async with Client(access) as client:
        before = next((w for w in (await client.status()).workers if w.worker_id == worker_id), None)
        await client.drain_worker(worker_id)
        if before is None:  # the router knows it and did not show it: it registered between the two calls
            raise RequestNotFound(f"worker {worker_id} has only just registered; try again", param="worker")
        roles = [Role(before.role)]
        status = await wait_until(client, is_drained(worker_id, before.epoch, roles[0]), roles, timeout_s=wait_s)
    _print(status, roles, as_json=as_json)


async def _restart(role: Role, *, wait_s: float | None, access: Access, as_json: bool) -> None:
    from cluster.client import Client

    async with Client(access) as client:
        generation = await client.restart_pool(role)
        condition: Condition = is_restarted(role, generation)
        status = await wait_until(client, condition, [role], timeout_s=wait_s)
    _print(status, [role], as_json=as_json)


def _print(status: ClusterStatus, roles: list[Role], *, as_json: bool) -> None:
    from cluster.pool_wait import describe
    from cluster.status_view import as_data

    pools = [pool for pool in status.pools if pool.role in roles]
    if as_json:
        typer.echo(json.dumps({"pools": [as_data(pool) for pool in pools]}, indent=2))
        return
    for pool in pools:
        typer.echo(describe(pool))
    if not status.has_controller:
        typer.echo("no controller acts now: this is noted, and done when one does", err=True)
