"""The disk tier as its owner sees it: what is put is there, by prefix, until something makes room or it is removed."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest

from tandem.errors import ConfigError, DirectoryInUse, ForeignDirectory, StoreError
from tandem.prefix_store.disk import DiskTier, DiskTuning
from tandem.prefix_store.disk_files import aligned_memory
from tandem.prefix_store.disk_format import PAGE
from tandem.prefix_store.disk_stats import NotStored, Stored
from tandem.types import BlockHash
from tests.disk_tiers import FaultyFiles, chain, fetch, make_tier, open_tier, payload, payloads, store, survivors


@pytest.mark.parametrize("block_bytes", [PAGE, 3 * PAGE, 5000, 100])
def test_what_was_put_is_read_back(tmp_path: Path, block_bytes: int) -> None:
    with open_tier(tmp_path, block_bytes=block_bytes) as tier:
        assert store(tier, "abcdefghijklm", block_bytes=block_bytes) == [13]
        assert fetch(tier, chain("abcdefghijklm"), block_bytes) == 13


@pytest.mark.parametrize("direct", [True, False])
def test_memory_that_is_not_aligned_works_too(tmp_path: Path, direct: bool) -> None:
    with open_tier(tmp_path) as tier:
        tier._files.direct &= direct
        names = chain("abc")
        odd = [memoryview(bytes(1) + bytes(data))[1:] for data in payloads(names)]
        assert tier.put(names, odd).result(30) == 3
        memory = [aligned_memory(PAGE + 1)[1:] for _ in names]
        assert tier.read(names, memory).result(30) == 3
        assert memory == payloads(names)


def test_without_direct_io_it_works_through_the_page_cache(tmp_path: Path) -> None:
    class Cached(FaultyFiles):
        def probe(self, directory: Path) -> None:
            self.direct = False

    with open_tier(tmp_path, files=Cached()) as tier:
        store(tier, "abc")
        assert fetch(tier, chain("abc")) == 3
        assert not tier.stats().direct


def test_a_hit_is_as_long_as_the_leading_blocks_that_are_there(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abc", "abx")
        assert tier.match(chain("abcd")) == 3
        assert tier.use(chain("abxy")) == 3
        assert fetch(tier, chain("abcd")) == 3
        assert fetch(tier, chain("x")) == 0
        assert fetch(tier, []) == 0
        assert tier.contains(chain("ab")[-1])
        assert chain("abd")[-1] not in tier
        assert tier.stats().blocks == 4


def test_blocks_are_not_there_before_they_are_whole_on_disk(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files) as tier:
        files.may_write.clear()
        done = tier.put(chain("ab"), payloads(chain("ab")))
        assert tier.match(chain("ab")) == 0
        assert fetch(tier, chain("ab")) == 0
        files.may_write.set()
        assert done.result(30) == 2
        assert tier.match(chain("ab")) == 2


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abc", "abc", "abcd")
        assert tier.stats().counters.blocks_written == 4


def test_room_is_made_by_leaves_and_never_by_a_parent_before_its_children(tmp_path: Path) -> None:
    gone: list[BlockHash] = []
    with open_tier(tmp_path, num_segments=3, on_change=lambda _, removed: gone.extend(removed)) as tier:
        num_live = tier.stats().max_blocks
        first = "a" * 10
        store(tier, first, *(chr(ord("b") + i) for i in range(num_live)))
        assert gone == chain(first)[::-1]
        assert tier.stats().counters.evictions == 10


def test_a_tenant_over_its_quota_makes_room_for_itself_only(tmp_path: Path) -> None:
    with open_tier(tmp_path, quotas={"small": 2}) as tier:
        store(tier, "ab", tenant="large")
        store(tier, "cd", "e", tenant="small")
        assert tier.match(chain("ab")) == 2
        assert tier.match(chain("cd")) == 1
        assert tier.match(chain("e")) == 1


def test_a_pinned_block_and_its_prefix_stay(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=3) as tier:
        store(tier, "ab")
        assert tier.pin(chain("ab")[-1])
        assert not tier.pin(chain("x")[-1])
        others = [chr(ord("c") + i) for i in range(40)]
        store(tier, *others)
        assert tier.match(chain("ab")) == 2
        tier.unpin(chain("ab")[-1])
        store(tier, *(text.upper() for text in others))
        assert tier.match(chain("ab")) == 0
        tier.unpin(chain("ab")[-1])


def test_with_everything_pinned_a_put_says_that_there_is_no_room(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=2) as tier:
        text = "abcdefgh"[: tier.stats().max_blocks]
        store(tier, text)
        tier.pin(chain(text)[-1])
        answer = store(tier, "xyz")[0]
        assert isinstance(answer, Stored)
        assert (answer, answer.why) == (0, NotStored.NO_ROOM)
        assert fetch(tier, chain(text)) == len(text)


def test_a_removed_block_takes_what_is_reached_through_it(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abc", "abd", "x")
        assert set(tier.remove([chain("ab")[-1]])) == {*chain("abc")[1:], chain("abd")[-1]}
        assert tier.remove([chain("ab")[-1]]) == ()
        assert survivors(tier) == {*chain("a"), *chain("x")}
        store(tier, "abc")
        assert fetch(tier, chain("abc")) == 3


def test_a_cleared_tier_has_no_blocks_and_no_files(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abc", "x" * 20)
        assert tier.clear().result(30) == 23
        assert tier.names() == ()
        assert list(tmp_path.glob("segment-*")) == []
        store(tier, "abc")
        assert fetch(tier, chain("abc")) == 3


def test_a_put_that_waited_while_the_tier_was_cleared_is_not_stored(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files) as tier:
        files.may_write.clear()
        waiting = [tier.put(chain(text), payloads(chain(text))) for text in ("ab", "cd")]
        cleared = tier.clear()
        files.may_write.set()
        assert cleared.result(30) == 0
        for done in waiting:
            answer = done.result(30)
            assert isinstance(answer, Stored)
            assert (answer, answer.why) == (0, NotStored.CLEARED)


def test_the_listener_hears_of_every_change_in_order(tmp_path: Path) -> None:
    present: set[BlockHash] = set()

    def listen(added: tuple[BlockHash, ...], removed: tuple[BlockHash, ...]) -> None:
        assert not present & set(added)
        assert set(removed) <= present
        present.difference_update(removed)
        present.update(added)

    with open_tier(tmp_path, num_segments=3, on_change=listen) as tier:
        store(tier, *("abcdefgh"[i:] for i in range(8)))
        tier.remove(chain("h")[:1])
        assert present == set(tier.names())
        tier.clear().result(30)
        assert present == set()


def test_files_stay_within_the_capacity(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=4) as tier:
        capacity = tier._state.log.capacity_bytes
        for i in range(30):
            store(tier, chr(ord("a") + i) * 3)
            on_disk = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("segment-*"))
            assert on_disk <= tier.stats().file_bytes + 4096 <= capacity + 4096


def test_a_put_is_refused_when_the_queue_is_full(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files, tuning={"queue_blocks": 4}) as tier:
        files.may_write.clear()
        first, second = (tier.put(chain(text), payloads(chain(text))) for text in ("abc", "defg"))
        answer = second.result(0)
        assert isinstance(answer, Stored)
        assert (answer, answer.why) == (0, NotStored.QUEUE_FULL)
        assert tier.stats().queued_blocks == 3
        files.may_write.set()
        assert first.result(30) == 3
        assert tier.stats().counters.refused == 1
        assert store(tier, "defg") == [4]


def test_a_second_owner_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    with open_tier(tmp_path), pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"):
        make_tier(tmp_path)
    with open_tier(tmp_path) as tier:
        assert tier.names() == ()


@pytest.mark.parametrize("changes", [{"identity": "another"}, {"block_bytes": 2 * PAGE}])
def test_a_directory_of_another_model_or_size_is_refused_and_left_as_it_is(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abc")
    with pytest.raises(ForeignDirectory, match="model"):
        make_tier(tmp_path, **changes)
    with open_tier(tmp_path) as tier:
        assert fetch(tier, chain("abc")) == 3


def test_a_directory_that_cannot_be_used_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        make_tier(tmp_path / "file")


def test_too_small_a_capacity_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="three segments"):
        make_tier(tmp_path, num_segments=1)
    with pytest.raises(ConfigError, match="queue_depth"):
        DiskTuning(queue_depth=0)


def test_the_segment_size_follows_from_the_capacity(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, block_bytes=720 << 10, capacity_bytes=100 << 30)
    try:
        assert 120 <= (100 << 30) // tier._site.geometry.file_bytes <= 130
    finally:
        tier.close()


def test_buffers_and_names_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        with pytest.raises(ValueError, match="has 4096 bytes"):
            tier.put(chain("a"), [aligned_memory(5)])
        with pytest.raises(ValueError, match="do not go with"):
            tier.read(chain("ab"), [aligned_memory(PAGE)])
        with pytest.raises(ValueError, match="do not go with"):
            tier.put([BlockHash(b"short")], [aligned_memory(PAGE)])
        with pytest.raises(ValueError, match="writable"):
            tier.read(chain("a"), [memoryview(bytes(PAGE))])


def test_closing_waits_for_reads_and_drops_puts_that_wait(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(tmp_path, files=files)
    store(tier, "abc")
    files.may_write.clear()
    files.may_read.clear()
    names = chain("abc")
    memory = [aligned_memory(PAGE) for _ in names]
    reading = tier.read(names, memory)
    begun, waiting = (tier.put(chain(text), payloads(chain(text))) for text in ("d", "e"))
    closing = threading.Thread(target=tier.close)
    closing.start()
    files.may_read.set()
    files.may_write.set()
    closing.join(30)
    assert reading.result(0) == 3
    assert memory == payloads(names)
    assert {begun.result(0), waiting.result(0)} <= {0, 1}
    tier.close()
    assert tier.read(names, memory).result(0) == 0
    answer = tier.put(chain("f"), payloads(chain("f"))).result(0)
    assert isinstance(answer, Stored)
    assert answer.why is NotStored.CLOSED
    assert tier.clear().result(0) == 0
    assert tier.verify().result(0).checked == 0


def test_verification_finds_what_is_damaged(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abcd", "xy")
        path = next(tmp_path.glob("segment-*"))
        with path.open("r+b") as file:
            file.seek(tier._site.geometry.payload_offset(1))
            file.write(b"damage")
            file.seek(tier._site.geometry.page_offset(5) + 100)
            file.write(b"damage")
        counts = tier.verify().result(30)
        assert (counts.damaged, counts.removed) == (2, 4)
        assert set(tier.names()) == {*chain("a"), *chain("x")}
        assert tier.verify().result(30).damaged == 0


@pytest.mark.parametrize("first", [0, 1])
def test_memory_may_be_unmapped_once_a_put_or_a_read_is_done(tmp_path: Path, first: int) -> None:
    with open_tier(tmp_path) as tier:
        names = chain("abc")
        for _ in range(20):
            slab = mmap.mmap(-1, 4 * PAGE)
            views = [memoryview(slab)[first + index * PAGE :][:PAGE] for index in range(3)]
            for name, view in zip(names, views, strict=True):
                view[:] = payload(name)
            assert tier.put(names, views).result(30) == 3
            assert tier.read(names, views).result(30) == 3
            for view in views:
                view.release()
            slab.close()
            tier.remove(names[:1])


def test_a_listener_that_fails_does_not_stop_the_tier(tmp_path: Path) -> None:
    def listen(added: object, removed: object) -> None:
        raise ValueError("on purpose")

    with open_tier(tmp_path, on_change=listen) as tier:
        assert store(tier, "abc", "d") == [3, 1]
