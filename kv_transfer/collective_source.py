"""The receiving half of the torch.distributed transport: one connected source, its group, and a buffer between.

A receive of torch.distributed cannot be taken back, so it never goes into placed memory: a payload is received whole,
then placed, copied and reported in one go. Nothing of a handoff is written outside of that, which is what makes
`quiesce` exact.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from kv_transfer import device_memory, placing
from kv_transfer.collective_wire import ACK, receive_header, receive_hello
from kv_transfer.digest import digest
from kv_transfer.group import OPEN_TIMEOUT_S, Group
from kv_transfer.segments import check_digest
from kv_transfer.transport import MessageHeader, Sink
from tandem.errors import LinkClosed, TransportError
from tandem.types import HandoffId

logger = logging.getLogger(__name__)

OpenGroup = Callable[[socket.socket, str], Group]


class Writers:
    """Which handoffs are being written into right now, by which source; who waits for that to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing: list[HandoffId] = []
        self._waiting: list[tuple[HandoffId, Future[None]]] = []

    def begin(self, handoff_id: HandoffId) -> None:
        """Before the sink is asked where to write."""
        with self._lock:
            self._writing.append(handoff_id)

    def end(self, handoff_id: HandoffId) -> None:
        """After the sink was told."""
        with self._lock:
            self._writing.remove(handoff_id)
            over = [entry for entry in self._waiting if entry[0] not in self._writing]
            self._waiting = [entry for entry in self._waiting if entry[0] in self._writing]
        for _, future in over:
            future.set_result(None)

    def when_quiet(self, handoff_id: HandoffId) -> Future[None]:
        """Resolves when nobody writes into this handoff."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if handoff_id in self._writing:
                self._waiting.append((handoff_id, future))
                return future
        future.set_result(None)
        return future


class CollectiveSource:
    """One connection of a peer that sends to us, on a thread of its own."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        sink: Sink,
        writers: Writers,
        device: torch.device,
        on_closed: Callable[[CollectiveSource], None],
    ) -> None:
        self._sock = sock
        self._sink = sink
        self._writers = writers
        self._device = device
        self._on_closed = on_closed
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._thread: threading.Thread | None = None

    def start(self, token: bytes, open_group: OpenGroup) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(
            target=self._run, args=(token, open_group), name="collective-receive", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Closes the connection; the thread ends. Any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was quicker

    def join(self, deadline_s: float) -> None:
        """Waits for the thread until `deadline_s` of the monotonic clock."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self, token: bytes, open_group: OpenGroup) -> None:
        try:
            self._sock.settimeout(OPEN_TIMEOUT_S)
            group = open_group(self._sock, receive_hello(self._sock, token))
            self._sock.settimeout(None)
            with device_memory.own_stream(self._device):
                while True:
                    self._take(receive_header(self._sock), group)
        except (LinkClosed, ConnectionError) as exc:
            logger.info("a source of the collective transport has closed its link: %s", exc)
        except (OSError, TransportError) as exc:
            logger.warning("closing a connection of the collective transport: %s", exc)
        finally:
            self._sock.close()
            self._on_closed(self)

    def _take(self, header: MessageHeader, group: Group) -> None:
        if self._staging.numel() < header.num_bytes:
            self._staging = torch.empty(header.num_bytes, dtype=torch.uint8, device=self._device)
        payload = self._staging[: header.num_bytes]
        group.receive(payload)
        self._writers.begin(header.handoff_id)
        try:
            targets = placing.place_tensors(self._sink, header, self._device)
            if targets is not None:
                placing.landed(self._sink, header, self._copy(header, targets, payload))
        finally:
            self._writers.end(header.handoff_id)
        self._sock.sendall(ACK)

    def _copy(
        self, header: MessageHeader, targets: list[torch.Tensor], payload: torch.Tensor
    ) -> TransportError | None:
        offset = 0
        for target in targets:
            target.copy_(payload[offset : offset + target.numel()])
            offset += target.numel()
        device_memory.finish(self._device)
        return check_digest(header.digest, digest(targets)) if header.digest else None
