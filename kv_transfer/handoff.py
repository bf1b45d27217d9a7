"""The words of the handoff: its states, the record, the actions that both sides' machines ask for. Pure.

States (`docs/architecture.md` draws them):

    OFFERED -> RESERVED -> MOVING -> DELIVERED
    RESERVED | MOVING -> ABORTING -> DRAINED
    OFFERED -> EXPIRED

`SourceHandoff` and `DestinationHandoff` are the two machines. They get events as method calls and answer with
actions, which `sender.py` and `receiver.py` carry out. Blocks are given up by exactly one `ReleaseBlocks` (or, on the
destination, `Deliver`, which passes them to the sequence) for each handoff that held any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tandem.types import Epoch, TokenStep


class HandoffState(StrEnum):
    """Where a handoff stands, on one side."""

    OFFERED = "offered"
    RESERVED = "reserved"
    MOVING = "moving"
    DELIVERED = "delivered"
    ABORTING = "aborting"
    DRAINED = "drained"
    EXPIRED = "expired"


ENDED = frozenset({HandoffState.DELIVERED, HandoffState.DRAINED, HandoffState.EXPIRED})


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRange:
    """`num_blocks` blocks of the prompt from `first_block` on, in `num_layers` layers from `layer` on: one message.

    It goes from rank `source` of one worker to rank `destination` of the other, which share one range of heads.
    """

    layer: int
    first_block: int
    num_blocks: int
    num_layers: int = 1
    source: int = 0
    destination: int = 0

    @property
    def layers(self) -> range:
        """The layers."""
        return range(self.layer, self.layer + self.num_layers)

    @property
    def mask(self) -> int:
        """The blocks as bits of an integer."""
        return ((1 << self.num_blocks) - 1) << self.first_block

    def overlaps(self, other: BlockRange) -> bool:
        """Whether some block of some layer is in both, between the same ranks."""
        if (self.source, self.destination) != (other.source, other.destination):
            return False
        first, end = max(self.layer, other.layer), min(self.layers.stop, other.layers.stop)
        return first < end and bool(self.mask & other.mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneDigest:
    """One digest over the digests of all messages between two ranks, in (layer, first block) order."""

    source: int
    destination: int
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a monolithic engine would have kept at the end of the prefill, beside the KV.

    Noise, penalty counts and grammar state are functions of the request and of each choice's tokens.
    """

    first: tuple[TokenStep, ...]
    """The first token of each choice, in their order."""
    num_cached_tokens: int
    num_messages: int
    digest: int
    """Of the messages from rank 0 to rank 0."""
    other_lanes: tuple[LaneDigest, ...] = ()
    """Of those between other ranks, where there are some."""

    def digest_between(self, source: int, destination: int) -> int | None:
        """Of one lane; None when the record does not know it."""
        if (source, destination) == (0, 0):
            return self.digest
        found = (d.digest for d in self.other_lanes if (d.source, d.destination) == (source, destination))
        return next(found, None)


def combined_digest(digests: Iterable[int]) -> int:
    """One 64-bit digest over the digests of all messages, given in (layer, first block) order."""
    joined = b"".join(digest.to_bytes(8, "little") for digest in digests)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8, person=b"tandem-handoff").digest(), "little")


@dataclass(frozen=True, kw_only=True, slots=True)
class SendTicket:
    """Destination: blocks are reserved, tell the source."""

    epoch: Epoch
    lease_s: float
    first_block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SendNack:
    """Destination: a range did not arrive whole. `round` is equal for all that one look found."""

    blocks: BlockRange
    reason: str
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SendDelivered:
    """Destination: everything is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendRecord:
    """Source: everything has been posted."""

    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class SendAbort:
    """Either side: the handoff is over; the peer must stop."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SendDrained:
    """Source: none of my writes is under way or will start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resend:
    """Source: post this range again."""

    blocks: BlockRange


@dataclass(frozen=True, kw_only=True, slots=True)
class StopReceiving:
    """Destination: stop all receives of this handoff, then call `receives_stopped`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    """Make it impossible that bytes still move, without the peer's help, then call `fenced`.

    Destination: against writes into its blocks. Source: closes the link, which fails its unfinished sends.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseBlocks:
    """This side's blocks are the pool's again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliver:
    """Destination: blocks and record now belong to the sequence."""

    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The request cannot go on through this handoff; said once, before blocks are released."""

    reason: str


Action = (
    SendTicket
    | SendNack
    | SendDelivered
    | SendRecord
    | SendAbort
    | SendDrained
    | Resend
    | StopReceiving
    | Fence
    | ReleaseBlocks
    | Deliver
    | Failed
)
