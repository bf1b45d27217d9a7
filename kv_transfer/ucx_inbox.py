"""What the receiving half of the UCX transport keeps books of, and how it reads control messages off the worker."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kv_transfer.device_memory import Memory
from kv_transfer.segments import Bytes
from kv_transfer.transport import MessageHeader
from kv_transfer.ucx_native import Worker
from kv_transfer.ucx_wire import CONTROL_TAG, MAX_CONTROL_BYTES, Control, unpack
from tandem.errors import TransportError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Source:
    """One link of a peer to us."""

    nonce: int
    reads_remote: bool
    pidfd: int | None
    dead: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Incoming:
    """A placed payload that UCX is receiving: directly when `staging` is None. Without `targets` it was detached."""

    header: MessageHeader
    number: int
    source: Source
    request: Any
    targets: list[Memory] | None
    staging: Memory | None
    digest: int | None = None
    """Of what has come, where it has been looked at already."""
    cancelled: bool = False
    withdrawn: bool = False


@dataclass(kw_only=True, slots=True)
class Quiesce:
    future: Future[None]
    remaining: set[Incoming] = field(default_factory=set)


class ControlInbox:
    """Receives control messages and hands each to `on_control`, which may raise TransportError to have it ignored."""

    def __init__(self, worker: Worker, on_control: Callable[[Control], None]) -> None:
        self._worker = worker
        self._on_control = on_control
        self._under_way: list[tuple[Any, Bytes]] = []

    @property
    def idle(self) -> bool:
        """Whether UCX holds no receive of a control message."""
        return not self._under_way

    @property
    def unfinished(self) -> list[Any]:
        """UCX's requests that have not completed."""
        return [request for request, _ in self._under_way if not request.completed]

    def take(self) -> bool:
        """Takes what is there. True when there was something."""
        moved = False
        for entry in [entry for entry in self._under_way if entry[0].completed]:
            moved = True
            self._under_way.remove(entry)
            self._hand_over(*entry)
        while (probed := self._worker.probe(CONTROL_TAG)) is not None:
            moved = True
            view = np.empty(probed.length, dtype=np.uint8)
            request = self._worker.receive(view, probed)
            if request.completed:
                self._hand_over(request, view)
            else:
                self._under_way.append((request, view))
        return moved

    def _hand_over(self, request: Any, view: Bytes) -> None:
        try:
            request.check_error()
        except Exception as exc:  # UCXX's errors derive from Exception, one class per UCX status
            logger.warning("a control message could not be received: %s", exc)
            return
        try:
            if view.nbytes > MAX_CONTROL_BYTES:
                raise TransportError(f"a control message of {view.nbytes} bytes")
            self._on_control(unpack(view.tobytes()))
        except TransportError as exc:
            logger.warning("ignoring a control message of the ucx transport: %s", exc)


def readable(fd: int) -> bool:
    """Asks the kernel, without waiting."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
