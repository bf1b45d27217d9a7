"""Makes a transport by its name in the configuration."""

from __future__ import annotations

import logging

import torch

from kv_transfer.segments import HOST
from kv_transfer.transport import Transport
from tandem.config import TransportName
from tandem.errors import TransportError
from tandem.types import WorkerId

logger = logging.getLogger(__name__)

_CANDIDATES: tuple[TransportName, ...] = ("shm", "ucx", "collective")
"""What "auto" chooses from. Shared memory comes first: its memory is what all of them can move."""
_GPU_CANDIDATES: tuple[TransportName, ...] = ("ucx", "collective")


def candidates(device: torch.device) -> tuple[TransportName, ...]:
    """What "auto" chooses from for KV on `device`; memory comes from the first."""
    return _CANDIDATES if device.type == "cpu" else _GPU_CANDIDATES


def make_transport(
    name: TransportName, *, worker_id: WorkerId, host: str = "127.0.0.1", device: torch.device = HOST
) -> Transport:
    """A running transport for KV on `device`; `host` is the address at which peers reach this process.

    Raises TransportError when what it needs is not installed or not usable here, or does not move memory of `device`.
    """
    match name:
        case "shm":
            from kv_transfer.loopback import ShmTransport

            if device.type != "cpu":
                raise TransportError(
                    f"shm moves memory of the host, and KV is on {device}: choose ucx, collective or auto",
                    param="transfer.transport",
                )
            return ShmTransport(worker_id=worker_id)
        case "ucx":
            from kv_transfer.ucx import UcxTransport

            return UcxTransport(worker_id=worker_id, device=device)
        case "collective":
            from kv_transfer.collective import CollectiveTransport

            return CollectiveTransport(worker_id=worker_id, host=host, device=device)
        case "auto":
            return _make_auto(worker_id, host, device)


def _make_auto(worker_id: WorkerId, host: str, device: torch.device) -> Transport:
    from kv_transfer.auto import AutoTransport

    made: dict[str, Transport] = {}
    for name in candidates(device):
        try:
            made[name] = make_transport(name, worker_id=worker_id, host=host, device=device)
        except TransportError as exc:
            logger.warning("auto goes without %s: %s", name, exc.message)
    if not made:
        raise TransportError(f"no transport for memory of {device} works here")
    return AutoTransport(made)
