"""The `tandem` command. Ray, torch and the model are imported only inside the commands that need them.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 128 + N ended by signal N. Errors are one line on stderr.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from cluster.echo_group import EchoGroup
from cluster.node_commands import probe
from cluster.options import ConfigOption, JsonOption
from cluster.pool_commands import drain, restart, scale
from cluster.router_command import router
from cluster.serve import StoppedBySignal
from cluster.start_command import start
from tandem.errors import ConfigError, TandemError

if TYPE_CHECKING:
    from cluster.launch import ClusterInfo

P = ParamSpec("P")
R = TypeVar("R")

app = typer.Typer(
    cls=EchoGroup,
    help="Disaggregated prefill/decode serving of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelOption = Annotated[str | None, typer.Option("--model", help="A known model's name, a .gguf file or a directory.")]
PrefillOption = Annotated[int | None, typer.Option("--prefill", help="Prefill workers.")]
DecodeOption = Annotated[int | None, typer.Option("--decode", help="Decode workers.")]
TransportOption = Annotated[str | None, typer.Option("--transport", help="How KV moves: ucx or shm.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show all logs and where the start-up time goes.")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", help="Router to ask. Default: $TANDEM_ENDPOINT or 127.0.0.1:50051.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, max=2**31 - 1, help="Most tokens of the answer.")]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", min=0, max=2, help="0 always takes the likeliest token. Default 1.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**64 - 1, help="The same seed gives the same answer.")
]
MessagesOption = Annotated[
    bool, typer.Option("--messages", help="With --json: the timings of each message of the KV transfer too.")
]


def _fail(message: str, status: int) -> typer.Exit:
    typer.echo(f"tandem: {' '.join(message.split())}", err=True)
    return typer.Exit(status)


def friendly(command: Callable[P, R]) -> Callable[P, R]:
    """Turns expected failures of a command into one line on stderr and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TandemError as exc:
            raise _fail(exc.message, 2 if isinstance(exc, ConfigError) else 1) from exc
        except StoppedBySignal as exc:
            raise typer.Exit(exc.exit_status) from exc
        except KeyboardInterrupt as exc:
            typer.echo(err=True)
            raise _fail("stopped", 128 + signal.SIGINT) from exc
        except BrokenPipeError as exc:  # the reader has gone, as in `| head`: nobody is left to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from exc

    return wrapped


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {version('tandem-serve')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Disaggregated prefill/decode serving of large language models."""


def _overrides(
    model: str | None, prefill: int | None, decode: int | None, transport: str | None, **router: int | None
) -> dict[str, Any]:
    chosen = {
        "model.source": model,
        "prefill.num_workers": prefill,
        "decode.num_workers": decode,
        "transfer.transport": transport,
    }
    return chosen | {f"router.{name}": value for name, value in router.items()}


def _log_to_stderr(verbose: bool) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


@app.command(epilog="Example: tandem up --prefill 2 --decode 1 --http-port 8000")
@friendly
def up(
    config: ConfigOption = None,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    grpc_port: Annotated[int | None, typer.Option(help="Router's gRPC port; 0 takes a free one.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Router's HTTP port; 0 takes a free one.")] = None,
    transport: TransportOption = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written (JSON) once requests are served.")] = None,
    verbose: VerboseOption = False,
) -> None:
    """Start a cluster and serve until Ctrl-C. A second Ctrl-C does not wait for running requests."""
    from cluster.config_file import load_config
    from cluster.preflight import check_start, warn, warnings

    overrides = _overrides(model, prefill, decode, transport, grpc_port=grpc_port, http_port=http_port)
    settings = load_config(config, overrides)
    check_start(settings)

    from cluster.console import make_console
    from cluster.display import ConsoleProgress, startup_table
    from cluster.launch import ClusterLauncher
    from cluster.ready import print_ready
    from cluster.serve import serve

    _log_to_stderr(verbose)
    console = make_console(stderr=True)
    warn(warnings(settings))
    with ConsoleProgress(console) as progress:

        async def on_ready(info: ClusterInfo) -> None:
            progress.pause()
            if verbose:
                console.print(startup_table(info))
            await print_ready(info, settings)

        launcher = ClusterLauncher(settings, progress=progress, verbose=verbose)
        serving = serve(
            launcher,
            ready_file=ready_file,
            on_ready=on_ready,
            on_stop=progress.stopping,
            on_force=progress.forced,
        )
        asyncio.run(serving)


app.command(epilog="Example: tandem start --head --redis-url redis://10.0.0.1:6379 --node-ip 10.0.0.1")(friendly(start))
app.command(epilog="Example: tandem router --config cluster.yaml --redis-url redis://10.0.0.9:6379")(friendly(router))
app.command(epilog="Example: tandem probe --node-ip 10.0.0.2 --for live")(friendly(probe))


@app.command(epilog="Example: tandem generate 'The capital of France is' --max-tokens 16 --temperature 0")
@friendly
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    messages: MessagesOption = False,
) -> None:
    """Continue a text; the answer streams to stdout."""
    from cluster.client import default_endpoint, make_sampling
    from cluster.generate import run_generate

    sampling = make_sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    target = endpoint or default_endpoint()
    asyncio.run(run_generate(target, text, sampling, as_json=as_json, with_messages=messages))


@app.command(epilog="Example: tandem chat --temperature 0.7 --system 'Answer in one sentence.'")
@friendly
def chat(
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the whole conversation.")] = None,
    endpoint: EndpointOption = None,
) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D ends; from a pipe, each line is a question."""
    from cluster.chat import run_chat
    from cluster.client import default_endpoint, make_sampling

    sampling = make_sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    run_chat(endpoint or default_endpoint(), sampling, system=system)


@app.command(epilog="Example: tandem status --json")
@friendly
def status(
    endpoint: EndpointOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Processes, cores, all of each link.")] = False,
) -> None:
    """Show workers, pools, blocks, links and the transport in use."""
    from cluster.client import Client, default_endpoint

    if watch:
        from cluster.watch import run_watch

        run_watch(endpoint or default_endpoint(), interval_s=interval_s, as_json=as_json)
        return

    async def ask() -> Any:
        async with Client(endpoint or default_endpoint()) as client:
            return await client.status()

    answer = asyncio.run(ask())
    from cluster.console import make_console
    from cluster.status_view import as_data, print_status

    if as_json:
        typer.echo(json.dumps(as_data(answer), indent=2))
    else:
        print_status(answer, make_console(), verbose=verbose)


app.command(epilog="Example: tandem scale prefill=3 decode=2 --wait")(friendly(scale))
app.command(epilog="Example: tandem drain decode-1 --wait")(friendly(drain))
app.command(epilog="Example: tandem restart decode --wait")(friendly(restart))


@app.command(epilog="Example: tandem doctor --config cluster.yaml")
@friendly
def doctor(
    config: ConfigOption = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this check alone; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at this host: can it run the cluster as configured? Says what is wrong and what to do; 1 for a problem."""
    from cluster.checks.finding import Settings
    from cluster.checks.table import choose
    from cluster.config_file import load_config
    from cluster.console import make_console
    from cluster.display import CheckProgress
    from cluster.doctor import as_data, has_problem, print_findings, run_checks

    settings, specs = Settings(config=load_config(config, {})), choose(only or [])
    with CheckProgress(make_console(stderr=True), total=len(specs)) as progress:
        findings = run_checks(settings, specs, on_done=progress.done)
    if as_json:
        typer.echo(json.dumps(as_data(findings), indent=2))
    else:
        print_findings(findings, make_console())
    if has_problem(findings):
        raise typer.Exit(1)


@app.command(epilog="Example: tandem demo --transport shm")
@friendly
def demo(
    config: ConfigOption = None,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    transport: TransportOption = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
    messages: MessagesOption = False,
) -> None:
    """Start a cluster on free ports, send five prompts at once, show where their time went, and stop it."""
    from cluster.config_file import load_config
    from cluster.preflight import check_start, warn, warnings

    settings = load_config(config, _overrides(model, prefill, decode, transport, grpc_port=0, http_port=0))
    check_start(settings)

    from cluster.demo import run_demo

    warn(warnings(settings))
    _log_to_stderr(verbose)
    asyncio.run(run_demo(settings, verbose=verbose, as_json=as_json, with_messages=messages))


def main() -> None:
    """Entry point of the installed command."""
    if not {"-v", "--verbose"} & set(sys.argv):
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is loaded; what it writes is for its developers
    try:
        app(prog_name="tandem")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is stopped; the interpreter ends in peace


if __name__ == "__main__":
    main()
