"""The directory of a tier: examples, and a state machine that uses, fills, pins and breaks it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.kv.eviction import EvictionPolicy, Lrfu, Lru
from tandem.kv.prefix_directory import PrefixDirectory, SavedBlock
from tandem.types import BlockHash


def names(text: str) -> list[BlockHash]:
    """The chain of a text's letters: "abc" is the blocks "a", "ab" and "abc"."""
    return [BlockHash(text[:end].encode()) for end in range(1, len(text) + 1)]


def name(text: str) -> BlockHash:
    return names(text)[-1]


def filled(capacity: int, *texts: str, policy: EvictionPolicy | None = None) -> PrefixDirectory:
    directory = PrefixDirectory(capacity, policy or Lru())
    for text in texts:
        directory.insert(names(text))
    directory.check_invariants()
    return directory


def test_a_hit_is_as_long_as_the_leading_names_that_are_there() -> None:
    directory = filled(10, "abc", "abd")
    assert directory.match(names("abcd")) == 3
    assert directory.match(names("abx")) == 2
    assert directory.match(names("x")) == 0
    assert directory.match([]) == 0


def test_the_least_recently_used_leaf_makes_room() -> None:
    directory = filled(3, "a", "b", "c")
    directory.use(names("a"))
    assert directory.insert(names("d")).evicted == (name("b"),)


def test_a_parent_stays_while_a_child_is_there_however_old_it_is() -> None:
    directory = filled(3, "abc")
    admission = directory.insert(names("x"))
    assert admission.evicted == (name("abc"),)
    assert directory.match(names("abc")) == 2


def test_a_prefix_that_goes_on_is_not_walked_again_and_makes_no_room_by_its_known_blocks() -> None:
    directory = filled(3, "ab", "x")
    admission = directory.insert(names("abcd"), num_known=2)
    assert (admission.admitted, admission.evicted) == ((name("abc"),), (name("x"),))
    assert directory.lowest(9) == (name("abc"),)
    directory.check_invariants()


def test_a_prefix_makes_no_room_by_its_own_blocks_and_is_cut_where_there_is_none() -> None:
    directory = filled(3, "ab")
    admission = directory.insert(names("abcde"))
    assert admission.admitted == (name("abc"),)
    assert admission.evicted == ()


def test_pinned_blocks_and_their_prefixes_stay() -> None:
    directory = filled(3, "ab", "c")
    directory.pin(name("ab"))
    directory.use(names("c"))
    assert directory.insert(names("d")).evicted == (name("c"),)
    directory.unpin(name("ab"))
    assert directory.insert(names("ef")).evicted == (name("ab"), name("a"))


def test_a_tenant_over_its_quota_makes_room_for_itself_only() -> None:
    directory = PrefixDirectory(10, Lru(), quotas={"small": 2})
    directory.insert(names("ab"), tenant="large")
    directory.insert(names("cd"), tenant="small")
    admission = directory.insert(names("e"), tenant="small")
    assert admission.evicted == (name("cd"),)
    assert directory.match(names("ab")) == 2


def test_a_damaged_block_goes_with_all_that_is_reached_through_it() -> None:
    directory = filled(10, "abc", "abd", "x")
    directory.pin(name("abd"))
    assert set(directory.remove(name("ab"))) == {name("ab"), name("abc"), name("abd")}
    assert directory.match(names("abc")) == 1
    assert directory.remove(name("ab")) == ()
    directory.check_invariants()


def test_several_damaged_blocks_go_together() -> None:
    directory = filled(10, "abc", "abd", "x", "y")
    gone = directory.remove(name("abc"), name("ab"), name("x"), name("no"))
    assert set(gone) == {name("ab"), name("abc"), name("abd"), name("x")}
    assert set(directory.names()) == {name("a"), name("y")}
    directory.check_invariants()


def test_a_cleared_directory_is_empty_and_keeps_its_clock() -> None:
    directory = filled(10, "abc", "x")
    directory.pin(name("abc"))
    clock = directory.clock
    assert set(directory.clear()) == {*names("abc"), *names("x")}
    assert (len(directory), directory.clock) == (0, clock)
    directory.insert(names("xy"))
    directory.check_invariants()


def test_names_come_parents_first_and_pins_are_known() -> None:
    directory = filled(10, "abc", "x", "abd")
    assert directory.names() == (*names("abc"), name("x"), name("abd"))
    directory.pin(name("ab"))
    assert [directory.num_pins(n) for n in names("abcx")] == [0, 1, 0, 0]


def saved(text: str, clock: int, **changes: Any) -> SavedBlock:
    """The last block of a text."""
    parent = name(text[:-1]) if text[1:] else None
    return SavedBlock(**{"name": name(text), "parent": parent, "tenant": "", "clock": clock, **changes})


def test_restored_blocks_go_on_being_evicted_as_if_nothing_had_happened() -> None:
    directory = filled(6, "abc", "x", "y", policy=Lrfu(half_life=0.5))
    directory.use(names("x"))
    back = PrefixDirectory(6, Lrfu(half_life=0.5))
    priorities = directory.priorities()
    blocks = [saved(text, 0, priority=priorities[name(text)]) for text in ("y", "abc", "a", "x", "ab")]
    back.restore(blocks, clock=directory.clock)
    back.check_invariants()
    for text in ("12", "3", "x", "4"):
        assert back.insert(names(text)) == directory.insert(names(text))


