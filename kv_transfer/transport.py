"""The seam over which KV bytes move: headers, links, and what a receiver must provide.

A transport moves messages. Each message is one header (what it is) and one payload (bytes of blocks of some layers).
It holds no policy: where a payload goes is asked from the `Sink`; whether a handoff still lives is the sink's to
say. Implementations: `ucx.py` (UCXX), `loopback.py` (shared memory on one host), `collective.py` (torch.distributed)
and `auto.py`, which takes the quickest of them link by link; all pass one conformance suite.

Threads: a transport runs its own, `Sink` methods are called on them, maybe on several at once, and must not block.
`Link.send`, `quiesce` and `close` may be called from any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kv_transfer.ticket import TAG_BYTES, header_tag
from tandem.errors import TransportError
from tandem.secret import same
from tandem.types import Epoch, HandoffId

_HEADER = struct.Struct("<4s16sQHHHHIIIIQQ")
_MAGIC = b"TKV3"
HEADER_BYTES = _HEADER.size + TAG_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageHeader:
    """What a message carries: blocks of `num_layers` layers from `layer` on, layer after layer.

    It goes from one rank to one rank, with the `num_heads` KV heads from `first_head` on that both hold; layers and
    heads are the model's numbers. `first_block` and `num_blocks` count the prompt's blocks, not physical ones. `epoch`
    is the destination's, from the ticket. `digest` is the payload's, 0 for none. `tag` is the ticket's code
    over all of this.
    """

    handoff_id: HandoffId
    epoch: Epoch
    layer: int
    first_block: int
    num_blocks: int
    num_bytes: int
    digest: int
    num_layers: int = 1
    source_rank: int = 0
    destination_rank: int = 0
    first_head: int = 0
    num_heads: int = 0
    tag: bytes = bytes(TAG_BYTES)

    def pack(self) -> bytes:
        """HEADER_BYTES bytes, little-endian."""
        return self._body() + self.tag

    def _body(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            bytes.fromhex(self.handoff_id),
            self.epoch,
            self.source_rank,
            self.destination_rank,
            self.first_head,
            self.num_heads,
            self.layer,
            self.num_layers,
            self.first_block,
            self.num_blocks,
            self.num_bytes,
            self.digest,
        )

    def sealed(self, key: bytes) -> MessageHeader:
        """The same with the tag of the handoff's link key (`ticket.link_key`)."""
        return replace(self, tag=header_tag(key, self._body()))

    def is_sealed(self, key: bytes) -> bool:
        """Whether the tag is that of `key`."""
        return same(header_tag(key, self._body()), self.tag)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> MessageHeader:
        """Inverse of `pack`. Raises TransportError for anything else."""
        if len(data) != HEADER_BYTES:
            raise TransportError(f"a message header has {HEADER_BYTES} bytes, got {len(data)}")
        magic, handoff, epoch, *ranks_and_heads, layer, num_layers, first_block, num_blocks, num_bytes, digest = (
            _HEADER.unpack_from(data)
        )
        source_rank, destination_rank, first_head, num_heads = ranks_and_heads
        if magic != _MAGIC:
            raise TransportError(f"not a KV message header (magic {magic!r})")
        return cls(
            handoff_id=HandoffId(handoff.hex()),
            epoch=Epoch(epoch),
            layer=layer,
            first_block=first_block,
            num_blocks=num_blocks,
            num_bytes=num_bytes,
            digest=digest,
            num_layers=num_layers,
            source_rank=source_rank,
            destination_rank=destination_rank,
            first_head=first_head,
            num_heads=num_heads,
            tag=bytes(data[_HEADER.size :]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStats:
    """Counters of one link since it was opened.

    `busy_s`: seconds in which at least one message was under way. `num_gathers`: messages that the sender had to copy
    together first, because their memory was not one piece.
    """

    num_bytes: int
    num_messages: int
    busy_s: float
    num_gathers: int = 0


class Sink(Protocol):
    """What receives messages."""

    def place(self, header: MessageHeader) -> Sequence[torch.Tensor] | None:
        """Where the payload goes: 1-D uint8 tensors, `header.num_bytes` together, filled in order.

        None refuses it (unknown or stale handoff, wrong epoch, duplicate): the bytes are received and thrown away,
        `landed` is not called.
        """

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        """Once for each placed message: its bytes are all there (None), or will never be written again (error)."""


class Link(Protocol):
    """One direction to one peer. Messages may arrive in any order."""

    @property
    def transport(self) -> str:
        """The transport that moves its bytes: "ucx", "shm" or "collective"; never "auto"."""

    @property
    def detail(self) -> str:
        """What was negotiated, for people: for example "memfd" or "cma, posix"."""

    def send(self, header: MessageHeader, segments: Sequence[torch.Tensor]) -> Future[None]:
        """Sends the segments (1-D uint8, `header.num_bytes` together) as one payload.

        Resolves when the source memory may be written again. Fails with TransportError when the message cannot be
        delivered, and with LinkClosed when the link was closed meanwhile or before. Never raises.
        """

    def stats(self) -> LinkStats:
        """Counters so far."""

    def close(self) -> None:
        """Fences the link: unfinished sends fail with LinkClosed within a second. Idempotent."""


class Transport(Protocol):
    """One endpoint of a worker. A decode worker serves, a prefill worker connects; both may do both."""

    @property
    def name(self) -> str:
        """As in the configuration."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory to send from and receive into: zeroed 1-D uint8, freed by `close`, leaving no segment behind."""

    def lend(self, fd: int, memory: torch.Tensor) -> None:
        """Makes known memory that is not from `allocate`, so that it is sent from as directly as that.

        `memory`: 1-D uint8, all of the sealed memfd `fd`; both stay the caller's, the memory until after `close`.
        """

    def address(self) -> bytes:
        """What a peer passes to `connect`; travels in the ticket."""

    def serve(self, sink: Sink) -> None:
        """Starts to receive. Call once."""

    def connect(self, address: bytes) -> Link:
        """Opens a link to a peer. Raises TransportError when the address is malformed or nobody is there."""

    def quiesce(self, handoff_id: HandoffId) -> Future[None]:
        """Resolves when nothing placed for this handoff is being written or will be; cancels what is under way.

        The sink must already refuse the handoff. Each cancelled message gets its `landed(header, error)` first.
        """

    def close(self) -> None:
        """Ends all links and threads and frees all memory. Idempotent. Unfinished sends fail with LinkClosed."""
