"""Options that several commands have, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.redis_access import CA_VARIABLE, PASSWORD_VARIABLE, URL_VARIABLE

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML or JSON file; options override it.")]
RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar=URL_VARIABLE,
        help=f"The cluster's Redis. Its password is better in ${PASSWORD_VARIABLE}, its CA's file in ${CA_VARIABLE}.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", envvar="TANDEM_CLUSTER", help="Name of the cluster in that Redis. Default: tandem."),
]
ReadyFileOption = Annotated[Path | None, typer.Option("--ready-file", help="Written (JSON) once it is up.")]
SizesFileOption = Annotated[
    Path | None,
    typer.Option("--sizes-file", help="File with 'prefill: N' and 'decode: N'; pools follow its changes."),
]
MetricsPortOption = Annotated[
    int | None, typer.Option("--metrics-port", min=0, max=65535, help="Where /metrics is served; 0 takes a free port.")
]
"""The default differs."""
THIS_NODE_HELP = "Address of this node, as its workers are registered."
ThisNodeOption = Annotated[str, typer.Option("--node-ip", help=THIS_NODE_HELP)]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show all logs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
