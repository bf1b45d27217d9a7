"""The prefill worker's half of one handoff. Pure; `sender.py` carries out what it asks for.

Owns: when source blocks may be given back (never while a send of theirs is under way), what to resend, and when a
peer counts as gone.
"""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.handoff import (
    ENDED,
    Action,
    BlockRange,
    Failed,
    Fence,
    HandoffState,
    Record,
    ReleaseBlocks,
    Resend,
    SendAbort,
    SendDrained,
    SendRecord,
)
from tandem.types import Epoch


class SourceHandoff:
    """One rank's half of one handoff, from its offer on.

    `lease_s` also bounds how long a silent destination is believed in. Rank 0 speaks for all ranks with the
    destination: its half is over only when theirs are.
    """

    def __init__(self, *, lease_s: float, max_resends: int, now: float) -> None:
        self.state = HandoffState.OFFERED
        self.epoch = Epoch(0)
        self.first_block = 0
        self.lease_s = lease_s
        self._heard_s = now
        self.max_resends = max_resends
        self._resends: dict[BlockRange, int] = {}
        self._answered: dict[BlockRange, int] = {}
        """The newest round of NACKs that each range was sent again for: of one round, once."""
        self._sent: set[BlockRange] = set()
        """Ranges whose last send is over as far as the transport knows."""
        self._in_flight: dict[BlockRange, str] = {}
        """Ranges being sent; with the reason of a NACK that was quicker than the transport's own word."""
        self._others: set[int] = set()
        """Ranks that may still have sends under way."""
        self._delivered = False
        self._fence_at_s: float | None = None
        self._fence_asked = False
        self._peer_knows = True
        """Whether the peer is still there to be told that we have drained."""

    @property
    def ended(self) -> bool:
        """No block is held and nothing more will happen."""
        return self.state in ENDED

    @property
    def may_send(self) -> bool:
        """Whether blocks may be posted."""
        return self.state in (HandoffState.RESERVED, HandoffState.MOVING) and not self._delivered

    def ticket(
        self, *, epoch: Epoch, lease_s: float, first_block: int, now: float, other_ranks: Iterable[int] = ()
    ) -> list[Action]:
        """The destination has reserved blocks; `other_ranks` have a half of their own each, and know it."""
        self._heard_s = now
        if self.state is not HandoffState.OFFERED:
            return []
        self.state = HandoffState.RESERVED
        self.epoch, self.first_block, self.lease_s = epoch, first_block, lease_s
        self._others = set(other_ranks)
        return []

    def renewed(self, now: float) -> list[Action]:
        """The destination gave a sign of life."""
        self._heard_s = now
        return []

    def posting(self, blocks: BlockRange) -> bool:
        """A message is about to be posted; False when it must not be. Pair each True with one `sent`."""
        if not self.may_send or blocks in self._in_flight:
            return False
        self.state = HandoffState.MOVING
        self._sent.discard(blocks)
        self._in_flight[blocks] = ""
        return True

    def sent(self, blocks: BlockRange, error: str | None) -> list[Action]:
        """A posted message's memory is free again; with an error, it did not arrive."""
        refused = self._in_flight.pop(blocks)
        if error is not None and self.may_send:
            return self._resend(blocks, error)
        self._sent.add(blocks)
        if refused and self.may_send and self._resends.get(blocks, 0) < self.max_resends:
            return self._resend(blocks, refused)
        return self._maybe_over()

    def nack(self, blocks: BlockRange, reason: str, *, round_number: int, now: float) -> list[Action]:
        """The destination did not get a range whole.

        What is still under way in it is sent again when that send is over, for a NACK may be quicker than the
        transport; it does not fail the handoff then, for the NACK may also have come too early.
        """
        self._heard_s = now
        actions: list[Action] = []
        for sent in sorted({*self._in_flight, *self._sent}, key=lambda b: (b.layer, b.first_block)):
            if not sent.overlaps(blocks) or self._answered.get(sent, -1) >= round_number:
                continue
            self._answered[sent] = round_number
            if sent in self._in_flight:
                self._in_flight[sent] = reason
            elif self.may_send:
                actions += self._resend(sent, reason)
        return actions

    def rank_ended(self, rank: int) -> list[Action]:
        """None of another rank's sends is under way or will start."""
        self._others.discard(rank)
        return self._maybe_over()

    def computed(self, record: Record) -> list[Action]:
        """The prompt is prefilled and all its blocks have been posted."""
        return [SendRecord(record=record)] if self.may_send else []

    def delivered(self, now: float) -> list[Action]:
        """The destination has everything."""
        self._heard_s = now
        if self.may_send:
            self._delivered = True
        return self._maybe_over()

    def abort(self, reason: str) -> list[Action]:
        """Our side gives up."""
        return self._give_up(reason, tell_peer=True)

    def peer_aborted(self, reason: str) -> list[Action]:
        """The destination gives up and waits for our drained."""
        return self._give_up(reason, tell_peer=False)

    def peer_lost(self, reason: str, now: float) -> list[Action]:
        """The control channel broke. Sends that do not end by themselves are fenced one lease later."""
        self._peer_knows = False
        if self._delivered:
            self._fence_at_s = now + self.lease_s
            return []
        actions = self._give_up(reason, tell_peer=False)
        if self.state is HandoffState.ABORTING and self._fence_at_s is None:
            self._fence_at_s = now + min(self.lease_s, 1.0)
        return actions

    def fenced(self) -> list[Action]:
        """Answer to Fence; the unfinished sends fail through `sent`."""
        return self._maybe_over()

    def tick(self, now: float) -> list[Action]:
        """Time has passed. A destination that is silent for a lease is given up; stuck sends are fenced a lease on."""
        if self.ended:
            return []
        actions: list[Action] = []
        if now >= self._heard_s + self.lease_s and not self._delivered:
            actions += self._give_up("the decode worker is silent", tell_peer=True)
            if self._fence_at_s is None:
                self._fence_at_s = now
        if (self._delivered or self.state is HandoffState.ABORTING) and self._fence_at_s is None:
            self._fence_at_s = now + self.lease_s
        stuck = bool(self._in_flight) and self._fence_at_s is not None and now >= self._fence_at_s
        if stuck and not self._fence_asked:
            self._fence_asked = True
            actions.append(Fence())
        return actions

    def _resend(self, blocks: BlockRange, reason: str) -> list[Action]:
        self._resends[blocks] = self._resends.get(blocks, 0) + 1
        self._sent.discard(blocks)
        if self._resends[blocks] > self.max_resends:
            return self._give_up(f"layer {blocks.layer} could not be sent: {reason}", tell_peer=True)
        return [Resend(blocks=blocks)]

    def _give_up(self, reason: str, *, tell_peer: bool) -> list[Action]:
        if self.ended or self._delivered or self.state is HandoffState.ABORTING:
            return []
        actions: list[Action] = [SendAbort(reason=reason)] if tell_peer else []
        actions.append(Failed(reason=reason))
        if self.state is HandoffState.OFFERED:
            self.state = HandoffState.EXPIRED
            return [*actions, ReleaseBlocks()]
        self.state = HandoffState.ABORTING
        return actions + self._maybe_over()

    def _maybe_over(self) -> list[Action]:
        if self._in_flight or self._others or self.ended:
            return []
        if self._delivered:
            self.state = HandoffState.DELIVERED
            return [ReleaseBlocks()]
        if self.state is not HandoffState.ABORTING:
            return []
        self.state = HandoffState.DRAINED
        drained: list[Action] = [SendDrained()] if self._peer_knows else []
        return [*drained, ReleaseBlocks()]

    def check_invariants(self) -> None:
        """Asserts what must hold after each event."""
        assert not self._sent & set(self._in_flight)
        if self.ended:
            assert not self._in_flight
            assert not self._others
