"""The sending half of the UCX transport: one endpoint, a window of messages under way, and an orderly or a hard end."""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kv_transfer import device_memory
from kv_transfer.device_memory import Memory
from kv_transfer.outbox import Outbox
from kv_transfer.progress import ProgressThread
from kv_transfer.staging import StagingPool
from kv_transfer.transport import LinkStats, MessageHeader
from kv_transfer.ucx_native import RENDEZVOUS_BYTES, Endpoint
from kv_transfer.ucx_wire import CONTROL_TAG, MAX_ANNOUNCED, Announce, Bye, Hello, payload_tag
from tandem.errors import TransportError

logger = logging.getLogger(__name__)

_MAX_UNDER_WAY = MAX_ANNOUNCED
_CLOSE_WAIT_S = 0.7
_LINGER_S = 10.0
"""How long what was sent on a link that has ended may stay unanswered by a living peer, where UCX can do without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Send:
    number: int
    header: MessageHeader
    views: Sequence[Memory]
    wait_written: Callable[[], None]
    """Returns when what wrote the memory is done with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    """Requests that UCX holds, and the memory that it may read until they complete."""

    requests: Sequence[Any]
    memory: Sequence[Memory]
    staging: Memory | None = None

    def completed(self) -> bool:
        return all(request.completed for request in self.requests)


