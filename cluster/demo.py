"""`tandem demo`: a cluster from nothing, five prompts at once, their answers live, and where the time went."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from cluster.client import Client
from cluster.cluster_info import ClusterInfo
from cluster.console import make_console
from cluster.demo_prompts import DemoPrompt, demo_prompts
from cluster.display import ConsoleProgress, startup_table
from cluster.generate import result_data
from cluster.launch import ClusterLauncher
from cluster.live_view import LineView, PanelView, SilentView, View
from cluster.serve import with_cluster
from cluster.timeline import render_timeline
from tandem.config import ClusterConfig
from tandem.errors import ClusterError, TandemError
from tandem.rpc.tandem.v1.inference_pb2 import GenerateResponse

_INDENT = "  "


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of one prompt."""

    prompt: DemoPrompt
    responses: list[GenerateResponse] = field(default_factory=list)
    error: TandemError | None = None

    @property
    def complete(self) -> bool:
        """Whether the answer ended as it should."""
        return self.error is None and bool(self.responses) and self.responses[-1].finish_reason != 0


async def run_demo(
    config: ClusterConfig, *, verbose: bool, as_json: bool, with_messages: bool = False
) -> None:
    """Raises TandemError when the cluster does not come up or an answer fails, StoppedBySignal when it is stopped."""
    console, errors = make_console(), make_console(stderr=True)
    with ConsoleProgress(errors) as progress:
        launcher = ClusterLauncher(config, progress=progress, verbose=verbose)

        async def body(info: ClusterInfo) -> list[Outcome]:
            progress.pause()
            if verbose:
                errors.print(startup_table(info))
            errors.print(f"ready in {info.total_s:.1f} s: gRPC {info.grpc}, HTTP {info.http}", markup=False)
            outcomes = await _send_all(info.grpc, _view(console, as_json))
            if as_json:
                _print_json(outcomes, with_messages=with_messages)
            else:
                _report(outcomes, console)
            progress.resume("stopping")
            return outcomes

        outcomes = await with_cluster(
            launcher, body, on_stop=lambda _: progress.stopping(False), on_force=progress.forced
        )
    _judge(outcomes)


def _judge(outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if not outcome.complete]
    if failed:
        details = "; ".join(f"{o.prompt.name}: {o.error.message if o.error else 'ended early'}" for o in failed)
        raise ClusterError(f"{len(failed)} of {len(outcomes)} prompts failed: {details}")


def _view(console: Console, as_json: bool) -> View:
    if as_json:
        return SilentView()
    return PanelView(console) if console.is_terminal else LineView(console)


async def _send_all(endpoint: str, view: View) -> list[Outcome]:
    """All prompts at once; a failed one does not end the others."""
    prompts = demo_prompts()
    async with Client(endpoint) as client:
        with view.showing(prompts):
            return await asyncio.gather(*(_send(client, prompt, view) for prompt in prompts))


async def _send(client: Client, prompt: DemoPrompt, view: View) -> Outcome:
    outcome = Outcome(prompt=prompt)
    stream = _open(client, prompt)
    try:
        async for response in stream:
            outcome.responses.append(response)
            view.text(prompt.name, response.text)
    except TandemError as exc:
        outcome.error = exc
        view.text(prompt.name, f"[{exc.code}: {exc.message}]")
    finally:
        await stream.aclose()
    view.ended(prompt.name)
    return outcome


def _open(client: Client, prompt: DemoPrompt) -> AsyncGenerator[GenerateResponse, None]:
    if prompt.messages:
        return client.chat(prompt.messages, prompt.sampling)
    return client.generate(prompt.text, prompt.sampling)


def _print_json(outcomes: Sequence[Outcome], *, with_messages: bool) -> None:
    results = [
        {"name": outcome.prompt.name, **result_data(outcome.responses, with_messages=with_messages)}
        for outcome in outcomes
        if outcome.complete
    ]
    print(json.dumps(results, indent=2))


def _report(outcomes: Sequence[Outcome], console: Console) -> None:
    for outcome in (outcome for outcome in outcomes if outcome.complete):
        last = outcome.responses[-1]
        console.print(f"\n{outcome.prompt.name}", style="bold", markup=False)
        for line in render_timeline(last.timings, last.usage, columns=console.width - len(_INDENT)):
            console.print(_INDENT + line, markup=False, soft_wrap=True)
