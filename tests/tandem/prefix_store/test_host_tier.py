"""The host tier's slots under any order of reserving, reading, evicting and removing."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.kv.eviction import Lrfu
from tandem.prefix_store.blocks import Held, Reservation
from tandem.prefix_store.host import HostTier
from tandem.prefix_store.slab import Slab
from tandem.types import BlockHash

NUM_SLOTS = 6
BLOCK_BYTES = 16
TEXTS = ["a", "ab", "abc", "abcd", "abx", "abxy", "p", "pq", "pqr", "z"]


def names(text: str) -> list[BlockHash]:
    """The chain of a text's letters, 16 bytes each."""
    return [BlockHash(text[:end].encode().ljust(16, b".")) for end in range(1, len(text) + 1)]


class HostTierMachine(RuleBasedStateMachine):
    """Writers write their names' bytes; a reader must see its block's as long as it holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: set[BlockHash] = set()
        self.slab = Slab(num_slots=NUM_SLOTS, block_bytes=BLOCK_BYTES)
        self.host = HostTier(self.slab, policy=Lrfu(), quotas={"small": 2}, on_change=self.on_change)
        self.reservations: list[Reservation] = []
        self.loans: list[tuple[Held, ...]] = []
        self.pinned: list[list[BlockHash]] = []

    def on_change(self, added, removed) -> None:  # type: ignore[no-untyped-def]
        assert not self.announced & set(added), "told twice"
        self.announced |= set(added)
        assert self.announced >= set(removed), "gone, but never told"
        self.announced -= set(removed)

    @rule(text=st.sampled_from(TEXTS), first=st.integers(0, 3), tenant=st.sampled_from(["", "small"]))
    def reserve(self, text: str, first: int, tenant: str) -> None:
        evicted = self.host.num_evictions
        reservation = self.host.reserve(names(text), first=first, tenant=tenant)
        if reservation is not None:
            assert reservation.first >= min(first, len(text))
            assert self.host.match(names(text)) <= reservation.first
            assert self.host.num_evictions - evicted == len(reservation.evicted)
            for one in reservation.evicted:
                assert self.slab.bytes_of(one.slot).tobytes() == one.name
            for name, slot in zip(reservation.names, reservation.slots, strict=True):
                self.slab.bytes_of(slot)[:] = bytearray(name)
            self.reservations.append(reservation)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), count=st.integers(0, 4))
    def commit(self, data: st.DataObject, count: int) -> None:
        reservation = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        count = min(count, len(reservation.slots))
        assert self.host.commit(reservation, [1] * count) <= count

    @precondition(lambda self: self.reservations)
    @rule()
    def cancel(self) -> None:
        reservation = self.reservations.pop()
        self.host.cancel(reservation)
        self.host.cancel(reservation)

    @rule(text=st.sampled_from(TEXTS))
    def borrow(self, text: str) -> None:
        self.host.use(names(text))
        self.loans.append(self.host.borrow(names(text)))

    @precondition(lambda self: self.loans)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.host.give_back(self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1))))

    @rule(text=st.sampled_from(TEXTS))
    def remove(self, text: str) -> None:
        self.host.remove(names(text)[-1:])

    @rule(text=st.sampled_from(TEXTS))
    def pin(self, text: str) -> None:
        self.pinned.append(names(text)[: self.host.pin(names(text))])

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.host.unpin(self.pinned.pop())

    @rule()
    def clear(self) -> None:
        self.host.clear()

    @invariant()
    def slots_and_names_agree(self) -> None:
        self.host.check_invariants()
        assert self.announced == set(self.host.visible())

    @invariant()
    def readers_see_their_blocks(self) -> None:
        for held in (one for loan in self.loans for one in loan):
            assert self.slab.bytes_of(held.slot).tobytes() == held.name
            assert self.slab.generations_of([held.slot]) == (held.generation,)

    @invariant()
    def what_is_found_is_what_was_written(self) -> None:
        for name in self.host.visible():
            held = self.host.borrow_one(name)
            assert held is not None
            assert self.slab.bytes_of(held.slot).tobytes() == name
            self.host.give_back([held])

    def teardown(self) -> None:
        for reservation in self.reservations:
            self.host.cancel(reservation)
        for loan in self.loans:
            self.host.give_back(loan)
        self.host.check_invariants()
        assert self.host.num_read == self.host.num_reserved == 0
        self.slab.close()


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_slot_has_another_generation_for_each_block() -> None:
    slab = Slab(num_slots=1, block_bytes=BLOCK_BYTES)
    host = HostTier(slab, policy=Lrfu())
    seen = set()
    for text in ("a", "b", "c"):
        reservation = host.reserve(names(text), first=0)
        assert reservation is not None
        host.commit(reservation, [1])
        seen.add(slab.generations_of([0]))
    assert len(seen) == 3
    slab.close()


def test_the_prefix_of_what_made_room_is_known() -> None:
    slab = Slab(num_slots=3, block_bytes=BLOCK_BYTES)
    host = HostTier(slab, policy=Lrfu())
    first = host.reserve(names("abc"), first=0)
    assert first is not None
    host.commit(first, [1, 2, 3])
    second = host.reserve(names("xy"), first=0)
    assert second is not None
    assert [(one.name, one.chain) for one in second.evicted] == [
        (names("abc")[2], tuple(names("abc"))),
        (names("abc")[1], ()),
    ]
    slab.close()
