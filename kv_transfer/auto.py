"""The transport that picks ("auto"): opens every transport that joins two workers, measures each, keeps the quickest.

The choice is made link by link, when a link is opened, and is the link's from then on.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future

import torch

from kv_transfer.probe import PROBE_BYTES, ProbeSink, measure
from kv_transfer.sizing import LinkSpeed
from kv_transfer.transport import Link, Sink, Transport
from tandem.errors import LinkClosed, TransportError
from tandem.types import HandoffId

logger = logging.getLogger(__name__)

_PREFIX = b"tandem-auto/1/"
_MAX_ADDRESS_BYTES = 64 << 10
_TYPICAL_BYTES = 4 << 20
"""The message by whose time links are compared: a layer of a few thousand tokens."""


class AutoTransport:
    """See `kv_transfer.transport.Transport`. The first of `transports` allocates what all of them move."""

    name = "auto"

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        assert transports
        self._transports = dict(transports)
        self._closed = False
        self._probe_memory: torch.Tensor | None = None
        self._probing = threading.Lock()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """The first transport's memory."""
        return next(iter(self._transports.values())).allocate(num_bytes)

    def lend(self, fd: int, memory: torch.Tensor) -> None:
        """To each of them."""
        for transport in self._transports.values():
            transport.lend(fd, memory)

    def address(self) -> bytes:
        """Those of all transports, by name."""
        addresses = {name: transport.address().hex() for name, transport in self._transports.items()}
        return _PREFIX + json.dumps(addresses).encode()

    def serve(self, sink: Sink) -> None:
        """Receives over each of them."""
        probed = ProbeSink(sink, self)
        for transport in self._transports.values():
            transport.serve(probed)

    def connect(self, address: bytes) -> Link:
        """The quickest link. Raises TransportError with what each said when none can be opened."""
        if self._closed:
            raise LinkClosed("the transport is closed")
        best: tuple[Link, LinkSpeed] | None = None
        failures = []
        for name, its_address in _unpack(address).items():
            try:
                found = self._try(name, its_address)
            except TransportError as exc:
                failures.append(f"{name}: {exc.message}")
                continue
            best = found if best is None else _better(best, found)
        if best is None:
            raise TransportError("no transport joins the two workers: " + "; ".join(failures))
        link, speed = best
        logger.info("auto took %s (%s), %.3g GB/s", link.transport, link.detail, speed.bytes_per_s / 1e9)
        return link

    def _try(self, name: str, address: bytes) -> tuple[Link, LinkSpeed]:
        transport = self._transports.get(name)
        if transport is None:
            raise TransportError("not here")
        link = transport.connect(address)
        try:
            with self._probing:
                if self._probe_memory is None:
                    self._probe_memory = self.allocate(PROBE_BYTES)
                return link, measure(link, self._probe_memory)
        except TransportError:
            link.close()
            raise

    def quiesce(self, handoff_id: HandoffId) -> Future[None]:
        """Over all of them."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        waiting = [transport.quiesce(handoff_id) for transport in self._transports.values()]
        left, lock = len(waiting), threading.Lock()

        def over(_: Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                future.set_result(None)

        for each in waiting:
            each.add_done_callback(over)
        return future

    def close(self) -> None:
        self._closed = True
        for transport in reversed(self._transports.values()):
            transport.close()  # the one whose memory the others use goes last


def _better(one: tuple[Link, LinkSpeed], other: tuple[Link, LinkSpeed]) -> tuple[Link, LinkSpeed]:
    """Closes the slower one."""
    slower, quicker = sorted((one, other), key=lambda found: -found[1].seconds(_TYPICAL_BYTES))
    slower[0].close()
    return quicker


def _unpack(address: bytes) -> dict[str, bytes]:
    try:
        if not address.startswith(_PREFIX) or len(address) > _MAX_ADDRESS_BYTES:
            raise ValueError("another prefix")
        values = json.loads(address[len(_PREFIX) :])
        return {str(name): bytes.fromhex(value) for name, value in values.items()}
    except (ValueError, TypeError, AttributeError) as exc:
        raise TransportError("not an address of the auto transport", param="address") from exc