def test_without_priorities_restored_blocks_are_as_old_as_their_clocks_say() -> None:
    back = PrefixDirectory(3, Lru())
    back.restore([saved("a", 5), saved("b", 2), saved("c", 9)], clock=10)
    assert back.clock == 10
    assert back.insert(names("d")).evicted == (name("b"),)
    assert back.insert(names("e")).evicted == (name("a"),)


def test_a_restored_block_without_a_way_to_its_root_is_left_out() -> None:
    back = PrefixDirectory(9, Lru())
    back.restore([saved("a", 1), saved("abc", 3), saved("abcd", 4), saved("xy", 2)], clock=4)
    assert back.names() == (name("a"),)
    back.check_invariants()


def test_too_many_restored_blocks_make_room_leaves_first() -> None:
    back = PrefixDirectory(2, Lru())
    back.restore([saved("a", 1), saved("ab", 2), saved("x", 3)], clock=4)
    assert set(back.names()) == {name("a"), name("x")}
    back.check_invariants()


def test_a_quota_that_shrank_is_kept_even_where_a_tenants_blocks_are_below_by_others() -> None:
    back = PrefixDirectory(9, Lru(), quotas={"t": 1})
    blocks = [saved("a", 1, tenant="t"), saved("ab", 2, tenant="t"), saved("abc", 3), saved("x", 4)]
    back.restore(blocks, clock=4)
    assert set(back.names()) == {name("a"), name("x")}
    back.check_invariants()


def test_without_room_for_anything_nothing_is_admitted() -> None:
    assert PrefixDirectory(0, Lru()).insert(names("ab")).admitted == ()


def test_frequency_outlasts_one_burst_of_new_blocks_and_recency_outlasts_old_frequency() -> None:
    directory = filled(2, "a", policy=Lrfu(half_life=1.0))
    for _ in range(3):
        directory.use(names("a"))
    directory.insert(names("b"))
    assert directory.insert(names("c")).evicted == (name("b"),)
    for _ in range(20):
        directory.use(names("c"))
    assert directory.insert(names("d")).evicted == (name("a"),)


@pytest.mark.parametrize("half_life", [0.5, 1000.0])
def test_a_decayed_count_is_the_sum_of_its_uses(half_life: float) -> None:
    policy = Lrfu(half_life=half_life)
    priority = None
    uses = [1.0, 2.0, 2.0, 50.0]
    for now in uses:
        priority = policy.used(name("a"), before=priority, now=now)
    assert priority is not None
    decayed = sum(2.0 ** ((use - 50.0) / half_life) for use in uses)
    assert 2.0 ** (priority - 50.0 / half_life) == pytest.approx(decayed)


class Directories(RuleBasedStateMachine):
    """Any order of calls, with prefixes that share beginnings."""

    texts = st.text(alphabet="ab", min_size=1, max_size=6)

    @initialize(
        capacity=st.integers(0, 8),
        policy=st.sampled_from([Lru(), Lrfu(half_life=3.0)]),
        quota=st.one_of(st.none(), st.integers(0, 4)),
    )
    def start(self, capacity: int, policy: EvictionPolicy, quota: int | None) -> None:
        self.pins: list[BlockHash] = []
        self.present: set[BlockHash] = set()
        self.directory = PrefixDirectory(capacity, policy, quotas={} if quota is None else {"t": quota})

    @rule(text=texts, tenant=st.sampled_from(["", "t"]))
    def insert(self, text: str, tenant: str) -> None:
        before = self.directory.match(names(text))
        admission = self.directory.insert(names(text), tenant=tenant)
        assert admission.admitted == tuple(names(text)[before : before + len(admission.admitted)])
        assert not set(admission.evicted) & ({*names(text)} | set(self.pins))
        for evicted in admission.evicted:
            self.present.remove(evicted)
        self.present |= set(admission.admitted)

    @rule(text=texts)
    def use(self, text: str) -> None:
        assert self.directory.use(names(text)) == self.directory.match(names(text))

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.present)))
        self.directory.pin(chosen)
        self.pins.append(chosen)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.directory.unpin(self.pins.pop())

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = set(self.directory.remove(data.draw(st.sampled_from(sorted(self.present)))))
        self.present -= gone
        self.pins = [pinned for pinned in self.pins if pinned not in gone]

    @rule()
    def restart(self) -> None:
        parents = {n: BlockHash(n[:-1]) if n[1:] else None for n in self.present}
        tenants = {n: self.directory._blocks[n].tenant for n in self.present}
        priorities = self.directory.priorities()
        blocks = [
            SavedBlock(name=n, parent=parents[n], tenant=tenants[n], clock=0, priority=priorities[n])
            for n in sorted(self.present)
        ]
        fresh = PrefixDirectory(self.directory.capacity, self.directory.policy, quotas=self.directory.quotas)
        fresh.restore(blocks, clock=self.directory.clock)
        assert fresh.priorities() == priorities
        self.directory, self.pins = fresh, []

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "directory"):
            self.directory.check_invariants()
            assert {n for n in self.present if n in self.directory} == self.present
            assert len(self.directory) == len(self.present)


TestDirectories = Directories.TestCase
TestDirectories.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
