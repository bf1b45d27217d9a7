"""Collection of a disk tier's segments: live blocks are copied on, nobody who reads notices."""

from __future__ import annotations

import random
import threading
from pathlib import Path

from tandem.prefix_store.disk import DiskTier
from tandem.prefix_store.disk_files import aligned_memory
from tandem.prefix_store.disk_format import PAGE
from tests.disk_tiers import FaultyFiles, chain, fetch, open_tier, payload, store, survivors


def churn(tier: DiskTier, kept: list[str], rounds: int) -> None:
    """Fills the tier again and again with blocks that are used once, between others that are used all the time."""
    for number in range(rounds):
        store(tier, f"{number:03d}x", kept[number % len(kept)])
        for text in kept:
            tier.use(chain(text))


def test_used_blocks_stay_while_segments_come_and_go(tmp_path: Path) -> None:
    kept = [f"{letter}{letter}{letter}" for letter in "abcdef"]
    with open_tier(tmp_path, num_segments=8) as tier:
        churn(tier, kept, 40)
        assert [fetch(tier, chain(text)) for text in kept] == [3] * 6
        counters = tier.stats().counters
        assert counters.segments_collected > 3
        assert counters.blocks_copied > 10
        before = set(tier.names())
    with open_tier(tmp_path, num_segments=8) as tier:
        assert survivors(tier) == before


def test_a_segment_without_live_blocks_is_deleted_at_once(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "a" * 8, "b" * 8, "c")
        tier.remove(chain("a"))
        store(tier, "d")
        assert tier.stats().segments == 2
        assert len(list(tmp_path.glob("segment-*"))) == 2


def test_a_read_goes_on_in_a_segment_that_was_collected_meanwhile(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files, tuning={"queue_depth": 1}) as tier:
        store(tier, "abcdefgh")
        located = tier._state.locate(chain("abcdefgh"))
        tier.clear().result(30)
        assert list(tmp_path.glob("segment-*")) == []
        memory = [aligned_memory(PAGE) for _ in located]
        assert tier._reader.fill(located, memory) == [True] * 8
        assert memory == [payload(name) for name in chain("abcdefgh")]
        tier._state.let_go(located)


def test_readers_get_right_bytes_while_everything_moves(tmp_path: Path) -> None:
    kept = [f"{letter}{letter}" for letter in "abcdefgh"]
    hits = [0, 0]
    problems: list[BaseException] = []
    over = threading.Event()

    def read(index: int, tier: DiskTier) -> None:
        rng = random.Random(index)
        try:
            while not over.is_set():
                text = rng.choice([*kept, f"{rng.randrange(40):03d}x"])
                hits[index] += fetch(tier, chain(text))
        except BaseException as exc:
            problems.append(exc)

    with open_tier(tmp_path, num_segments=7) as tier:
        readers = [threading.Thread(target=read, args=(index, tier)) for index in range(2)]
        for reader in readers:
            reader.start()
        try:
            churn(tier, kept, 40)
        finally:
            over.set()
            for reader in readers:
                reader.join(30)
        assert problems == []
        assert all(count > 10 for count in hits)
        counters = tier.stats().counters
        assert counters.blocks_copied > 0
        assert counters.checksum_failures == 0
