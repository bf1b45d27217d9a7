"""Reads blocks of a disk tier: neighbours in one piece, pieces side by side, every byte checked before it counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from tandem.kv.segment_log import Run, runs
from tandem.prefix_store.disk_files import BAD_MEDIUM, Files, aligned_memory, is_aligned
from tandem.prefix_store.disk_format import PAGE, BlockPage, parse_block, payload_digest
from tandem.prefix_store.disk_state import DiskState, Located
from tandem.prefix_store.disk_stats import VerifyCounts
from tandem.types import BlockHash


class DiskReader:
    """Owns the threads: `queue_depth` pieces of up to `longest` blocks are read at the same time."""

    def __init__(self, files: Files, state: DiskState, *, queue_depth: int, longest: int) -> None:
        self._files = files
        self._state = state
        self._longest = longest
        self._pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="disk-reader")
        self._local = threading.local()
        self._closed = False
        self._gate = threading.Lock()
        """Held while pieces are handed to the threads, so that none comes after `close`."""

    def read(self, names: Sequence[BlockHash], destinations: Sequence[memoryview]) -> Future[int]:
        """Reads the leading blocks that are here; the future has how many of them, from the first on, are whole."""
        with self._gate:
            located = self._state.locate([] if self._closed else names)
            read = _Read(self._state, located, destinations)
            pieces = runs([block.place for block in located], self._longest)
            read.expect(len(pieces))
            for piece in pieces:
                self._pool.submit(partial(read.carry_out, piece, self))
        return read.done

    def verify(self) -> Future[VerifyCounts]:
        """Reads every block and its page; those that are damaged go."""
        with self._gate:
            if not self._closed:
                return self._pool.submit(self._verify)
        done: Future[VerifyCounts] = Future()
        done.set_result(VerifyCounts(checked=0, damaged=0, removed=0))
        return done

    def close(self) -> None:
        """Waits for reads in flight; a verification ends early."""
        with self._gate:
            self._closed = True
        self._pool.shutdown(wait=True)

    def fill(self, blocks: Sequence[Located], destinations: Sequence[memoryview]) -> list[bool]:
        """Reads neighbours into memory; which are whole. Those that are not are lost to the tier."""
        began = time.monotonic()
        try:
            num_whole_reads = self._transfer(blocks, destinations)
        except OSError as exc:
            return self._without_error(blocks, destinations, exc)
        pairs = zip(blocks, destinations, strict=True)
        good = [
            index < num_whole_reads and payload_digest(memory) == block.digest
            for index, (block, memory) in enumerate(pairs)
        ]
        self._state.count(
            blocks_read=sum(good),
            bytes_read=sum(memory.nbytes for memory in destinations),
            read_s=time.monotonic() - began,
            checksum_failures=len(good) - sum(good),
        )
        for block, is_good in zip(blocks, good, strict=True):
            if not is_good:
                self._state.lose(block.name, block.place)
        return good

    def _transfer(self, blocks: Sequence[Located], destinations: Sequence[memoryview]) -> int:
        """How many leading destinations have got all of their bytes, whatever these are."""
        file, slot = blocks[0].file, blocks[0].place.slot
        offset, stride = file.geometry.payload_offset(slot), file.geometry.stride
        in_place = stride == destinations[0].nbytes and (
            not self._files.direct or all(is_aligned(memory) for memory in destinations)
        )
        if in_place:
            return self._files.read(file.fd, destinations, offset) // stride
        staging = self._staging(self._longest * stride)[: len(blocks) * stride]
        count = self._files.read(file.fd, [staging], offset) // stride
        for index, memory in enumerate(destinations[:count]):
            memory[:] = staging[index * stride :][: memory.nbytes]
        return count

    def _without_error(self, blocks: Sequence[Located], destinations: Sequence[memoryview], exc: OSError) -> list[bool]:
        """After an error: one by one, so that one bad sector costs one block."""
        if len(blocks) > 1:
            return [self.fill([block], [memory])[0] for block, memory in zip(blocks, destinations, strict=True)]
        self._state.count(read_errors=1)
        if exc.errno in BAD_MEDIUM:
            self._state.lose(blocks[0].name, blocks[0].place)
        return [False]

    def _staging(self, num_bytes: int) -> memoryview:
        memory: memoryview | None = getattr(self._local, "memory", None)
        if memory is None or memory.nbytes < num_bytes:
            memory = self._local.memory = aligned_memory(num_bytes)
        return memory

    def _verify(self) -> VerifyCounts:
        checked = damaged = removed = 0
        with self._state.lock:
            numbers = self._state.log.segments
        for number in numbers:
            located = self._state.locate_segment(number)
            try:
                for block in located:
                    if self._closed:
                        break
                    checked += 1
                    if not self._is_whole(block):
                        num_lost = self._state.lose(block.name, block.place)
                        damaged += num_lost > 0  # else it has gone meanwhile, or was copied on
                        removed += num_lost
            finally:
                self._state.let_go(located)
        return VerifyCounts(checked=checked, damaged=damaged, removed=removed)

    def _is_whole(self, block: Located) -> bool:
        geometry = block.file.geometry
        memory = self._staging(self._longest * geometry.stride)
        try:
            page = memory[:PAGE]
            num_read = self._files.read(block.file.fd, [page], geometry.page_offset(block.place.slot))
            found = parse_block(page, block.place, geometry.block_bytes)
            if num_read < PAGE or not isinstance(found, BlockPage) or found.digest != block.digest:
                return False
            payload = memory[: geometry.stride]
            num_read = self._files.read(block.file.fd, [payload], geometry.payload_offset(block.place.slot))
        except OSError as exc:
            self._state.count(read_errors=1)
            return exc.errno not in BAD_MEDIUM
        return num_read == geometry.stride and payload_digest(payload[: geometry.block_bytes]) == block.digest


class _Read:
    """One call's pieces: the last one to be done answers."""

    def __init__(self, state: DiskState, located: Sequence[Located], destinations: Sequence[memoryview]) -> None:
        self._state = state
        self._located = located
        self._destinations = destinations
        self._good = [False] * len(located)
        self._num_pieces = 0
        self._lock = threading.Lock()
        self.done: Future[int] = Future()
        self.done.set_running_or_notify_cancel()

    def expect(self, num_pieces: int) -> None:
        """How many pieces there are; without any, the answer is 0."""
        self._num_pieces = num_pieces
        if not num_pieces:
            self._finish()

    def carry_out(self, piece: Run, reader: DiskReader) -> None:
        """Reads one piece."""
        these = slice(piece.start, piece.start + piece.length)
        try:
            self._good[these] = reader.fill(self._located[these], self._destinations[these])
        finally:
            with self._lock:
                self._num_pieces -= 1
                is_last = self._num_pieces == 0
            if is_last:
                self._finish()

    def _finish(self) -> None:
        self._state.let_go(self._located)
        for memory in self._destinations:
            memory.release()  # the caller may unmap it from here on
        self.done.set_result(next((i for i, good in enumerate(self._good) if not good), len(self._good)))
