"""The UCX transport ("ucx"): tagged messages through UCXX, driven by one event-driven thread.

One worker and one thread per transport; the thread sleeps on the worker's file descriptor. On one host, endpoints are
opened without UCX's error handling, because with it UCX would leave shared memory and cma out; a dead peer is then
seen through its pidfd. To other hosts error handling is on, and where UCX_TLS has nothing of the kind: without it,
closing an endpoint over TCP or a fabric waits for a peer that is gone, for ever.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import select
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import torch

from kv_transfer import device_memory
from kv_transfer.host import open_process, own_identity
from kv_transfer.progress import ProgressThread
from kv_transfer.segments import HOST
from kv_transfer.staging import StagingPool
from kv_transfer.transport import Sink
from kv_transfer.ucx_endpoints import EndpointPool
from kv_transfer.ucx_link import UcxLink
from kv_transfer.ucx_native import Worker
from kv_transfer.ucx_receiver import UcxReceiver
from kv_transfer.ucx_wire import NONCE_BITS, Hello, pack_address, unpack_address
from tandem.errors import LinkClosed, TransportError
from tandem.types import HandoffId, WorkerId

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_DRAIN_S = 0.5
_PROGRESS_STEPS = 64
_PATIENCE_S = 1.0
"""Longest sleep while something is under way, should UCX ever miss an event."""


class _Engine:
    """What the progress thread drives. `links` and `receiver` change on that thread only."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.links: list[UcxLink] = []
        self.receiver: UcxReceiver | None = None
        self.running = True

    def turn(self) -> bool:
        if not self.running:
            return False
        moved = self._progress()
        for link in self.links:
            moved = link.advance() or moved
        self.links = [link for link in self.links if not link.finished]
        if self.receiver is not None:
            moved = self.receiver.advance() or moved
        return moved

    def _progress(self) -> bool:
        """A bounded number of steps, so that posted calls and other descriptors get their turn."""
        for step in range(_PROGRESS_STEPS):
            if not self.worker.progress():
                return step > 0
            if self.receiver is not None:
                self.receiver.digest_completed()
        return True

    def drain(self, timeout_s: float) -> None:
        """Turns until nothing moves any more that could without the peers, but no longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.turn() and not (self.receiver is not None and self.receiver.fetching):
                return

    def arm(self) -> bool:
        return not self.running or self.worker.arm()

    def patience_s(self) -> float | None:
        return None if self.idle() else _PATIENCE_S

    def idle(self) -> bool:
        return all(link.idle for link in self.links) and (self.receiver is None or self.receiver.idle)


class UcxTransport:
    """See `kv_transfer.transport.Transport`. `tls` is UCX's list of transports; None takes UCX_TLS or the default.

    With a CUDA `device`, `allocate` gives memory of it, and segments there are sent and placed as they lie.
    """

    name = "ucx"

    def __init__(self, *, worker_id: WorkerId, tls: str | None = None, device: torch.device = HOST) -> None:
        device_memory.prepare_thread(device)
        worker = Worker(tls, cuda=device != HOST)
        self._device = device
        self._engine = _Engine(worker)
        self._identity = own_identity()
        self._address = pack_address(self._identity, worker.address())
        self._lock = threading.Lock()
        self._closed = False
        self._serving = False
        self._staging = StagingPool()
        self._thread = ProgressThread(f"ucx-{worker_id}", self._engine)
        self._endpoints = EndpointPool(worker, self._thread)
        self._thread.register(worker.fd, select.EPOLLIN, lambda _: None)
        self._thread.post(lambda: device_memory.take_thread(device))
        self._thread.start()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Private memory in huge pages where the kernel has them: peers read it page by page.

        Raises TransportError when there is no memory for it or the transport is closed.
        """
        with self._lock:
            self._check_open()
        try:
            if self._device != HOST:
                return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError, RuntimeError) as exc:
            raise TransportError(f"{num_bytes} bytes of memory cannot be had: {exc}") from exc
        return torch.frombuffer(memory, dtype=torch.uint8)

    def lend(self, fd: int, memory: torch.Tensor) -> None:
        """UCX sends from any memory of this process as it is."""

    def address(self) -> bytes:
        """This process's identity and the UCX worker's address."""
        return self._address

    def serve(self, sink: Sink) -> None:
        """Raises TransportError when called twice or after `close`."""
        with self._lock:
            self._check_open()
            if self._serving:
                raise TransportError("serve was called twice")
            self._serving = True
            receiver = UcxReceiver(
                self._engine.worker, sink, self._thread, self._staging, identity=self._identity
            )
            self._thread.post(lambda: setattr(self._engine, "receiver", receiver))

    def connect(self, address: bytes) -> UcxLink:
        """Opens an endpoint and waits until the peer took our HELLO. Not from the transport's own thread."""
        identity, worker_address = unpack_address(address)
        if self._thread.is_current():
            raise TransportError("connect would wait for the thread that it runs on")
        same_host = identity.host == self._identity.host
        pidfd = open_process(identity) if same_host else None
        opened: Future[UcxLink] = Future()
        settled = threading.Event()

        def start() -> None:
            try:
                opened.set_result(self._open_link(worker_address, pidfd, settled))
            except TransportError as error:
                if pidfd is not None:
                    os.close(pidfd)
                opened.set_exception(error)

        if not self._thread.post(start):
            if pidfd is not None:
                os.close(pidfd)
            raise LinkClosed("the transport is closed")
        try:
            link = opened.result(_CONNECT_TIMEOUT_S)
        except FutureTimeoutError as exc:
            opened.add_done_callback(_close_unwanted)
            raise TransportError("the transport's thread is held up") from exc
        if not settled.wait(_CONNECT_TIMEOUT_S) or link.closed:
            link.close()
            self._check_open()
            raise TransportError("nobody serves at this address")
        return link

    def quiesce(self, handoff_id: HandoffId) -> Future[None]:
        """Staged receives are detached at once; direct ones read the sender's memory by themselves and end soon."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def start() -> None:
            if self._engine.receiver is None:
                future.set_result(None)
            else:
                self._engine.receiver.quiesce(handoff_id, future)

        if not self._thread.post(start):
            future.set_result(None)
        return future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.post(self._close_all)
        self._thread.stop()

    def _open_link(self, worker_address: bytes, pidfd: int | None, settled: threading.Event) -> UcxLink:
        if not self._engine.running:
            raise LinkClosed("the transport is closed")
        error_handling = pidfd is None or not self._engine.worker.shares_memory
        endpoint = self._endpoints.open(worker_address, error_handling=error_handling)
        nonce = secrets.randbits(NONCE_BITS)
        link = UcxLink(
            endpoint,
            self._thread,
            self._staging,
            nonce=nonce,
            error_handling=error_handling,
            release=partial(self._endpoints.keep, worker_address),
        )
        hello = Hello(nonce=nonce, reads_remote=endpoint.reads_remote, identity=self._identity)
        link.open(hello, pidfd, on_settled=settled.set)
        self._engine.links.append(link)
        return link

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed("the transport is closed")

    def _close_all(self) -> None:
        """Ends the links, then the worker: nothing is read or written on our behalf when it is gone."""
        engine = self._engine
        for link in engine.links:
            link.end("the transport was closed")
        engine.drain(_DRAIN_S)
        for link in engine.links:
            link.release_endpoint()
        self._endpoints.close()
        engine.drain(_DRAIN_S)  # what was broken off ends: UCX frees twice what it finds in the middle of that
        receiver, engine.receiver = engine.receiver, None
        placed = receiver.close() if receiver is not None else []
        engine.running = False
        self._thread.unregister(engine.worker.fd)
        self._end_worker(receiver)
        engine.links.clear()
        if receiver is not None:
            receiver.report_closed(placed)

    def _end_worker(self, receiver: UcxReceiver | None) -> None:
        worker, links = self._engine.worker, self._engine.links
        if not links and (receiver is None or receiver.idle):
            worker.close()
            return
        unfinished = [request for half in (*links, receiver) if half is not None for request in half.unfinished]
        if all(link.flushed for link in links):
            worker.destroy(unfinished)
        else:
            logger.warning("a peer does not read what was sent to it: UCX's resources stay until this process ends")
            worker.leave(unfinished)


def _close_unwanted(opened: Future[UcxLink]) -> None:
    """Closes a link that was opened after its caller had given up."""
    if opened.exception() is None:
        opened.result().close()
