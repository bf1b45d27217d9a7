"""Makes a transport by its name in the configuration."""

from __future__ import annotations

from kv_transfer.transport import Transport
from tandem.config import TransportName
from tandem.types import WorkerId


def make_transport(name: TransportName, *, worker_id: WorkerId) -> Transport:
    """A running transport. Raises TransportError when what it needs is not installed or not usable here."""
    if name == "shm":
        from kv_transfer.loopback import ShmTransport

        return ShmTransport(worker_id=worker_id)
    from kv_transfer.ucx import UcxTransport

    return UcxTransport(worker_id=worker_id)
