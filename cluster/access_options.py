"""The options of every command that asks a router: where it is, TLS, the API key. One decorator adds them all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar, get_type_hints

import typer

from cluster.access import API_KEY_VARIABLE, Access, default_endpoint, read_key

R = TypeVar("R")
P = ParamSpec("P")

_PARAMETER = "access"


def make_access(
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="Router to ask. Default: $TANDEM_ENDPOINT or 127.0.0.1:50051.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and trust the well-known CAs. Implied by the files below.")
    ] = False,
    tls_ca_file: Annotated[
        Path | None, typer.Option("--tls-ca-file", help="PEM file of the CAs that may have signed its certificate.")
    ] = None,
    tls_cert_file: Annotated[
        Path | None, typer.Option("--tls-cert-file", help="PEM file of our certificate, where routers ask for one.")
    ] = None,
    tls_key_file: Annotated[Path | None, typer.Option("--tls-key-file", help="PEM file of its key.")] = None,
    tls_server_name: Annotated[
        str, typer.Option("--tls-server-name", help="Name in its certificate, where it is reached by another one.")
    ] = "",
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key", envvar=API_KEY_VARIABLE, help="Where routers ask for one; better in the environment."
        ),
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="The same from a file, its first line.")
    ] = None,
) -> Access:
    """From the options. Raises ConfigError."""
    return Access(
        endpoint=endpoint or default_endpoint(),
        tls=tls,
        tls_ca_file=tls_ca_file,
        tls_cert_file=tls_cert_file,
        tls_key_file=tls_key_file,
        tls_server_name=tls_server_name,
        api_key=api_key if api_key_file is None else read_key(api_key_file),
    )


def with_access(command: Callable[..., R]) -> Callable[..., R]:
    """A command that has the options in place of its parameter `access`, and is called with what they say."""
    own = inspect.signature(command).parameters
    hints = get_type_hints(command, include_extras=True)
    added = inspect.signature(make_access, eval_str=True).parameters

    @functools.wraps(command)
    def wrapped(*args: object, **given: object) -> R:
        options = {name: given.pop(name) for name in added if name in given}
        return command(*args, **given, **{_PARAMETER: make_access(**options)})  # type: ignore[arg-type]

    kept = [parameter.replace(annotation=hints[name]) for name, parameter in own.items() if name != _PARAMETER]
    parameters = [*kept, *added.values()]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped
