"""What would fail anyway, found before anything is started: the model, and the router's address and ports.

And what works, but not as its user may think.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from cluster.placement import gpus_of_all
from cluster.processes import usable_cores
from tandem.config import ClusterConfig, RouterConfig
from tandem.errors import ClusterError, ConfigError
from tandem.model.check import check_model
from tandem.model.native import check_choice

_FEWER_GPUS = "lower prefill.gpus_per_rank and decode.gpus_per_rank, or start fewer workers"


def check_start(config: ClusterConfig, *, has_port_options: bool = True) -> None:
    """Raises ModelLoadError, ConfigError or ClusterError, with what to do: give an option, or change a field.

    Takes no time and starts nothing.
    """
    check_choice()
    pools = (config.prefill, config.decode)
    check_model(config.model.source, [(pool.tensor_parallel, pool.pipeline_parallel) for pool in pools])
    check_ports(config.router, has_port_options=has_port_options)


def gpus_here(*, dev_dir: str = "/dev", visible: str | None = None) -> int:
    """NVIDIA GPUs of this host, or as many as `visible` names in the manner of CUDA_VISIBLE_DEVICES."""
    found = sum(1 for _ in Path(dev_dir).glob("nvidia[0-9]*"))
    return found if visible is None else min(found, len([name for name in visible.split(",") if name.strip()]))


def check_gpus(config: ClusterConfig, *, num_gpus: int) -> None:
    """Whether the workers of a cluster of one machine find GPUs enough: else they would wait for them for ever.

    Raises ConfigError.
    """
    wanted = gpus_of_all(config)
    if config.model.device == "cuda" and wanted > num_gpus:
        remedy = _FEWER_GPUS if num_gpus else "set it to cpu or auto; tandem doctor says what it finds of GPUs"
        raise ConfigError(
            f"model.device is cuda: workers ask for {wanted:g} GPUs, this machine has {num_gpus}: {remedy}",
            param="model.device",
        )


def warnings(config: ClusterConfig, *, num_gpus: int = 0) -> list[str]:
    """What its user should know before the start, on a machine with so many GPUs."""
    wanted = gpus_of_all(config)
    if config.model.device == "auto" and 0 < num_gpus < wanted:
        few = f"{wanted:g} GPUs would be needed, this machine has {num_gpus}: workers compute on the CPU"
        return [f"{few}; to change that, {_FEWER_GPUS}", *_shared_cores(config)]
    return [] if config.model.device != "cpu" and num_gpus else _shared_cores(config)


def _shared_cores(config: ClusterConfig) -> list[str]:
    prefill, decode, cores = config.prefill.num_workers, config.decode.num_workers, len(usable_cores())
    if prefill * config.prefill.num_ranks + decode * config.decode.num_ranks <= cores:
        return []
    shared = "one core" if cores == 1 else f"{cores} cores"
    return [f"{prefill} prefill and {decode} decode workers share {shared}: they slow each other down"]


def warn(texts: Iterable[str]) -> None:
    """One line each on stderr."""
    for text in texts:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def check_ports(router: RouterConfig, *, has_port_options: bool) -> None:
    """Whether the router could listen now. Raises ClusterError."""
    for name in ("grpc_port", "http_port", "health_port"):
        port = getattr(router, name)
        has_option = has_port_options and name != "health_port"
        cure = f"give --{name.replace('_', '-')}" if has_option else f"set router.{name}"
        try:
            _bind(router.host, port)
        except OSError as exc:
            raise ClusterError(_why(exc, router.host, port, cure=cure)) from exc


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def _why(error: OSError, host: str, port: int, *, cure: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"router.host {host!r} is no address: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"router.host {host} is not an address of this host"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use, perhaps by another cluster; {cure} (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user; {cure} (0 takes a free one)"
    return f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}"
