"""What a rank has written of a prompt's KV, as messages: cut for each destination rank, described, digested, sent.

Owns the links of one handoff and what was sent over them; when to send, and whether at all, is the machine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from kv_transfer.digest import DigestPolicy
from kv_transfer.handoff import BlockRange, LaneDigest, combined_digest
from kv_transfer.plan import Lane, common
from kv_transfer.transport import Link, MessageHeader
from tandem.kv.cache import KvCache
from tandem.types import BlockId, Epoch, HandoffId


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLane:
    """A lane of this rank, and the link to its other end."""

    lane: Lane
    link: Link


class Poster:
    """One rank's messages of one handoff. `open` once, then from any thread."""

    def __init__(self, handoff_id: HandoffId, cache: KvCache, digests: DigestPolicy) -> None:
        self._handoff_id = handoff_id
        self._cache = cache
        self._digests = digests
        self._sent: dict[tuple[int, int, int], int] = {}
        """Digests by destination rank, layer and first block, 0 for none; what is sent again keeps its own."""
        self.lanes: dict[int, OpenLane] = {}
        self._key = b""
        self._epoch = Epoch(0)

    def open(self, lanes: Sequence[OpenLane], *, key: bytes, epoch: Epoch) -> None:
        """The ticket is here. `key` is that of the handoff's messages."""
        self.lanes = {each.lane.destination_rank: each for each in lanes}
        self._key = key
        self._epoch = epoch

    @property
    def links(self) -> list[Link]:
        """All that are open."""
        return [each.link for each in self.lanes.values()]

    def ranges(self, written: BlockRange) -> list[BlockRange]:
        """What goes where of the layers that were written."""
        found = []
        for destination, each in self.lanes.items():
            layers = common(written.layers, each.lane.layers)
            if layers:
                found.append(
                    replace(
                        written,
                        layer=layers.start,
                        num_layers=len(layers),
                        source=each.lane.source_rank,
                        destination=destination,
                    )
                )
        return found

    def send(self, blocks: BlockRange, block_ids: Sequence[BlockId]) -> tuple[int, Future[None]]:
        """Sends one of the `ranges`; `block_ids` are its blocks. Its bytes, and when its memory is free again."""
        lane, link = self.lanes[blocks.destination].lane, self.lanes[blocks.destination].link
        segments = [s for layer in blocks.layers for s in self._cache.segments(layer, block_ids, lane.heads)]
        checksum = self._checksum(blocks, segments)
        header = MessageHeader(
            handoff_id=self._handoff_id,
            epoch=self._epoch,
            layer=blocks.layer,
            num_layers=blocks.num_layers,
            first_block=blocks.first_block,
            num_blocks=blocks.num_blocks,
            num_bytes=sum(segment.numel() for segment in segments),
            digest=checksum,
            source_rank=blocks.source,
            destination_rank=blocks.destination,
            first_head=lane.heads.start,
            num_heads=len(lane.heads),
        ).sealed(self._key)
        return header.num_bytes, link.send(header, segments)

    def _checksum(self, blocks: BlockRange, segments: Sequence[torch.Tensor]) -> int:
        """Drawn once for each range: the record may have told of it, and what was damaged must not come unchecked."""
        key = blocks.destination, blocks.layer, blocks.first_block
        known = self._sent.get(key)
        if known is None:
            known = self._sent[key] = self._digests.digest(segments)
        return known

    @property
    def num_messages(self) -> int:
        """Sent so far; what was sent again counts once."""
        return len(self._sent)

    def lane_digests(self) -> list[LaneDigest]:
        """Of all lanes, those without a message too."""
        ordered = sorted(self._sent.items())
        return [
            LaneDigest(
                source=each.lane.source_rank,
                destination=destination,
                digest=combined_digest(value for (to, _, _), value in ordered if to == destination),
            )
            for destination, each in sorted(self.lanes.items())
        ]
