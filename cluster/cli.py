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
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, get_args

import typer

from cluster.access_options import with_access
from cluster.cache_commands import COMMANDS as CACHE_COMMANDS
from cluster.client_commands import MessagesOption, chat, generate, status, try_connection
from cluster.controller_command import controller
from cluster.echo_group import EchoGroup
from cluster.node_commands import drain_node, node_metrics, probe
from cluster.options import ConfigOption, JsonOption
from cluster.pool_commands import drain, restart, scale
from cluster.router_command import router
from cluster.serve import StoppedBySignal
from cluster.simulate_command import simulate
from cluster.start_command import start
from tandem.config import TransportName
from tandem.errors import ConfigError, TandemError

if TYPE_CHECKING:
    from cluster.cluster_info import ClusterInfo

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

TRANSPORTS = get_args(TransportName)
ModelOption = Annotated[str | None, typer.Option("--model", help="A known model's name, a .gguf file or a directory.")]
PrefillOption = Annotated[int | None, typer.Option("--prefill", help="Prefill workers.")]
DecodeOption = Annotated[int | None, typer.Option("--decode", help="Decode workers.")]
TransportOption = Annotated[str | None, typer.Option("--transport", help=f"How KV moves: {', '.join(TRANSPORTS)}.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show all logs and where the start-up time goes.")]


IN_THE_CLEAR = dict.fromkeys(
    (f"router.{name}" for name in ("tls_cert_file", "tls_key_file", "tls_client_ca_file", "api_keys_file")), ""
)
"""For a router that serves only the command that started it."""


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
    from cluster.preflight import check_gpus, check_start, gpus_here, warn, warnings

    overrides = _overrides(model, prefill, decode, transport, grpc_port=grpc_port, http_port=http_port)
    settings = load_config(config, overrides)
    check_start(settings)
    num_gpus = gpus_here(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    check_gpus(settings, num_gpus=num_gpus)

    from cluster.console import make_console
    from cluster.display import ConsoleProgress, startup_table
    from cluster.launch import ClusterLauncher
    from cluster.ready import print_ready
    from cluster.serve import serve

    _log_to_stderr(verbose)
    console = make_console(stderr=True)
    warn(warnings(settings, num_gpus=num_gpus))
    with ConsoleProgress(console) as progress:

        async def on_ready(info: ClusterInfo) -> None:
            progress.pause()
            if verbose:
                console.print(startup_table(info))
            print_ready(info, settings)

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
app.command(epilog="Example: tandem controller --ray-address 10.0.0.1:6379 --redis-url redis://10.0.0.9:6379")(
    friendly(controller)
)
app.command(epilog="Example: tandem probe --node-ip 10.0.0.2 --for live")(friendly(probe))
app.command(epilog="Example: tandem drain-node --node-ip 10.0.0.2 --timeout 120")(friendly(drain_node))
app.command(epilog="Example: tandem node-metrics --node-ip 10.0.0.2 --metrics-port 9400")(friendly(node_metrics))


app.command(epilog="Example: tandem generate 'The capital of France is' --max-tokens 16 --temperature 0")(
    friendly(with_access(generate))
)
app.command(epilog="Example: tandem chat --temperature 0.7 --system 'Answer in one sentence.'")(
    friendly(with_access(chat))
)
app.command(epilog="Example: tandem status --json")(friendly(with_access(status)))
app.command("test-connection", epilog="Example: tandem test-connection --endpoint 10.0.0.1:50051")(
    friendly(with_access(try_connection))
)
app.command(epilog="Example: tandem scale prefill=3 decode=2 --wait")(friendly(with_access(scale)))
app.command(epilog="Example: tandem drain decode-1 --wait")(friendly(with_access(drain)))
app.command(epilog="Example: tandem restart decode --wait")(friendly(with_access(restart)))

cache_app = typer.Typer(cls=EchoGroup, help="What is cached where, and what to do with it.", no_args_is_help=True)
for name, (command, arguments) in CACHE_COMMANDS.items():
    cache_app.command(name, epilog=f"Example: tandem cache {name} {arguments}")(friendly(with_access(command)))
app.add_typer(cache_app, name="cache")

app.command(epilog="Example: tandem simulate --workers 8 --rate 12 --ttft-slo 1")(friendly(simulate))


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
        findings = run_checks(settings, specs, on_start=progress.started, on_done=progress.done)
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
    from cluster.preflight import check_gpus, check_start, gpus_here, warn, warnings

    overrides = _overrides(model, prefill, decode, transport, grpc_port=0, http_port=0, health_port=0)
    settings = load_config(config, overrides | IN_THE_CLEAR)
    check_start(settings)
    num_gpus = gpus_here(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    check_gpus(settings, num_gpus=num_gpus)

    from cluster.demo import run_demo

    warn(warnings(settings, num_gpus=num_gpus))
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
