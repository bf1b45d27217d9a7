"""Both halves of a handoff against each other, over every interleaving of loss, abort, silence and completion.

The world between them: a control channel each way that keeps order and may break, messages that may land, fail, be
repeated or arrive late, and clocks. Held against it: blocks are given back exactly once, and never while a byte may
still be written to or read from them; whatever happens, both sides end.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.destination import DestinationHandoff
from kv_transfer.handoff import (
    Action,
    BlockRange,
    Deliver,
    Failed,
    Fence,
    HandoffState,
    Record,
    ReleaseBlocks,
    Resend,
    SendAbort,
    SendDelivered,
    SendDrained,
    SendNack,
    SendRecord,
    SendTicket,
    StopReceiving,
    combined_digest,
)
from kv_transfer.plan import only_lane
from kv_transfer.source import SourceHandoff
from tandem.types import Epoch

LEASE_S = 10.0
NUM_LAYERS = 2
NUM_BLOCKS = 3


@dataclass
class Flight:
    """A posted message: whether the source still counts it, and whether the destination has placed it."""

    blocks: BlockRange
    epoch: Epoch
    source_waits: bool = True
    placed: bool = False
    over: bool = False


class HandoffWorld(RuleBasedStateMachine):
    """One source, one destination, and everything that can go wrong between them."""

    @initialize(
        first_block=st.integers(0, NUM_BLOCKS),
        max_resends=st.integers(0, 2),
        trouble_after=st.integers(0, 25),
        lost=st.sets(st.integers(0, 7), max_size=2),
        together=st.sets(st.integers(0, NUM_BLOCKS - 1)),
        ending=st.sampled_from(["silent", "fair", "stuck"]),
    )
    def start(
        self, first_block: int, max_resends: int, trouble_after: int, lost: set[int], together: set[int], ending: str
    ) -> None:
        self.now = 0.0
        self.num_steps = 0
        self.trouble_after = trouble_after
        self.lost = lost
        self.fenced = False
        self.ending = ending
        self.first_block = first_block
        self.source = SourceHandoff(lease_s=LEASE_S, max_resends=max_resends, now=0.0)
        self.destination = DestinationHandoff(
            epoch=Epoch(3),
            lanes=[only_lane(NUM_LAYERS, 1)],
            num_blocks=NUM_BLOCKS,
            lease_s=LEASE_S,
            now=0.0,
        )
        self.to_destination: list[Action] = []
        self.to_source: list[Action] = []
        self.connected = True
        self.source_alive = self.destination_alive = True
        self.flights: list[Flight] = []
        self.unposted = [
            BlockRange(layer=layer, first_block=block, num_blocks=1)
            for layer in range(NUM_LAYERS)
            for block in sorted(set(range(first_block, NUM_BLOCKS)) - together)
        ]
        self.unposted += [
            BlockRange(layer=0, num_layers=NUM_LAYERS, first_block=block, num_blocks=1)
            for block in sorted(together - set(range(first_block)))
        ]
        self.posted: set[BlockRange] = set()
        self.source_released = self.destination_released = 0
        self.delivered: list[Record] = []
        self.failures: list[str] = []
        self.quiescing = False
        self.fencing = False

    # --- carrying out actions

    def do_source(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ReleaseBlocks():
                    assert not any(f.source_waits for f in self.flights)
                    self.source_released += 1
                case Resend(blocks=blocks):
                    self.post(blocks)
                case Fence():
                    for flight in [f for f in self.flights if f.source_waits]:
                        flight.source_waits = False
                        self.do_source(self.source.sent(flight.blocks, "closed"))
                    self.do_source(self.source.fenced())
                case Failed(reason=reason):
                    self.failures.append(reason)
                case SendRecord() | SendAbort() | SendDrained():
                    if self.connected:
                        self.to_destination.append(action)
                case _:
                    raise AssertionError(action)

    def do_destination(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ReleaseBlocks():
                    assert not any(f.placed and not f.over for f in self.flights)
                    assert self.fenced or self.source.ended, "the writer has not stopped"
                    self.destination_released += 1
                case Deliver(record=record):
                    assert not any(f.placed and not f.over for f in self.flights)
                    self.delivered.append(record)
                case StopReceiving():
                    self.quiescing = True
                case Fence():
                    self.fencing = True
                case Failed(reason=reason):
                    assert "digest" not in reason, "nothing is damaged unseen here"
                    self.failures.append(reason)
                case SendTicket() | SendNack() | SendDelivered() | SendAbort():
                    if self.connected:
                        self.to_source.append(action)
                case _:
                    raise AssertionError(action)

    def post(self, blocks: BlockRange) -> None:
        if self.source.posting(blocks):
            self.flights.append(Flight(blocks=blocks, epoch=self.source.epoch))
            if len(self.flights) - 1 in self.lost:
                self.message_over(self.flights[-1], None)

    # --- what may happen

    @precondition(lambda self: self.destination.state is HandoffState.OFFERED)
    @rule()
    def blocks_are_reserved(self) -> None:
        self.do_destination(self.destination.reserved(self.first_block))

    @precondition(lambda self: self.to_destination)
    @rule()
    def destination_hears(self) -> None:
        match self.to_destination.pop(0):
            case SendRecord(record=record):
                self.do_destination(self.destination.record(record))
            case SendAbort(reason=reason):
                self.do_destination(self.destination.peer_aborted(reason))
            case SendDrained():
                self.do_destination(self.destination.peer_drained())

    @precondition(lambda self: self.to_source)
    @rule()
    def source_hears(self) -> None:
        match self.to_source.pop(0):
            case SendTicket(epoch=epoch, lease_s=lease_s, first_block=first_block):
                self.do_source(self.source.ticket(epoch=epoch, lease_s=lease_s, first_block=first_block, now=self.now))
            case SendNack(blocks=blocks, reason=reason, round=number):
                self.do_source(self.source.nack(blocks, reason, round_number=number, now=self.now))
            case SendDelivered():
                self.do_source(self.source.delivered(self.now))
            case SendAbort(reason=reason):
                self.do_source(self.source.peer_aborted(reason))

    @precondition(lambda self: self.unposted and self.source.may_send)
    @rule()
    def a_layer_is_computed(self) -> None:
        blocks = self.unposted.pop(0)
        self.posted.add(blocks)
        self.post(blocks)
        if not self.unposted:
            self.prompt_is_computed()

    @precondition(lambda self: not self.unposted and self.source.may_send and not self.posted)
    @rule()
    def prompt_is_computed(self) -> None:
        digest = combined_digest(hash((b.layer, b.first_block)) & 0xFFFF for b in sorted(self.posted, key=order))
        record = Record(
            first=(), num_cached_tokens=0, num_messages=len(self.posted), digest=digest
        )
        self.do_source(self.source.computed(record))

    @precondition(lambda self: any(not f.placed and not f.over for f in self.flights))
    @rule(data=st.data())
    def a_message_arrives(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if not f.placed and not f.over]))
        before = self.destination.state
        if self.destination.may_place(flight.blocks, flight.epoch):
            assert before in (HandoffState.RESERVED, HandoffState.MOVING)
            flight.placed = True
        else:
            self.message_over(flight, None)

    @precondition(lambda self: any(f.placed and not f.over for f in self.flights))
    @rule(data=st.data(), fails=st.booleans())
    def a_message_lands(self, data: st.DataObject, fails: bool) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if f.placed and not f.over]))
        moving = self.destination.state is HandoffState.MOVING
        self.land(flight, "bit flip" if fails else None)
        if fails and moving and self.connected:
            assert any(isinstance(a, SendNack) and a.blocks == flight.blocks for a in self.to_source)

    def land(self, flight: Flight, error: str | None) -> None:
        flight.over = True
        digest = hash((flight.blocks.layer, flight.blocks.first_block)) & 0xFFFF
        self.do_destination(self.destination.landed(flight.blocks, digest=digest, error=error))
        self.message_over(flight, None)

    def message_over(self, flight: Flight, error: str | None) -> None:
        flight.over = True
        if flight.source_waits:
            flight.source_waits = False
            self.do_source(self.source.sent(flight.blocks, error))

    @precondition(lambda self: any(not f.placed and not f.over for f in self.flights))
    @rule(data=st.data())
    def a_message_is_lost(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from([f for f in self.flights if not f.placed and not f.over]))
        self.message_over(flight, "lost")

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def a_message_comes_twice_or_late(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from(self.flights))
        copy = Flight(blocks=flight.blocks, epoch=flight.epoch, source_waits=False)
        if self.destination.may_place(copy.blocks, copy.epoch):
            copy.placed = True
            self.flights.append(copy)

    @rule(epoch=st.sampled_from([0, 2, 4]))
    def a_stale_message_is_never_placed(self, epoch: int) -> None:
        assert not self.destination.may_place(BlockRange(layer=0, first_block=0, num_blocks=1), Epoch(epoch))

    @precondition(lambda self: self.num_steps >= self.trouble_after)
    @rule(side=st.sampled_from(["source", "destination"]))
    def one_side_aborts(self, side: str) -> None:
        if side == "source":
            self.do_source(self.source.abort("client gone"))
        else:
            self.do_destination(self.destination.abort("client gone"))

    @precondition(lambda self: self.connected and self.num_steps >= self.trouble_after)
    @rule(receives_stop=st.booleans())
    def the_control_channel_breaks(self, receives_stop: bool) -> None:
        self.connected = False
        self.to_source.clear()
        self.to_destination.clear()
        self.do_source(self.source.peer_lost("broken", self.now))
        self.do_destination(self.destination.peer_lost("broken"))
        if receives_stop:
            if self.quiescing or self.fencing:
                self.receives_stop()
            assert self.destination.ended, "it needs no clock to end"

    @precondition(lambda self: self.num_steps >= self.trouble_after)
    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes_in_silence(self, seconds: float) -> None:
        self.now += seconds
        self.do_source(self.source.tick(self.now))
        self.do_destination(self.destination.tick(self.now))

    @rule()
    def time_passes_in_contact(self) -> None:
        self.now += LEASE_S / 4
        if self.connected:
            self.do_destination(self.destination.renewed(self.now))
            self.do_source(self.source.renewed(self.now))
        self.do_source(self.source.tick(self.now))
        self.do_destination(self.destination.tick(self.now))

    @rule(num_steps=st.integers(1, 4))
    def all_goes_well(self, num_steps: int) -> None:
        """What moves a handoff on, a few times over: so that trouble finds handoffs that have come far."""
        for _ in range(num_steps):
            if self.destination.state is HandoffState.OFFERED:
                self.blocks_are_reserved()
            elif self.to_source:
                self.source_hears()
            elif self.to_destination:
                self.destination_hears()
            elif self.source.may_send and self.unposted:
                self.a_layer_is_computed()
            elif self.source.may_send and not self.posted:
                self.prompt_is_computed()
            else:
                self.messages_move_on()

    def messages_move_on(self) -> None:
        for flight in [f for f in self.flights if not f.over]:
            if flight.placed or self.destination.may_place(flight.blocks, flight.epoch):
                flight.placed = True
                self.land(flight, None)
            else:
                self.message_over(flight, None)

    @precondition(lambda self: self.quiescing or self.fencing)
    @rule()
    def receives_stop(self) -> None:
        fencing, self.quiescing, self.fencing = self.fencing, False, False
        for flight in [f for f in self.flights if f.placed and not f.over]:
            self.land(flight, "cancelled")
        if fencing:
            self.fenced = True
            self.do_destination(self.destination.fenced())
        else:
            self.do_destination(self.destination.receives_stopped())

    # --- what must hold

    @invariant()
    def machines_are_sound(self) -> None:
        if not hasattr(self, "source"):
            return
        self.num_steps += 1
        self.source.check_invariants()
        self.destination.check_invariants()
        assert self.source_released <= 1
        assert self.destination_released + len(self.delivered) <= 1

    @invariant()
    def blocks_in_use_are_held(self) -> None:
        if not hasattr(self, "source"):
            return
        if self.destination_released or self.delivered:
            assert not any(f.placed and not f.over for f in self.flights)
        if self.source_released:
            assert not any(f.source_waits for f in self.flights)

    def all_is_heard(self) -> None:
        while self.to_source or self.to_destination:
            if self.to_source:
                self.source_hears()
            if self.to_destination:
                self.destination_hears()
        if self.quiescing or self.fencing:
            self.receives_stop()

    def end_in_silence(self) -> None:
        """Nobody renews, no message moves: the clocks alone end it."""
        for _ in range(6):
            self.now += LEASE_S + 1
            self.do_source(self.source.tick(self.now))
            self.do_destination(self.destination.tick(self.now))
            self.all_is_heard()

    def end_in_fairness(self) -> None:
        """Both renew, what can be done is done, nothing more is lost: it ends, and no lease has run out for it."""
        failures = len(self.failures)
        for _ in range(40):
            self.all_is_heard()
            self.all_goes_well(8)
            self.messages_move_on()
            self.time_passes_in_contact()
        assert not any("lease" in reason or "silent" in reason for reason in self.failures[failures:])

    def end_though_stuck(self) -> None:
        """One side has given up, both renew, but no send ends by itself: the fences end it."""
        self.one_side_aborts("destination" if len(self.flights) % 2 else "source")
        for _ in range(16):
            self.all_is_heard()
            self.time_passes_in_contact()
        self.all_is_heard()

    def teardown(self) -> None:
        """In each of three ways to go on, both sides end and give everything back."""
        if not hasattr(self, "source"):
            return
        held = self.destination.state not in (HandoffState.OFFERED, HandoffState.EXPIRED)
        if self.ending == "fair":
            self.end_in_fairness()
            held = self.destination.state is not HandoffState.EXPIRED
        elif self.ending == "stuck":
            self.end_though_stuck()
        else:
            self.end_in_silence()
        assert self.source.ended, self.source.state
        assert self.destination.ended, self.destination.state
        assert self.source_released == 1
        assert self.destination_released + len(self.delivered) == (1 if held else self.destination_released)
        if self.delivered:
            assert not self.destination.missing()
        else:
            assert self.failures


def order(blocks: BlockRange) -> tuple[int, int]:
    return blocks.layer, blocks.first_block


HandoffWorld.TestCase.settings = settings(max_examples=500, stateful_step_count=30, deadline=None)
TestHandoff = HandoffWorld.TestCase
