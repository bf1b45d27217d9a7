"""What the transport tests need at both ends: headers, a sink that records, and a peer in a process of its own.

`first_block` of a header is used as the byte offset at which the payload is placed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch

from kv_transfer import ucx
from kv_transfer.digest import digest
from kv_transfer.transport import MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.config import TransportName
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
    """A process that serves (and checks digests) or sends without end, and answers over a pipe.

    Forked from a server that has imported everything, so that starting one is quick; killed at the end of the block.
    """

    def __init__(self, kind: str, role: str, *arguments: str) -> None:
        self._channel, remote = _FORKS.Pipe()
        self._process = _FORKS.Process(target=_run, args=(remote, kind, role, *arguments))
        self._process.start()
        remote.close()

    def read(self) -> str:
        """The next thing that the peer said."""
        assert self._channel.poll(TIMEOUT_S), "the peer says nothing"
        return str(self._channel.recv())

    def address(self) -> bytes:
        return bytes.fromhex(self.read())

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Stops it as SIGSTOP does: it lives, and takes no part in anything."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT_S
        while not self.is_stopped():
            assert time.monotonic() < deadline, "the peer goes on"
            time.sleep(0.001)

    def is_stopped(self) -> bool:
        """Whether it is, by the kernel's word."""
        state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("T", "t")

    def wait(self) -> None:
        """Until the process has ended."""
        self._process.join(TIMEOUT_S)
        assert not self._process.is_alive()

    def finish(self) -> str:
        """Ends a serving peer; returns what it then said."""
        self._channel.send("finish")
        return self.read()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self.wait()
        self._process.close()
        self._channel.close()


FAR_UCX = "ucx from another host"
"""A peer that says so: UCX then joins it as it joins other hosts, over TCP and with endpoint error handling."""


def name_of(kind: str) -> TransportName:
    """The transport's name in a peer's kind."""
    return cast(TransportName, kind.partition(" ")[0])


def _move_away() -> None:
    here = ucx.own_identity()
    ucx.own_identity = lambda: replace(here, host=b"another host".ljust(16))


def _run(channel: Connection, kind: str, role: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if kind == FAR_UCX:
        _move_away()
    transport = make_transport(name_of(kind), worker_id=WorkerId(role))
    try:
        if role == "serve":
            _serve(transport, int(arguments[0]), channel)
        elif role == "send one":
            _send_one(transport, *map(bytes.fromhex, arguments), channel=channel)
        else:
            _send(transport, bytes.fromhex(arguments[0]), int(arguments[1]), int(arguments[2]), channel)
    finally:
        transport.close()


def _serve(transport: Transport, num_bytes: int, channel: Connection) -> None:
    sink = RecordingSink(transport.allocate(num_bytes))
    transport.serve(sink)
    channel.send(transport.address().hex())
    channel.recv()
    transport.close()
    errors = sum(error is not None for _, error in sink.landings)
    channel.send(f"{len(sink.placed)} placed, {len(sink.landings)} landed, {errors} errors")


def _send(transport: Transport, address: bytes, num_bytes: int, count: int, channel: Connection) -> None:
    """Sends `count` messages over and over, at successive offsets, until the process is killed; once for count < 0."""
    source = transport.allocate(num_bytes)
    source.copy_(torch.arange(num_bytes) % 251)
    link = transport.connect(address)
    rounds = 1 if count < 0 else 1 << 30
    for round_number in range(rounds):
        sends = [
            link.send(make_header([source], i * num_bytes, layer=round_number), [source]) for i in range(abs(count))
        ]
        for send in sends:
            send.result()
    link.close()
    channel.send("sent")


def _send_one(transport: Transport, address: bytes, packed: bytes, *, channel: Connection) -> None:
    """One message of a packed header, each byte of it a 7; then says so, though nobody wanted it any more."""
    header = MessageHeader.unpack(packed)
    source = transport.allocate(header.num_bytes).fill_(7)
    link = transport.connect(address)
    wait([link.send(header, [source])])
    link.close()
    channel.send("sent")


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.kv_transfer.peers", "kv_transfer.loopback", "kv_transfer.ucx"])


def stop_forks() -> None:
    """Ends the process that peers are forked from; the next peer starts another."""
    forkserver._forkserver._stop()
