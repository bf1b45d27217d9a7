"""Makes a transport by its name in the configuration."""

from __future__ import annotations

import logging

from kv_transfer.transport import Transport
from tandem.config import TransportName
from tandem.errors import TransportError
from tandem.types import WorkerId

logger = logging.getLogger(__name__)

_CANDIDATES: tuple[TransportName, ...] = ("shm", "ucx", "collective")
"""What "auto" chooses from. Shared memory comes first: its memory is what all of them can move."""


def make_transport(name: TransportName, *, worker_id: WorkerId, host: str = "127.0.0.1") -> Transport:
    """A running transport; `host` is the address at which peers reach this process.

    Raises TransportError when what it needs is not installed or not usable here.
    """
    match name:
        case "shm":
            from kv_transfer.loopback import ShmTransport

            return ShmTransport(worker_id=worker_id)
        case "ucx":
            from kv_transfer.ucx import UcxTransport

            return UcxTransport(worker_id=worker_id)
        case "collective":
            from kv_transfer.collective import CollectiveTransport

            return CollectiveTransport(worker_id=worker_id, host=host)
        case "auto":
            return _make_auto(worker_id, host)


def _make_auto(worker_id: WorkerId, host: str) -> Transport:
    from kv_transfer.auto import AutoTransport

    made: dict[str, Transport] = {}
    for name in _CANDIDATES:
        try:
            made[name] = make_transport(name, worker_id=worker_id, host=host)
        except TransportError as exc:
            logger.warning("auto goes without %s: %s", name, exc.message)
    if not made:
        raise TransportError("no transport works here")
    return AutoTransport(made)
