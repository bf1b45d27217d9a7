"""`tandem cache`: what is cached where, and what operators do to it. Loads neither Ray nor torch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from google.protobuf.message import Message

from cluster.access import Access
from cluster.options import JsonOption
from tandem.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.cache_client import CacheClient
    from tandem.rpc.tandem.v1 import inference_pb2

R = TypeVar("R", bound=Message)
Done = TypeVar(
    "Done",
    "inference_pb2.PrefixAnswer",
    "inference_pb2.ClearCacheAnswer",
    "inference_pb2.VerifyCacheAnswer",
)

_MOST_DIGITS = 9

LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Most prefixes to show.")]
TextArgument = Annotated[str | None, typer.Argument(help="The beginning of prompts; - reads it from stdin.")]
TokensOption = Annotated[str | None, typer.Option("--tokens", help="The same as token ids: 1,2,3.")]
BlockOption = Annotated[str | None, typer.Option("--block", help="The same as `tandem cache list` names it.")]
SaltOption = Annotated[str, typer.Option("--salt", help="The cache_salt of the requests that it is for.")]


def stats(access: Access, as_json: JsonOption = False) -> None:
    """Show what each node's store and each worker has cached, and how often it was of use."""
    from cluster.cache_view import print_stats

    _show(_ask(access, lambda client: client.stats()), print_stats, as_json=as_json)


def hottest(access: Access, limit: LimitOption = 20, as_json: JsonOption = False) -> None:
    """Show the prefixes in the nodes' memory that were loaded most often, each by the name of its last block."""
    from cluster.cache_view import print_prefixes

    _show(_ask(access, lambda client: client.hottest(limit)), print_prefixes, as_json=as_json)


def pin(
    access: Access,
    text: TextArgument = None,
    tokens: TokensOption = None,
    block: BlockOption = None,
    salt: SaltOption = "",
    as_json: JsonOption = False,
) -> None:
    """Keep a prefix on the nodes that have it, until as many unpins or until their stores start again."""
    from cluster.cache_view import print_pinned

    selector = _selector(text, tokens, block, salt=salt)
    _done(_ask(access, lambda client: client.pin(selector)), print_pinned, as_json=as_json)


def unpin(
    access: Access,
    text: TextArgument = None,
    tokens: TokensOption = None,
    block: BlockOption = None,
    salt: SaltOption = "",
    as_json: JsonOption = False,
) -> None:
    """Take one pin away from each block of a prefix."""
    from cluster.cache_view import print_unpinned

    selector = _selector(text, tokens, block, salt=salt)
    _done(_ask(access, lambda client: client.unpin(selector)), print_unpinned, as_json=as_json)


def clear(
    access: Access,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Forget all that is cached and neither pinned nor in use, disks included. Running requests go on."""
    from cluster.cache_view import print_cleared

    if not yes:
        typer.confirm("Forget everything that is cached on all nodes and in all workers?", abort=True, err=True)
    _done(_ask(access, lambda client: client.clear()), print_cleared, as_json=as_json)


def verify(
    access: Access,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Longest wait in seconds.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Read every block of every store again; damaged ones are removed. Exit status 1 where there were any."""
    from cluster.cache_view import print_verified

    answer = _ask(access, lambda client: client.verify(timeout_s=timeout_s))
    _done(answer, print_verified, as_json=as_json)
    if any(node.num_damaged for node in answer.nodes):
        raise typer.Exit(1)


PIN_EXAMPLE = "You are the assistant of a small library. Answer in one short sentence and name the book you mean."
"""More than one block of tokens: less is not kept."""

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "stats": (stats, "--json"),
    "list": (hottest, "--limit 50"),
    "pin": (pin, f"'{PIN_EXAMPLE}'"),
    "unpin": (unpin, "--block 0f1e2d3c4b5a69788796a5b4c3d2e1f0"),
    "clear": (clear, "--yes"),
    "verify": (verify, "--timeout 3600"),
}
"""Each with arguments for its example."""


def _ask(access: Access, call: Callable[[CacheClient], Awaitable[R]]) -> R:
    from cluster.cache_client import CacheClient

    async def ask() -> R:
        async with CacheClient(access) as client:
            return await call(client)

    return asyncio.run(ask())


def _show(answer: R, draw: Callable[[R, Console], None], *, as_json: bool) -> None:
    from cluster.console import make_console
    from cluster.status_view import as_data

    if as_json:
        typer.echo(json.dumps(as_data(answer), indent=2))
    else:
        draw(answer, make_console())


def _done(answer: Done, draw: Callable[[Done, Console], None], *, as_json: bool) -> None:
    """Raises ClusterError where it was not done everywhere."""
    _show(answer, draw, as_json=as_json)
    from cluster.short_ids import short_ids

    short = short_ids(node.node for node in answer.nodes)
    failures = [f"{short[node.node]}: {node.error}" for node in answer.nodes if node.error]
    failures += [f"{worker.worker_id}: {worker.error}" for worker in getattr(answer, "workers", ()) if worker.error]
    if failures:
        raise ClusterError("not done everywhere: " + "; ".join(failures))


def _selector(text: str | None, tokens: str | None, block: str | None, *, salt: str) -> inference_pb2.PrefixSelector:
    """Raises ConfigError unless exactly one of the three is given."""
    from tandem.rpc.tandem.v1 import inference_pb2

    if sum(each is not None for each in (text, tokens, block)) != 1:
        raise ConfigError("name the prefix in one way: its text, --tokens or --block", param="prefix")
    if text is not None:
        return inference_pb2.PrefixSelector(text=sys.stdin.read() if text == "-" else text, cache_salt=salt)
    if tokens is not None:
        ids = inference_pb2.TokenIds(ids=_token_ids(tokens))
        return inference_pb2.PrefixSelector(token_ids=ids, cache_salt=salt)
    return inference_pb2.PrefixSelector(block=block or "", cache_salt=salt)


def _token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS for part in parts):
        raise ConfigError(f"--tokens are token ids with commas between them, got {text!r}", param="tokens")
    return [int(part) for part in parts]
