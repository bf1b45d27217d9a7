"""A disk tier on a disk that is full, falls short or fails: not stored, or a miss, and it goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.prefix_store.disk_files import aligned_memory
from tandem.prefix_store.disk_format import PAGE
from tandem.prefix_store.disk_stats import NotStored, Stored
from tests.disk_tiers import (
    SLOTS,
    FaultyFiles,
    chain,
    fetch,
    make_tier,
    open_tier,
    payloads,
    segment_bytes,
    store,
    survivors,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for four segments and a half."""
    place = tmp_path / "small"
    place.mkdir()
    size = segment_bytes() * 9 // 2 // PAGE * PAGE
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tandem-test", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system of our own here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def why(answer: int) -> NotStored | None:
    assert isinstance(answer, Stored)
    return answer.why


def test_a_full_disk_means_not_stored_until_there_is_space_and_reads_go_on(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with open_tier(small_disk) as tier:
        store(tier, "a" * SLOTS)
        ballast.write_bytes(bytes(segment_bytes() * 3))
        answers = store(tier, "bcd", "e")
        assert [why(answer) for answer in answers] == [NotStored.DISK_FULL] * 2
        assert fetch(tier, chain("a" * SLOTS)) == SLOTS
        assert tier.stats().counters.write_errors == 2
        ballast.unlink()
        assert store(tier, "bcd") == [3]
        assert fetch(tier, chain("bcd")) == 3
        assert len(list(small_disk.glob("segment-*"))) == 2


def test_a_full_disk_takes_what_fits_the_open_segment(small_disk: Path) -> None:
    with open_tier(small_disk) as tier:
        store(tier, "abc")
        (small_disk / "ballast").write_bytes(bytes(segment_bytes() * 3 + PAGE))
        answer = store(tier, "d" * SLOTS)[0]
        assert (answer, why(answer)) == (SLOTS - 3, NotStored.DISK_FULL)
        assert fetch(tier, chain("d" * SLOTS)) == SLOTS - 3


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    program = f"""
import resource, sys
from pathlib import Path
from tests.disk_tiers import chain, fetch, open_tier, store
with open_tier(Path(sys.argv[1])) as tier:
    store(tier, "a" * {SLOTS})
    resource.setrlimit(resource.RLIMIT_FSIZE, ({segment_bytes() // 2},) * 2)
    answer = store(tier, "xyz")[0]
    print(int(answer), answer.why, fetch(tier, chain("a" * {SLOTS})), len(list(Path(sys.argv[1]).glob("segment-*"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == ["0", "disk_full", str(SLOTS), "1"]


@pytest.mark.parametrize("longest", [PAGE, PAGE + 100])
def test_a_short_write_is_continued(tmp_path: Path, longest: int) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files, num_segments=64, block_bytes=3 * PAGE) as tier:
        files.longest_write = longest
        assert store(tier, "abcdef", block_bytes=3 * PAGE) == [6]
        assert fetch(tier, chain("abcdef"), 3 * PAGE) == 6


@pytest.mark.parametrize("longest", [PAGE, PAGE + 100])
def test_a_short_read_is_continued(tmp_path: Path, longest: int) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files, num_segments=64, block_bytes=3 * PAGE) as tier:
        store(tier, "abcdef", block_bytes=3 * PAGE)
        files.longest_read = longest
        assert fetch(tier, chain("abcdef"), 3 * PAGE) == 6


def test_a_write_without_progress_means_not_stored(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files) as tier:
        files.longest_write = 0
        answer = store(tier, "abc")[0]
        assert (answer, why(answer)) == (0, NotStored.IO_ERROR)
        files.longest_write = None
        assert store(tier, "abc") == [3]


@pytest.mark.parametrize(("code", "reason"), [(errno.EIO, "io_error"), (errno.ENOSPC, "disk_full")])
def test_blocks_whose_write_failed_are_not_there_later_either(tmp_path: Path, code: int, reason: str) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files) as tier:
        store(tier, "ab")
        files.write_error = code
        answer = store(tier, "abcd")[0]
        assert (answer, why(answer)) == (2, reason)
        assert fetch(tier, chain("abcd")) == 2
        files.write_error = None
        assert store(tier, "xy") == [2]
    with open_tier(tmp_path) as tier:
        assert survivors(tier) == {*chain("ab"), *chain("xy")}


def test_a_block_that_cannot_be_read_is_a_miss_and_goes_and_its_neighbours_stay(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files) as tier:
        store(tier, "ab", "x", "y")
        files.bad_offsets = frozenset({tier._site.geometry.payload_offset(1) + 5})
        assert fetch(tier, chain("ab")) == 1
        assert set(tier.names()) == {*chain("a"), *chain("x"), *chain("y")}
        assert tier.stats().counters.read_errors == 1


def test_an_error_that_passes_is_a_miss_and_no_more(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files) as tier:
        store(tier, "abc")
        files.read_error = errno.ENOMEM
        assert fetch(tier, chain("abc")) == 0
        files.read_error = None
        assert fetch(tier, chain("abc")) == 3


def test_a_segment_that_shrinks_under_the_tier_is_a_miss(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abcdefgh")
        os.truncate(next(tmp_path.glob("segment-*")), tier._site.geometry.payload_offset(3) + 1)
        assert fetch(tier, chain("abcdefgh")) == 3
        assert tier.match(chain("abcdefgh")) == 3


def test_a_collection_that_meets_damage_loses_that_block_and_what_is_below_it(tmp_path: Path) -> None:
    files = FaultyFiles()
    with open_tier(tmp_path, files=files, num_segments=4) as tier:
        store(tier, "abcd", "wxyz", "k" * SLOTS)
        first = min(tmp_path.glob("segment-*"))
        with first.open("r+b") as file:
            file.seek(tier._site.geometry.payload_offset(2))
            file.write(b"damage")
        files.bad_offsets = frozenset({tier._site.geometry.payload_offset(7)})
        tier._writer.collector.collect(tier._state.log.segments[0])
        files.bad_offsets = frozenset()
        assert set(tier.names()) == {*chain("ab"), *chain("wxy"), *chain("k" * SLOTS)}
        assert len(survivors(tier)) == 5 + SLOTS
        assert not first.exists()


def test_marks_that_cannot_be_written_are_counted_and_cost_nothing_else(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = make_tier(tmp_path, files=files)
    store(tier, "abc")
    files.write_error = errno.EIO
    tier.remove(chain("abc")[1:2])
    assert fetch(tier, chain("abc")) == 1
    tier.close()
    assert tier.stats().counters.write_errors == 1
    with open_tier(tmp_path) as tier:
        assert survivors(tier) == set(chain("abc"))


def test_a_fault_of_ours_reaches_whoever_waits_and_the_tier_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(tmp_path) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(tier._writer.collector, "make_room", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tier.put(chain("a"), payloads(chain("a"))).result(30)
        assert store(tier, "abc") == [3]


def test_what_a_read_leaves_in_destinations_beyond_its_count_is_not_counted(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "ab")
        memory = [aligned_memory(PAGE) for _ in range(4)]
        assert tier.read(chain("abcd"), memory).result(30) == 2
        assert memory[2] == memory[3] == bytes(PAGE)
