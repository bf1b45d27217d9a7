"""The index of who has what: examples, and equality with a plain model of sets."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tandem.kv.prefix_index import Batch, PrefixIndex
from tandem.types import BlockHash


def names(text: str) -> tuple[BlockHash, ...]:
    """The chain of a text's letters."""
    return tuple(BlockHash(text[:end].encode()) for end in range(1, len(text) + 1))


def index_of(**owners: str) -> PrefixIndex:
    """Each owner has one prefix in its host tier."""
    index = PrefixIndex()
    for owner, text in owners.items():
        index.reset(owner, epoch="1", seq=0, tiers={"host": names(text)})
    index.check_invariants()
    return index


def batch(seq: int, *, epoch: str = "1", tier: str = "host", added: str = "", removed: str = "") -> Batch:
    gone = names(removed)[-1:]
    return Batch(epoch=epoch, seq=seq, tier=tier, added=names(added), removed=gone)


def test_each_owner_has_its_own_leading_blocks() -> None:
    index = index_of(a="xyz", b="xy", c="q")
    assert index.match(names("xyzw")) == {"a": {"host": 3}, "b": {"host": 2}}
    assert index.match(names("w")) == {}
    assert index.match(()) == {}


def test_tiers_of_an_owner_are_counted_apart() -> None:
    index = index_of(a="xy")
    assert index.apply("a", batch(1, tier="disk", added="xyz"))
    assert index.match(names("xyzw")) == {"a": {"host": 2, "disk": 3}}


def test_a_hole_ends_a_prefix() -> None:
    index = index_of(a="xyz")
    assert index.apply("a", batch(1, removed="xy"))
    assert index.match(names("xyz")) == {"a": {"host": 1}}


def test_a_batch_after_a_gap_changes_nothing_and_says_so() -> None:
    index = index_of(a="x")
    assert not index.apply("a", batch(2, added="xy"))
    assert index.match(names("xy")) == {"a": {"host": 1}}
    assert index.position("a") == ("1", 0)


def test_a_batch_of_another_epoch_or_of_a_stranger_is_refused() -> None:
    index = index_of(a="x")
    assert not index.apply("a", batch(1, epoch="2", added="xy"))
    assert not index.apply("b", batch(1, added="xy"))
    assert index.owners() == ("a",)


def test_a_batch_that_is_known_already_is_passed_over() -> None:
    index = index_of(a="x")
    assert index.apply("a", batch(1, added="xy"))
    assert index.apply("a", batch(1, removed="xy"))
    assert index.match(names("xy")) == {"a": {"host": 2}}


def test_an_owner_that_is_dropped_leaves_nothing() -> None:
    index = index_of(a="xyz", b="x")
    index.drop("a")
    index.drop("a")
    assert index.match(names("xyz")) == {"b": {"host": 1}}
    assert len(index) == 1
    index.reset("c", epoch="1", seq=0, tiers={"host": names("xyz")})
    assert index.match(names("xyz")) == {"b": {"host": 1}, "c": {"host": 3}}
    index.check_invariants()


NAMES = [BlockHash(bytes([value])) for value in range(6)]
steps = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from(["host", "disk"]),
    st.lists(st.sampled_from(NAMES), max_size=4),
    st.lists(st.sampled_from(NAMES), max_size=4),
    st.sampled_from(["batch", "batch", "batch", "reset", "drop"]),
)


@given(st.lists(steps, max_size=20))
def test_any_history_gives_what_sets_would_give(
    history: list[tuple[str, str, list[BlockHash], list[BlockHash], str]],
) -> None:
    index, model = PrefixIndex(), {}
    for owner, tier, added, removed, kind in history:
        if kind == "drop":
            index.drop(owner)
            model.pop(owner, None)
        elif kind == "reset" or owner not in model:
            index.reset(owner, epoch="1", seq=0, tiers={tier: added})
            model[owner] = (0, {tier: set(added)})
        else:
            seq, tiers = model[owner]
            change = Batch(epoch="1", seq=seq + 1, tier=tier, added=tuple(added), removed=tuple(removed))
            assert index.apply(owner, change)
            tiers[tier] = (tiers.get(tier, set()) | set(added)) - set(removed)
            model[owner] = (seq + 1, tiers)
        index.check_invariants()
    expected: dict[str, dict[str, int]] = {}
    for owner, (_, tiers) in model.items():
        for tier, held in tiers.items():
            count = next((i for i, name in enumerate(NAMES) if name not in held), len(NAMES))
            if count:
                expected.setdefault(owner, {})[tier] = count
    assert index.match(NAMES) == expected