class UcxLink:
    """One direction to one peer. Everything but `send`, `stats` and `close` belongs to the transport's thread.

    `release` is given the endpoint, and the peer's descriptor if there is one, when the link needs them no more.

    After the end, requests that the peer has not answered linger here with their memory: UCX cannot take a message
    back, and a slow peer may still fetch it. Its digest then tells the peer that it is not what was announced.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        thread: ProgressThread,
        staging: StagingPool,
        *,
        nonce: int,
        error_handling: bool,
        release: Callable[[Endpoint, int | None], None],
    ) -> None:
        self._endpoint = endpoint
        self._thread = thread
        self._staging = staging
        self._nonce = nonce
        self._error_handling = error_handling
        self._outbox = Outbox()
        self._waiting: deque[_Send] = deque()
        self._under_way: dict[int, _UnderWay] = {}
        self._others: list[_UnderWay] = []
        self._release = release
        self._pidfd: int | None = None
        self._peer_dead = False
        self._break_off_at_s = math.inf
        self._bye: _UnderWay | None = None
        self._endpoint_released = False

    @property
    def transport(self) -> str:
        return "ucx"

    @property
    def detail(self) -> str:
        fetched = "fetched by the receiver" if self._endpoint.reads_remote else "pushed"
        mode = "on" if self._error_handling else "off"
        return f"{', '.join(self._endpoint.lanes)}; large payloads {fetched}; endpoint error handling {mode}"

    def send(self, header: MessageHeader, segments: Sequence[torch.Tensor]) -> Future[None]:
        number, future = self._outbox.open(header.num_bytes)
        if number is None:
            return future
        try:
            views = device_memory.as_memory(segments, header.num_bytes)
            wait_written = device_memory.mark(device_memory.device_of(views))
            send = _Send(number=number, header=header, views=views, wait_written=wait_written)
        except TransportError as error:
            self._outbox.finish(number, error)
            return future
        if not self._thread.post(lambda: self._enqueue(send)):
            self._outbox.close("the transport is closed")
        return future

    def stats(self) -> LinkStats:
        return self._outbox.stats()

    def close(self) -> None:
        if not self._thread.run_and_wait(lambda: self.end("the link was closed"), _CLOSE_WAIT_S):
            self._outbox.close("the link was closed")

    def open(self, hello: Hello, pidfd: int | None, *, on_settled: Callable[[], None]) -> None:
        """Sends the HELLO; `on_settled` is called once: when the peer has taken it, or the link has ended."""
        if pidfd is not None:
            self._pidfd = pidfd
            self._thread.register(pidfd, select.EPOLLIN, lambda _: self._on_death())
        self._hello = self._control(hello.pack())
        self._others.append(self._hello)
        self._on_settled: Callable[[], None] | None = on_settled

    @property
    def closed(self) -> bool:
        """Whether the link has ended."""
        return self._outbox.closed

    @property
    def idle(self) -> bool:
        """Whether UCX holds nothing of this link, not even its HELLO."""
        return not self._under_way and all(entry.completed() for entry in self._others)

    @property
    def unfinished(self) -> list[Any]:
        """UCX's requests that have not completed."""
        entries = [*self._under_way.values(), *self._others]
        return [request for entry in entries for request in entry.requests if not request.completed]

    @property
    def finished(self) -> bool:
        """Whether the link has ended and nothing lingers."""
        return self._bye is not None and self.idle

    @property
    def flushed(self) -> bool:
        """Whether everything has left for the peer, answered or not: BYE is last, and small messages leave in order."""
        return self._bye is not None and self._bye.completed()

    def advance(self) -> bool:
        """Takes note of completed requests and starts waiting ones. True when something happened."""
        if self._on_settled is not None and self._hello.completed():
            self._greeted()
        done = [number for number, entry in self._under_way.items() if entry.completed()]
        for number in done:
            self._complete(number, self._under_way.pop(number))
        self._others = [entry for entry in self._others if not entry.completed()]
        started = self._pump()
        if self.finished or time.monotonic() > self._break_off_at_s:
            self.release_endpoint()
        return bool(done) or started

    def end(self, reason: str, *, peer_dead: bool = False) -> None:
        """Tells the peer, then fails what is unfinished. Does not wait for anybody."""
        if self._bye is not None:
            return
        self._waiting.clear()
        self._peer_dead = peer_dead
        if peer_dead:
            self._forget_memory()
        self._bye = self._control(Bye(nonce=self._nonce, withdrawn=tuple(self._under_way)).pack())
        self._others.append(self._bye)
        self._outbox.close(reason)
        self._settle()
        if self.idle or (self._error_handling and peer_dead):
            self.release_endpoint()
        elif self._error_handling:
            self._break_off_at_s = time.monotonic() + _LINGER_S

    def release_endpoint(self) -> None:
        """Gives the endpoint to whom it may serve again, or closes it. Does not wait.

        Where the peer keeps requests open UCX closes it by force, or without error handling leaves it to the worker's
        end.
        """
        if self._endpoint_released:
            return
        self._endpoint_released = True
        if self.idle and self._bye is not None:  # or whoever holds this link holds UCX's worker by them
            self._hello = self._bye = _UnderWay(requests=(), memory=())
            self._others.clear()
        if self.idle and not self._peer_dead:
            pidfd, self._pidfd = self._pidfd, None
            if pidfd is not None:
                self._thread.unregister(pidfd)
            self._release(self._endpoint, pidfd)
            return
        self._close_pidfd()
        if self.idle:
            self._endpoint.close()
        elif self._error_handling:
            self._endpoint.break_off()
        else:
            self._endpoint.abandon()

    def _greeted(self) -> None:
        try:
            for request in self._hello.requests:
                request.check_error()
        except Exception as exc:  # UCXX's errors derive from Exception, one class per UCX status
            self.end(f"the peer could not be greeted: {exc}")
        self._settle()

    def _settle(self) -> None:
        on_settled, self._on_settled = self._on_settled, None
        if on_settled is not None:
            on_settled()

    def _on_death(self) -> None:
        """The peer's process ended, before this link or after."""
        self._close_pidfd()
        if self._bye is None:
            self.end("the peer's process ended", peer_dead=True)
            return
        self._peer_dead = True
        self._forget_memory()
        if self._error_handling:
            self.release_endpoint()

    def _close_pidfd(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._thread.unregister(pidfd)
            os.close(pidfd)

    def _forget_memory(self) -> None:
        """A dead peer fetches nothing: lets go of large payloads. Small ones may be queued inside UCX, by address."""
        for number, entry in self._under_way.items():
            kept = [view for view in entry.memory if view.nbytes <= RENDEZVOUS_BYTES]
            self._under_way[number] = _UnderWay(requests=entry.requests, memory=kept)

    def _complete(self, number: int, entry: _UnderWay) -> None:
        if entry.staging is not None:
            self._staging.give_back(entry.staging)
        try:
            for request in entry.requests:
                request.check_error()
        except Exception as exc:  # UCXX's errors derive from Exception, one class per UCX status
            self._outbox.finish(number, TransportError(f"UCX could not send: {exc}"))
            self.end(f"sending failed: {exc}")
            return
        self._outbox.finish(number)

    def _enqueue(self, send: _Send) -> None:
        if not self._outbox.closed:
            self._waiting.append(send)

    def _pump(self) -> bool:
        """Starts what waits, as far as the window goes; what starts together is announced together."""
        starting: list[tuple[_Send, Memory, Memory | None]] = []
        while self._waiting and len(self._under_way) + len(starting) < _MAX_UNDER_WAY:
            send = self._waiting.popleft()
            try:
                starting.append((send, *self._payload(send)))
            except RuntimeError as exc:  # torch's error for a GPU without memory or out of order
                self._outbox.finish(send.number, TransportError(f"the GPU could not give the payload: {exc}"))
        if starting:
            self._start(starting)
        return bool(starting)

    def _start(self, starting: Sequence[tuple[_Send, Memory, Memory | None]]) -> None:
        messages = tuple((send.number, send.header) for send, _, _ in starting)
        control = self._control(Announce(nonce=self._nonce, messages=messages).pack())
        for send, payload, staging in starting:
            request = self._endpoint.send(payload, payload_tag(self._nonce, send.number))
            self._under_way[send.number] = _UnderWay(
                requests=[*control.requests, request], memory=[*control.memory, payload], staging=staging
            )

    def _payload(self, send: _Send) -> tuple[Memory, Memory | None]:
        """The message's bytes in one piece, and the staging buffer that they are in, if any."""
        send.wait_written()
        if len(send.views) == 1:
            return send.views[0], None
        staging = self._staging.take_on(device_memory.device_of(send.views), send.header.num_bytes)
        device_memory.gather(send.views, staging)
        self._outbox.gathered()
        return staging, staging

    def _control(self, message: bytes) -> _UnderWay:
        view = np.frombuffer(message, dtype=np.uint8)
        return _UnderWay(requests=[self._endpoint.send(view, CONTROL_TAG)], memory=[view])
