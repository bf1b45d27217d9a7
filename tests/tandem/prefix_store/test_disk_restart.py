"""What a disk tier finds when it is opened again: after a close, a kill, a loss of power, and damage anywhere."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tandem.prefix_store.disk_format import PAGE, Geometry
from tandem.types import BlockHash
from tests.disk_tiers import SLOTS, FaultyFiles, chain, fetch, make_tier, open_tier, segment_bytes, store, survivors

ROOT = Path(__file__).resolve().parents[3]
WRITER = [sys.executable, "-m", "tests.disk_writing_process"]
GEOMETRY = Geometry(block_bytes=PAGE, num_slots=SLOTS)


def test_everything_is_there_after_a_close(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abcdefghij", "abxy", "k" * 30)
        before = tier.names()
    with open_tier(tmp_path) as tier:
        assert set(tier.names()) == set(before) == survivors(tier)
        assert tier.stats().counters.recovered == len(before)
        store(tier, "abcdefghijklm")
        assert fetch(tier, chain("abcdefghijklm")) == 13


def test_what_was_evicted_or_removed_does_not_come_back(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=4) as tier:
        store(tier, *(chr(ord("a") + i) * 4 for i in range(10)))
        tier.remove(chain("jj")[-1:])
        before = set(tier.names())
        assert len(before) < 40
    with open_tier(tmp_path, num_segments=4) as tier:
        assert survivors(tier) == before


def test_a_head_that_is_not_full_is_filled_on(tmp_path: Path) -> None:
    for round_ in range(SLOTS):
        with open_tier(tmp_path) as tier:
            store(tier, chr(ord("a") + round_))
    with open_tier(tmp_path) as tier:
        assert tier.stats().segments == 1
        assert tier.stats().blocks == SLOTS


def test_uses_are_remembered_over_a_close(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=3) as tier:
        store(tier, "a")
        num_live = tier.stats().max_blocks
        store(tier, *(chr(ord("b") + i) for i in range(num_live - 1)))
        for _ in range(5):
            tier.use(chain("a"))
    with open_tier(tmp_path, num_segments=3) as tier:
        store(tier, "A", "B", "C")
        assert fetch(tier, chain("a")) == 1
        assert fetch(tier, chain("b")) == 0


@pytest.mark.parametrize("damage", [b"", b"KVuses01", bytes(100)])
def test_without_a_good_file_of_uses_blocks_are_there_all_the_same(tmp_path: Path, damage: bytes) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abc")
    (tmp_path / "uses").write_bytes(damage)
    with open_tier(tmp_path) as tier:
        assert fetch(tier, chain("abc")) == 3


def test_tenants_and_their_quotas_outlive_the_process(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abcd", tenant="small")
        store(tier, "xy", tenant="large")
    with open_tier(tmp_path, quotas={"small": 2}) as tier:
        assert tier.match(chain("abcd")) == 2
        assert tier.match(chain("xy")) == 2


def test_a_smaller_capacity_and_other_segments_are_taken_over(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=16) as tier:
        store(tier, *(chr(ord("a") + i) * 4 for i in range(25)))
    changes: list[object] = []
    smaller = {"num_segments": 4, "segment_bytes": segment_bytes(12)}
    with open_tier(tmp_path, on_change=lambda *names: changes.append(names), **smaller) as tier:
        assert changes == []
        stats = tier.stats()
        assert 0 < stats.blocks <= stats.max_blocks
        assert stats.file_bytes <= 4 * segment_bytes(12)
        assert len(survivors(tier)) == stats.blocks
        store(tier, "A" * 20)
        assert fetch(tier, chain("A" * 20)) == 20


def test_the_tail_of_a_truncated_segment_is_cut(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abcdefg")
        path = next(tmp_path.glob("segment-*"))
    os.truncate(path, GEOMETRY.payload_offset(4) + 100)
    with open_tier(tmp_path) as tier:
        assert survivors(tier) == set(chain("abcd"))
        store(tier, "abcdefg")
        assert fetch(tier, chain("abcdefg")) == 7


@pytest.mark.parametrize("num_bytes", [0, 100, PAGE, 3 * PAGE + 17])
def test_a_segment_cut_within_its_pages_keeps_nothing_that_has_no_bytes(tmp_path: Path, num_bytes: int) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abcdefg")
        path = next(tmp_path.glob("segment-*"))
    os.truncate(path, num_bytes)
    with open_tier(tmp_path) as tier:
        assert tier.names() == ()


def test_newest_blocks_whose_bytes_were_lost_with_power_are_cut(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abcdefg")
        path = next(tmp_path.glob("segment-*"))
    with path.open("r+b") as file:
        file.seek(GEOMETRY.payload_offset(3))
        file.write(bytes(4 * PAGE))
    with open_tier(tmp_path) as tier:
        assert set(tier.names()) == set(chain("abc"))
        assert tier.stats().counters.recovery_damaged == 4


def test_a_crash_between_copy_and_deletion_leaves_each_block_once(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=4) as tier:
        store(tier, "abcdefgh", "ijkl")
        first = min(tmp_path.glob("segment-*"))
        shutil.copy(first, tmp_path / "kept")
        with tier._state.lock:
            number = tier._state.log.segments[0]
        tier._writer.collector.collect(number)
        before = set(tier.names())
    shutil.move(tmp_path / "kept", first)
    with open_tier(tmp_path, num_segments=4) as tier:
        assert survivors(tier) == before
        assert tier.stats().segments >= 2


def test_a_full_directory_without_room_to_copy_still_takes_new_blocks(tmp_path: Path) -> None:
    with open_tier(tmp_path, num_segments=3) as tier:
        store(tier, *(chr(ord("a") + i) for i in range(tier.stats().max_blocks)))
    with open_tier(tmp_path, num_segments=2) as tier:
        for text in ("A", "BC", "D" * 6):
            assert store(tier, text) == [len(text)]
            assert fetch(tier, chain(text)) == len(text)


def test_a_tier_whose_pages_cannot_be_read_opens_without_them(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        store(tier, "abc", "d" * SLOTS)
    files = FaultyFiles()
    files.bad_offsets = frozenset({2 * PAGE})
    with open_tier(tmp_path, files=files) as tier:
        assert tier.names() == ()
        files.bad_offsets = frozenset()
        assert store(tier, "abc") == [3]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two full segments and one that is not: "a" to the 8th letter in the first, and so on, one chain in each."""
    path = tmp_path_factory.mktemp("filled")
    with open_tier(path) as tier:
        store(tier, "abcdefgh", "ijklmnop", "qrst")
    return path


