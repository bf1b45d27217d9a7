"""What the transport tests need at both ends: headers, a sink that records, and a peer in a process of its own.

`first_block` of a header is used as the byte offset at which the payload is placed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from typing import IO

import torch

from kv_transfer.digest import digest
from kv_transfer.transport import MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.errors import TransportError
from tandem.types import Epoch, HandoffId, WorkerId

HANDOFF = HandoffId("0123456789abcdef" * 2)
TIMEOUT_S = 20.0


def make_header(
    segments: Sequence[torch.Tensor], offset: int = 0, *, layer: int = 0, with_digest: bool = True
) -> MessageHeader:
    return MessageHeader(
        handoff_id=HANDOFF,
        epoch=Epoch(7),
        layer=layer,
        first_block=offset,
        num_blocks=1,
        num_bytes=sum(segment.numel() for segment in segments),
        digest=digest(segments) if with_digest else 0,
    )


def cut(memory: torch.Tensor, piece_bytes: int | None) -> list[torch.Tensor]:
    """`memory` in pieces of `piece_bytes`, last piece first; in one piece for None."""
    return [memory] if piece_bytes is None else list(memory.split(piece_bytes))[::-1]


class RecordingSink:
    """Places payloads in `memory` at the header's offset and remembers what it was told."""

    def __init__(self, memory: torch.Tensor, *, piece_bytes: int | None = None) -> None:
        self.memory = memory
        self.piece_bytes = piece_bytes
        self.refusing = False
        self.refused_layers: set[int] = set()
        self.placed: list[MessageHeader] = []
        self.landings: list[tuple[MessageHeader, TransportError | None]] = []
        self._changed = threading.Condition()

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor] | None:
        with self._changed:
            if self.refusing or header.layer in self.refused_layers:
                return None
            self.placed.append(header)
            self._changed.notify_all()
        return self.segments(header)

    def segments(self, header: MessageHeader) -> list[torch.Tensor]:
        return cut(self.memory[header.first_block : header.first_block + header.num_bytes], self.piece_bytes)

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        with self._changed:
            self.landings.append((header, error))
            self._changed.notify_all()

    def refuse(self) -> None:
        with self._changed:
            self.refusing = True

    def wait_landed(self, count: int) -> list[TransportError | None]:
        """The outcomes, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.landings) >= count, TIMEOUT_S), "messages did not land"
            return [error for _, error in self.landings]

    def wait_placed(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.placed) >= count, TIMEOUT_S), "messages did not come"


class Peer:
    """A process that serves (and checks digests) or sends without end, and answers on its standard output."""

    def __init__(self, transport: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.kv_transfer.peers", transport, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        """The next line that the peer wrote."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def address(self) -> bytes:
        return bytes.fromhex(self.read())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def finish(self) -> str:
        """Ends the peer by closing its input; returns what it still wrote."""
        return self.process.communicate(timeout=TIMEOUT_S)[0].strip()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


def _serve(transport: Transport, num_bytes: int, commands: IO[str]) -> None:
    sink = RecordingSink(transport.allocate(num_bytes))
    transport.serve(sink)
    print(transport.address().hex(), flush=True)
    commands.read()
    transport.close()
    errors = sum(error is not None for _, error in sink.landings)
    print(f"{len(sink.placed)} placed, {len(sink.landings)} landed, {errors} errors", flush=True)


def _send(transport: Transport, address: bytes, num_bytes: int, count: int) -> None:
    """Sends `count` messages over and over, at successive offsets, until the process is killed; once for count < 0."""
    source = transport.allocate(num_bytes)
    source.copy_(torch.arange(num_bytes) % 251)
    link = transport.connect(address)
    rounds = 1 if count < 0 else 1 << 30
    for round_number in range(rounds):
        sends = [
            link.send(make_header([source], i * num_bytes, layer=round_number), [source]) for i in range(abs(count))
        ]
        wait(sends)
        for send in sends:
            send.result()
    print("sent", flush=True)
    link.close()


def main() -> None:
    torch.set_num_threads(1)
    name, role, *rest = sys.argv[1:]
    transport = make_transport(name, worker_id=WorkerId(role))  # type: ignore[arg-type]
    try:
        if role == "serve":
            _serve(transport, int(rest[0]), sys.stdin)
        else:
            _send(transport, bytes.fromhex(rest[0]), int(rest[1]), int(rest[2]))
    finally:
        transport.close()


if __name__ == "__main__":
    main()
