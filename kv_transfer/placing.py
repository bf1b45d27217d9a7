"""Asking a sink where a payload goes and telling it what became of it, whatever the sink does. No IO of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kv_transfer.device_memory import Memory, as_memory
from kv_transfer.segments import Bytes, as_bytes, check_segments
from kv_transfer.transport import MessageHeader, Sink
from tandem.errors import TransportError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def place(sink: Sink, header: MessageHeader) -> list[Bytes] | None:
    """Where the payload goes, or None when it is to be thrown away.

    A sink that raises has placed nothing; one that names memory of the wrong size or kind has, and is told so.
    """
    return _placed(sink, header, as_bytes)


def place_memory(sink: Sink, header: MessageHeader) -> list[Memory] | None:
    """The same for memory of the host or of a GPU, whichever the sink names."""
    return _placed(sink, header, as_memory)


def place_tensors(sink: Sink, header: MessageHeader, device: torch.device) -> list[torch.Tensor] | None:
    """The same for memory on `device`."""

    def checked(segments: Sequence[torch.Tensor], num_bytes: int) -> list[torch.Tensor]:
        check_segments(segments, num_bytes, device)
        return list(segments)

    return _placed(sink, header, checked)


def _placed(sink: Sink, header: MessageHeader, check: Callable[[Sequence[torch.Tensor], int], T]) -> T | None:
    try:
        segments = sink.place(header)
    except Exception:
        logger.exception("the sink failed to place a message of handoff %s", header.handoff_id)
        return None
    if segments is None:
        return None
    try:
        return check(segments, header.num_bytes)
    except TransportError as error:
        logger.error("the sink placed a message of handoff %s in the wrong memory: %s", header.handoff_id, error)
        landed(sink, header, error)
        return None


def landed(sink: Sink, header: MessageHeader, error: TransportError | None) -> None:
    """`sink.landed`, logging what it raises."""
    try:
        sink.landed(header, error)
    except Exception:
        logger.exception("the sink failed to take note of a message of handoff %s", header.handoff_id)
