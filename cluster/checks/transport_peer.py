"""The receiving process of the transport check: `python -m cluster.checks.transport_peer NAME NUM_BYTES FD`.

Writes its address to the descriptor, then a line for each message that landed: "ok" when it holds what was announced.
Serves until it is ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import torch

from kv_transfer.digest import digest
from kv_transfer.transport import MessageHeader
from kv_transfer.transports import make_transport
from tandem.config import TransportName
from tandem.errors import TransportError
from tandem.types import WorkerId


class _Sink:
    """Places every message at the start of `memory` and compares its digest."""

    def __init__(self, memory: torch.Tensor, fd: int) -> None:
        self._memory = memory
        self._fd = fd

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor]:
        return [self._memory[header.first_block : header.first_block + header.num_bytes]]

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        if error is not None:
            word = error.message
        else:
            word = "ok" if digest(self.place(header)) == header.digest else "the digest differs"
        os.write(self._fd, f"{word}\n".encode())


def main(name: TransportName, num_bytes: int, fd: int) -> None:
    """Serves until SIGTERM."""
    torch.set_num_threads(1)
    transport = make_transport(name, worker_id=WorkerId("doctor-destination"))
    try:
        transport.serve(_Sink(transport.allocate(num_bytes), fd))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.write(fd, f"{transport.address().hex()}\n".encode())
        signal.sigwait({signal.SIGTERM})
    finally:
        transport.close()


if __name__ == "__main__":
    main("shm" if sys.argv[1] == "shm" else "ucx", int(sys.argv[2]), int(sys.argv[3]))
