"""A transport that misbehaves on purpose, around a real one: for tests of what survives a bad fabric."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import StrEnum

import torch

from kv_transfer.probe import PROBE_ID
from kv_transfer.transport import Link, LinkStats, MessageHeader, Sink, Transport
from tandem.errors import LinkClosed, TransportError
from tandem.types import HandoffId


class Fault(StrEnum):
    """What happens to one message."""

    NONE = "none"
    DROP = "drop"
    """Never arrives; the sender is told that its memory is free, as a lossy fabric would."""
    CORRUPT = "corrupt"
    """Arrives with one byte changed and the header's digest as it was."""
    DUPLICATE = "duplicate"
    """Arrives twice."""
    DELAY = "delay"
    """Held back until `FaultyTransport.release`."""


FaultPolicy = Callable[[MessageHeader, int], Fault]
"""Chooses the fault of a message from its header and its index among all messages sent so far."""


class FaultyLink:
    """A `Link` whose messages, but for probes, pass through the transport's policy."""

    def __init__(self, link: Link, owner: FaultyTransport) -> None:
        self._link = link
        self._owner = owner

    @property
    def transport(self) -> str:
        return self._link.transport

    @property
    def detail(self) -> str:
        return f"{self._link.detail} (faulty)"

    def send(self, header: MessageHeader, segments: Sequence[torch.Tensor]) -> Future[None]:
        if header.handoff_id == PROBE_ID:
            return self._link.send(header, segments)
        fault = self._owner.next_fault(header)
        if fault is Fault.DROP:
            dropped: Future[None] = Future()
            dropped.set_result(None)
            return dropped
        if fault is Fault.CORRUPT:
            return self._link.send(header, [_corrupted(segments)])
        if fault is Fault.DUPLICATE:
            self._link.send(header, [torch.cat(list(segments))])
        if fault is Fault.DELAY:
            return self._owner.hold(self._link, header, segments)
        return self._link.send(header, segments)

    def stats(self) -> LinkStats:
        return self._link.stats()

    def close(self) -> None:
        self._owner.discard(self._link)
        self._link.close()


class FaultyTransport:
    """A `Transport` around a real one. Everything but sending is the real one's."""

    def __init__(self, inner: Transport, policy: FaultPolicy) -> None:
        self._inner = inner
        self._policy = policy
        self._lock = threading.Lock()
        self._count = 0
        self._held: list[tuple[Link, MessageHeader, Sequence[torch.Tensor], Future[None]]] = []

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def num_held(self) -> int:
        """Messages that wait for `release`."""
        return len(self._held)

    def next_fault(self, header: MessageHeader) -> Fault:
        """The policy's word on the next message."""
        with self._lock:
            index, self._count = self._count, self._count + 1
        return self._policy(header, index)

    def hold(self, link: Link, header: MessageHeader, segments: Sequence[torch.Tensor]) -> Future[None]:
        """Keeps a message back."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._held.append((link, header, segments, future))
        return future

    def release(self, shuffle: random.Random | None = None) -> None:
        """Sends everything that was held back, in order or shuffled."""
        with self._lock:
            held, self._held = self._held, []
        if shuffle is not None:
            shuffle.shuffle(held)
        for link, header, segments, future in held:
            link.send(header, segments).add_done_callback(lambda sent, future=future: _pass_on(sent, future))

    def discard(self, link: Link) -> None:
        """Fails what is held back for a link that is being closed."""
        with self._lock:
            ended = [entry for entry in self._held if entry[0] is link]
            self._held = [entry for entry in self._held if entry[0] is not link]
        for *_, future in ended:
            future.set_exception(LinkClosed("the link was closed"))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._inner.allocate(num_bytes)

    def lend(self, fd: int, memory: torch.Tensor) -> None:
        self._inner.lend(fd, memory)

    def address(self) -> bytes:
        return self._inner.address()

    def serve(self, sink: Sink) -> None:
        self._inner.serve(sink)

    def connect(self, address: bytes) -> FaultyLink:
        return FaultyLink(self._inner.connect(address), self)

    def quiesce(self, handoff_id: HandoffId) -> Future[None]:
        return self._inner.quiesce(handoff_id)

    def close(self) -> None:
        for link in {id(entry[0]): entry[0] for entry in self._held}.values():
            self.discard(link)
        self._inner.close()


class HeldUpTransport(FaultyTransport):
    """A transport that stands still with a message placed and no byte of it written, until the test says `go`.

    That is the moment in which a handoff, or a fetch, must not take its memory for free.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, lambda header, index: Fault.NONE)
        self.placed = threading.Event()
        self._may_go_on = threading.Event()

    def go(self) -> None:
        """Writes what was placed, and holds nothing up any more."""
        self._may_go_on.set()

    def serve(self, sink: Sink) -> None:
        super().serve(_HeldUpSink(sink, self))

    def wait(self) -> None:
        """On the transport's thread."""
        self.placed.set()
        self._may_go_on.wait()

    def close(self) -> None:
        self.go()
        super().close()


class _HeldUpSink:
    """A `Sink` around the real one."""

    def __init__(self, sink: Sink, transport: HeldUpTransport) -> None:
        self._sink = sink
        self._transport = transport

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor] | None:
        placed = self._sink.place(header)
        if placed is not None and header.handoff_id != PROBE_ID:
            self._transport.wait()
        return placed

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        self._sink.landed(header, error)


def _corrupted(segments: Sequence[torch.Tensor]) -> torch.Tensor:
    payload = torch.cat(list(segments))
    payload[payload.numel() // 2] ^= 0xFF
    return payload


def _pass_on(sent: Future[None], future: Future[None]) -> None:
    error = sent.exception()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
