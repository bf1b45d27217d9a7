"""`tandem generate`, `chat` and `status`: what a router is asked. Load neither Ray nor torch."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from cluster.access import Access
from cluster.fabric import Way
from cluster.options import JsonOption

MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, max=2**31 - 1, help="Most tokens of the answer.")]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0, max=2, help="0 always takes the likeliest token. Default 1.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**64 - 1, help="The same seed gives the same answer.")
]
PriorityOption = Annotated[
    int | None,
    typer.Option(
        "--priority", min=-100, max=100, help="Lower comes first; a level is worth five seconds of waiting. Default 0."
    ),
]
MessagesOption = Annotated[
    bool, typer.Option("--messages", help="With --json: the timings of each message of the KV transfer too.")
]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    access: Access,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    priority: PriorityOption = None,
    as_json: JsonOption = False,
    messages: MessagesOption = False,
) -> None:
    """Continue a text; the answer streams to stdout."""
    from cluster.client import make_sampling
    from cluster.generate import run_generate

    sampling = make_sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, priority=priority)
    text = sys.stdin.read() if prompt == "-" else prompt
    asyncio.run(run_generate(access, text, sampling, as_json=as_json, with_messages=messages))


def chat(
    access: Access,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the whole conversation.")] = None,
) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D ends; from a pipe, each line is a question."""
    from cluster.chat import run_chat
    from cluster.client import make_sampling

    sampling = make_sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    run_chat(access, sampling, system=system)


def status(
    access: Access,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Processes, cores, all of each link.")] = False,
) -> None:
    """Show workers, pools, blocks, links and the transport in use."""
    if watch:
        from cluster.watch import run_watch

        run_watch(access, interval_s=interval_s, as_json=as_json)
        return
    answer = asyncio.run(_status(access))
    from cluster.console import make_console
    from cluster.status_view import as_data, print_status

    if as_json:
        typer.echo(json.dumps(as_data(answer), indent=2))
    else:
        print_status(answer, make_console(), verbose=verbose)


def try_connection(
    access: Access,
    http: Annotated[str | None, typer.Option("--http", metavar="URL", help="Ask its HTTP port there too.")] = None,
    required: Annotated[
        Way | None, typer.Option("--require-transport", help="Fail unless KV moves over this kind of fabric.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest wait until requests are served, in seconds.")
    ] = 60.0,
) -> None:
    """Try a cluster: health, one generation, and whether its KV moved, and over what. Exit status 1 if not."""
    asyncio.run(_try(access, http, required=required, timeout_s=timeout_s))


async def _try(access: Access, http: str | None, *, required: Way | None, timeout_s: float) -> None:
    from cluster.connection_check import check_cluster, check_http

    await check_cluster(access, required=required, timeout_s=timeout_s, say=typer.echo)
    if http is not None:
        await check_http(http, access, say=typer.echo)


async def _status(access: Access) -> Any:
    from cluster.client import Client

    async with Client(access) as client:
        return await client.status()
