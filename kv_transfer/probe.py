"""Measures a link when it is opened: a few messages into memory that the other side keeps for nothing else.

The size of the messages grows until one takes long enough to be timed, so a slow link is not held up by its own probe.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from statistics import median

import torch

from kv_transfer.sizing import LinkSpeed
from kv_transfer.transport import Link, MessageHeader, Sink, Transport
from tandem.errors import TransportError
from tandem.types import Epoch, HandoffId

PROBE_ID = HandoffId("0" * 32)
"""No handoff has it: theirs are random."""
PROBE_BYTES = 2 << 20
_SMALL_BYTES = 16 << 10
"""Large enough to end only when the other side has it, in every transport."""
_NUM_SMALL = 5
_FIRST_BYTES = 256 << 10
_LONG_ENOUGH_S = 2e-3
_NUM_ROUNDS = 2
_TIMEOUT_S = 5.0


class ProbeSink:
    """A `Sink` before another one: takes probes itself and passes on the rest."""

    def __init__(self, sink: Sink, transport: Transport) -> None:
        self._sink = sink
        self._memory = transport.allocate(PROBE_BYTES)

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor] | None:
        """See `Sink`."""
        if header.handoff_id != PROBE_ID:
            return self._sink.place(header)
        return [self._memory[: header.num_bytes]] if header.num_bytes <= PROBE_BYTES else None

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        """See `Sink`."""
        if header.handoff_id != PROBE_ID:
            self._sink.landed(header, error)


def measure(link: Link, memory: torch.Tensor) -> LinkSpeed:
    """Takes some milliseconds; call it on a thread that may wait.

    `memory`: PROBE_BYTES bytes of the link's own transport. Raises TransportError when the link breaks or stands still.
    """
    small = memory[:_SMALL_BYTES]
    _timed(link, small)
    latency_s = median(_timed(link, small) for _ in range(_NUM_SMALL))
    num_bytes = _FIRST_BYTES
    while (elapsed_s := _timed(link, memory[:num_bytes])) < _LONG_ENOUGH_S and num_bytes < PROBE_BYTES:
        num_bytes *= 2
    best_s = min(elapsed_s, *(_timed(link, memory[:num_bytes]) for _ in range(_NUM_ROUNDS)))
    return LinkSpeed(bytes_per_s=num_bytes / max(best_s - latency_s, best_s / 10), latency_s=latency_s)


def _timed(link: Link, payload: torch.Tensor) -> float:
    header = MessageHeader(
        handoff_id=PROBE_ID,
        epoch=Epoch(0),
        layer=0,
        first_block=0,
        num_blocks=1,
        num_bytes=payload.numel(),
        digest=0,
    )
    started_s = time.monotonic()
    _wait(link.send(header, [payload]))
    return time.monotonic() - started_s


def _wait(sent: Future[None]) -> None:
    try:
        sent.result(_TIMEOUT_S)
    except FutureTimeoutError as exc:
        raise TransportError(f"a probe of the link was not taken within {_TIMEOUT_S:g} s") from exc
