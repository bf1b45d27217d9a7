"""The decode worker's half of one handoff. Pure; `receiver.py` carries out what it asks for.

Owns: which (layer, block) has arrived, whether a message may be placed, when the blocks may be used and when they may
be given back. They are given back only when no receive of ours is under way *and* the writer has said that it stopped
or has been fenced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kv_transfer.handoff import (
    ENDED,
    Action,
    BlockRange,
    Deliver,
    Failed,
    Fence,
    HandoffState,
    Record,
    ReleaseBlocks,
    SendAbort,
    SendDelivered,
    SendNack,
    SendTicket,
    StopReceiving,
    combined_digest,
)
from kv_transfer.plan import Lane
from tandem.types import Epoch


class DestinationHandoff:
    """One rank's half: `num_blocks` prompt blocks in the layers of its `lanes`, one from each source rank.

    `reserved` says how many of the blocks are held already. Rank 0 speaks for all ranks with the source: what it
    receives is delivered, or given back, only when theirs is too.
    """

    def __init__(self, *, epoch: Epoch, lanes: Sequence[Lane], num_blocks: int, lease_s: float, now: float) -> None:
        self.state = HandoffState.OFFERED
        self.epoch = epoch
        self.lease_s = lease_s
        self.lease_until_s = now + lease_s
        self.num_blocks = num_blocks
        self._wanted = (1 << num_blocks) - 1
        self.lanes = {lane.source_rank: lane for lane in lanes}
        self.rank = lanes[0].destination_rank
        self._arrived = {(lane.source_rank, layer): 0 for lane in lanes for layer in lane.layers}
        self._in_flight: set[BlockRange] = set()
        self._digests: dict[tuple[int, int, int], int] = {}
        self._others: set[int] = set()
        """Ranks into which something may still be written."""
        self._record: Record | None = None
        self._nack_round = 0
        self._num_events = 0
        """Placements, landings and the record: how the handoff shows that it goes on."""
        self._quiet = (0, now)
        """The last count that `tick` saw, and when it saw it first."""
        self._receives_stopped = False
        self._writer_stopped = False
        self._fence_asked = False

    @property
    def ended(self) -> bool:
        """No block is held and nothing more will happen."""
        return self.state in ENDED

    def _has_expected_digests(self, record: Record) -> bool:
        ordered = sorted(self._digests.items())
        return all(
            combined_digest(digest for (source, _, _), digest in ordered if source == lane)
            == record.digest_between(lane, self.rank)
            for lane in self.lanes
        )

    def reserved(self, first_block: int = 0, *, other_ranks: Iterable[int] = ()) -> list[Action]:
        """All blocks that the sequence needs are reserved; those before `first_block` are held already, not sent.

        `other_ranks` have a half of their own each.
        """
        assert self.state is HandoffState.OFFERED
        assert 0 <= first_block <= self.num_blocks
        self.state = HandoffState.RESERVED
        self._wanted = self._wanted >> first_block << first_block
        self._others = set(other_ranks)
        return [SendTicket(epoch=self.epoch, lease_s=self.lease_s, first_block=first_block)]

    def renewed(self, now: float) -> list[Action]:
        """The source gave a sign of life. That does not make the end of an aborted handoff any later."""
        if self.state is HandoffState.ABORTING:
            return []
        self.lease_until_s = max(self.lease_until_s, now + self.lease_s)
        return []

    def may_place(self, blocks: BlockRange, epoch: Epoch) -> bool:
        """Whether a message may be written into the blocks now; counts it as under way if so.

        Late, stale, repeated and out-of-range messages are refused.
        """
        if self.state not in (HandoffState.RESERVED, HandoffState.MOVING) or epoch != self.epoch:
            return False
        if not self._is_wanted(blocks):
            return False
        if any(self._arrived[blocks.source, layer] & blocks.mask for layer in blocks.layers):
            return False
        if any(blocks.overlaps(other) for other in self._in_flight):
            return False
        self._in_flight.add(blocks)
        self._num_events += 1
        self.state = HandoffState.MOVING
        return True

    def _is_wanted(self, blocks: BlockRange) -> bool:
        end = blocks.first_block + blocks.num_blocks
        lane = self.lanes.get(blocks.source)
        if lane is None or blocks.destination != self.rank:
            return False
        in_layers = lane.layers.start <= blocks.layer < blocks.layers.stop <= lane.layers.stop
        in_prompt = 0 <= blocks.first_block < end <= self.num_blocks
        return in_layers and in_prompt and not blocks.mask & ~self._wanted

    def landed(self, blocks: BlockRange, *, digest: int, error: str | None) -> list[Action]:
        """A placed message is whole, or (error) will never be written again."""
        self._in_flight.discard(blocks)
        self._num_events += 1
        if self.state is not HandoffState.MOVING:
            return self._maybe_drained()
        if error is not None:
            self._nack_round += 1
            return [SendNack(blocks=blocks, reason=error, round=self._nack_round)]
        for layer in blocks.layers:
            self._arrived[blocks.source, layer] |= blocks.mask
        self._digests[blocks.source, blocks.layer, blocks.first_block] = digest
        return self._maybe_delivered()

    def record(self, record: Record) -> list[Action]:
        """The source has posted everything."""
        if self.state not in (HandoffState.RESERVED, HandoffState.MOVING) or self._record is not None:
            return []
        self._record = record
        self._num_events += 1
        return self._maybe_delivered()

    def missing(self) -> list[BlockRange]:
        """What has not arrived and is not under way, as maximal ranges of blocks, and of layers that miss the same."""
        ranges: list[BlockRange] = []
        for source, layer in self._arrived:
            for first, count in self._missing_in(source, layer):
                found = BlockRange(
                    layer=layer, first_block=first, num_blocks=count, source=source, destination=self.rank
                )
                above = replace(found, layer=layer - 1)
                grown = next((i for i, r in enumerate(ranges) if _continues(r, above)), None)
                if grown is None:
                    ranges.append(found)
                else:
                    ranges[grown] = replace(ranges[grown], num_layers=ranges[grown].num_layers + 1)
        return ranges

    def _missing_in(self, source: int, layer: int) -> list[tuple[int, int]]:
        """(first block, count) of each maximal run."""
        left = self._wanted & ~self._arrived[source, layer]
        for other in self._in_flight:
            left &= ~other.mask if layer in other.layers and source == other.source else -1
        runs, first = [], 0
        while left >> first:
            count = 0
            while left >> (first + count) & 1:
                count += 1
            if count:
                runs.append((first, count))
            first += count or 1
        return runs

    def rank_ended(self, rank: int, *, whole: bool) -> list[Action]:
        """Nothing is written into another rank any more: it has everything, or has been given up."""
        self._others.discard(rank)
        if self.state is HandoffState.ABORTING:
            return self._maybe_drained()
        if not whole:
            return self._give_up(f"rank {rank} has not received its part", tell_peer=True)
        return self._maybe_delivered()

    def abort(self, reason: str) -> list[Action]:
        """Our side gives up: client gone, deadline, drain."""
        return self._give_up(reason, tell_peer=True)

    def peer_aborted(self, reason: str) -> list[Action]:
        """The source gives up; its drained message follows."""
        return self._give_up(reason, tell_peer=False)

    def peer_drained(self) -> list[Action]:
        """The source has stopped writing."""
        self._writer_stopped = True
        return self._maybe_drained()

    def peer_lost(self, reason: str) -> list[Action]:
        """The control channel broke: nobody will say drained."""
        return self._give_up(reason, tell_peer=False) + self._ask_fence()

    def receives_stopped(self) -> list[Action]:
        """Answer to StopReceiving."""
        self._receives_stopped = True
        return self._maybe_drained()

    def fenced(self) -> list[Action]:
        """Answer to Fence."""
        self._receives_stopped = self._writer_stopped = True
        return self._maybe_drained()

    def tick(self, now: float) -> list[Action]:
        """Time has passed. A lease that ran out ends the handoff and fences the writer."""
        if self.ended:
            return []
        if now < self.lease_until_s:
            return self._ask_for_lost(now)
        return self._give_up("the lease ran out", tell_peer=True) + self._ask_fence()

    def _ask_for_lost(self, now: float) -> list[Action]:
        """Everything was posted, but for half a lease nothing has come and something is missing: it may be lost."""
        num_events, since_s = self._quiet
        if self._num_events != num_events:
            self._quiet = (self._num_events, now)
        elif self._record is not None and self.state is not HandoffState.ABORTING and now >= since_s + self.lease_s / 2:
            self._quiet = (num_events, now)
            self._nack_round += 1
            reason, number = "it did not arrive", self._nack_round
            return [SendNack(blocks=blocks, reason=reason, round=number) for blocks in self.missing()]
        return []

    def _give_up(self, reason: str, *, tell_peer: bool) -> list[Action]:
        if self.ended or self.state is HandoffState.ABORTING:
            return []
        actions: list[Action] = [SendAbort(reason=reason)] if tell_peer else []
        actions.append(Failed(reason=reason))
        if self.state is HandoffState.OFFERED:
            self.state = HandoffState.EXPIRED
            return actions
        self.state = HandoffState.ABORTING
        return [*actions, StopReceiving()]

    def _ask_fence(self) -> list[Action]:
        if self.state is not HandoffState.ABORTING or self._fence_asked or self._writer_stopped:
            return []
        self._fence_asked = True
        return [Fence()]

    def _maybe_delivered(self) -> list[Action]:
        whole = all(arrived == self._wanted for arrived in self._arrived.values())
        if self._record is None or self._in_flight or self._others or not whole:
            return []
        if not self._has_expected_digests(self._record):
            return self._give_up("the digest of what arrived is not that of what was sent", tell_peer=True)
        self.state = HandoffState.DELIVERED
        return [SendDelivered(), Deliver(record=self._record)]

    def _maybe_drained(self) -> list[Action]:
        quiet = self._receives_stopped and self._writer_stopped and not self._in_flight and not self._others
        if self.state is not HandoffState.ABORTING or not quiet:
            return []
        self.state = HandoffState.DRAINED
        return [ReleaseBlocks()]

    def check_invariants(self) -> None:
        """Asserts what must hold after each event."""
        assert all(not arrived & ~self._wanted for arrived in self._arrived.values())
        for blocks in self._in_flight:
            assert not any(blocks.mask & self._arrived[blocks.source, layer] for layer in blocks.layers)
        if self.ended:
            assert not self._in_flight
            assert not self._others
        if self.state is HandoffState.DELIVERED:
            assert self._record is not None
            assert not self.missing()


def _continues(blocks: BlockRange, last: BlockRange) -> bool:
    """Whether `last` is the last layer of `blocks`."""
    ours, others = ((b.first_block, b.num_blocks, b.source) for b in (blocks, last))
    return ours == others and blocks.layers.stop == last.layers.stop
