"""The sending half of the torch.distributed transport: a queue, a thread that sends, one for acknowledgements."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kv_transfer import device_memory
from kv_transfer.collective_wire import receive_exactly
from kv_transfer.group import Group
from kv_transfer.outbox import Outbox
from kv_transfer.segments import check_segments
from kv_transfer.transport import LinkStats, MessageHeader
from tandem.errors import LinkClosed, TransportError

_MAX_UNDER_WAY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Send:
    number: int
    header: MessageHeader
    segments: Sequence[torch.Tensor]
    wait_written: Callable[[], None]
    """Returns when what wrote the memory is done with it."""


class CollectiveLink:
    """One direction to one peer, over a group and a control socket that it owns. See `Link`."""

    transport = "collective"

    def __init__(
        self,
        sock: socket.socket,
        group: Group,
        *,
        detail: str,
        device: torch.device,
        on_closed: Callable[[CollectiveLink], None],
    ) -> None:
        self.detail = detail
        self._sock = sock
        self._group: Group | None = group
        self._device = device
        self._on_closed = on_closed
        self._outbox = Outbox()
        self._waiting: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._unanswered: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._window = threading.Semaphore(_MAX_UNDER_WAY)
        self._threads = [
            threading.Thread(target=self._send_all, name="collective-send", daemon=True),
            threading.Thread(target=self._take_acks, name="collective-acks", daemon=True),
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def send(self, header: MessageHeader, segments: Sequence[torch.Tensor]) -> Future[None]:
        number, future = self._outbox.open(header.num_bytes)
        if number is None:
            return future
        try:
            check_segments(segments, header.num_bytes, self._device)
        except TransportError as error:
            self._outbox.finish(number, error)
            return future
        wait_written = device_memory.mark(self._device)
        self._waiting.put(_Send(number=number, header=header, segments=segments, wait_written=wait_written))
        return future

    def stats(self) -> LinkStats:
        return self._outbox.stats()

    def close(self) -> None:
        self.end("the link was closed")

    def end(self, reason: str) -> None:
        """Fails what is unfinished and lets the threads end. Does not wait for them. Any thread."""
        was_open = not self._outbox.closed
        self._outbox.close(reason)
        if was_open:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was quicker
            self._window.release()
            self._waiting.put(None)
            self._on_closed(self)

    def join(self, deadline_s: float) -> None:
        """Waits for the threads until `deadline_s` of the monotonic clock."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _send_all(self) -> None:
        try:
            with device_memory.own_stream(self._device):
                while (send := self._waiting.get()) is not None:
                    self._window.acquire()
                    if self._outbox.closed:
                        return
                    self._send(send)
        except (OSError, RuntimeError, TransportError) as exc:  # the second: torch's, for a GPU without memory
            self.end(f"the peer is gone: {exc}")
        finally:
            self._group = None  # ends it, and with it its connection
            self._sock.close()

    def _send(self, send: _Send) -> None:
        assert self._group is not None
        send.wait_written()
        payload = send.segments[0]
        if len(send.segments) > 1:
            payload = torch.cat(list(send.segments))
            self._outbox.gathered()
        self._unanswered.put(send.number)
        self._sock.sendall(send.header.pack())
        self._group.send(payload)

    def _take_acks(self) -> None:
        try:
            while True:
                receive_exactly(self._sock, 1)
                self._outbox.finish(self._unanswered.get_nowait())
                self._window.release()
        except (LinkClosed, queue.Empty) as exc:
            self.end(f"the peer is gone: {exc}")