CHAINS = ("abcdefgh", "ijklmnop", "qrst")


def expected_after(segment: int, offset: int) -> set[BlockHash]:
    """What must be left when one byte of a segment changes."""
    text = CHAINS[segment]
    if offset < PAGE:
        lost_from = 0
    elif offset < GEOMETRY.payload_offset(0):
        lost_from = offset // PAGE - 1
    else:
        lost_from = (offset - GEOMETRY.payload_offset(0)) // PAGE
    kept = [other for other in CHAINS if other != text] + [text[:lost_from]]
    return {name for other in kept for name in chain(other)}


flips = st.tuples(st.integers(0, 2), st.integers(0, GEOMETRY.file_bytes - 1), st.integers(0, 7))


@given(flip=flips)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_costs_its_block_and_what_is_reached_through_it_and_nothing_else(
    filled: Path, tmp_path: Path, flip: tuple[int, int, int]
) -> None:
    segment, offset, bit = flip
    place = tmp_path / "copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(filled, place)
    path = sorted(place.glob("segment-*"))[segment]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    with open_tier(place) as tier:
        assert survivors(tier) == expected_after(segment, offset)


@given(damage=st.lists(st.tuples(flips, st.binary(min_size=1, max_size=5000)), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_makes_a_tier_give_wrong_bytes_or_stops_it(
    filled: Path, tmp_path: Path, damage: list[tuple[tuple[int, int, int], bytes]]
) -> None:
    place = tmp_path / "copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(filled, place)
    paths = sorted(place.glob("segment-*"))
    for (segment, offset, _), junk in damage:
        with paths[segment].open("r+b") as file:
            file.seek(offset)
            file.write(junk)
    with open_tier(place) as tier:
        survivors(tier)
        assert store(tier, "new") == [3]
        assert fetch(tier, chain("new")) == 3


def test_a_bit_that_flips_while_the_tier_runs_is_a_miss_and_is_gone_after_a_restart(
    filled: Path, tmp_path: Path
) -> None:
    place = tmp_path / "copy"
    shutil.copytree(filled, place)
    with open_tier(place) as tier:
        path = sorted(place.glob("segment-*"))[1]
        with path.open("r+b") as file:
            file.seek(GEOMETRY.payload_offset(3) + 77)
            file.write(b"x")
        assert fetch(tier, chain(CHAINS[1])) == 3
        assert tier.match(chain(CHAINS[1])) == 3
        assert tier.stats().counters.checksum_failures == 1
    with open_tier(place) as tier:
        assert set(tier.names()) == {*chain(CHAINS[0]), *chain("ijk"), *chain(CHAINS[2])}


def read_changes(stream: object, kept: set[BlockHash], enough: threading.Event, wanted: int) -> None:
    """Follows what a writing process says it has, to the end of its life."""
    for number, line in enumerate(stream):  # type: ignore[var-annotated, arg-type]
        if not line.endswith("\n"):
            return
        sign, name = line[0], BlockHash(bytes.fromhex(line[1:].strip()))
        kept.add(name) if sign == "+" else kept.discard(name)
        if number >= wanted:
            enough.set()
    enough.set()


@pytest.mark.parametrize("num_segments", [200, 24])
def test_a_killed_writer_leaves_nearly_all_it_had_and_no_wrong_byte(tmp_path: Path, num_segments: int) -> None:
    rng = random.Random(num_segments)
    kept: set[BlockHash] = set()
    for round_ in range(3):
        command = [*WRITER, str(tmp_path), str(num_segments), str(round_)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ})
        enough = threading.Event()
        wanted = rng.randrange(20, 400)
        reader = threading.Thread(target=read_changes, args=(process.stdout, kept, enough, wanted))
        reader.start()
        assert enough.wait(60)
        assert process.poll() is None, "the writer ended by itself"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        reader.join(30)
        assert process.stdout is not None
        process.stdout.close()
        with open_tier(tmp_path, num_segments=num_segments) as tier:
            found = survivors(tier)
        assert len(found & kept) >= 0.95 * len(kept)
        kept = found


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    command = [*WRITER, str(tmp_path), "24", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(Exception, match=f"in use by process {process.pid}"):
        make_tier(tmp_path, num_segments=24)
    process.kill()
    process.wait(30)
    process.stdout.close()
    with open_tier(tmp_path, num_segments=24):
        pass
