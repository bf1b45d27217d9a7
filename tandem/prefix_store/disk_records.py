"""Writes blocks to the head of a disk tier's log and their ends into their pages. One thread's; holds no policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tandem.kv.segment_log import Place, Run, runs
from tandem.prefix_store.disk_files import (
    Files,
    SegmentFile,
    aligned_memory,
    create_segment,
    is_aligned,
)
from tandem.prefix_store.disk_format import PAGE, BlockPage, Geometry, SegmentPage, pack_block, pack_dead
from tandem.prefix_store.disk_state import DiskState

_PIECES = 4
"""Into so many a full batch is cut, to be written at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where a tier's segments are and what they look like."""

    directory: Path
    identity: str
    geometry: Geometry
    files: Files


class RecordWriter:
    """Appends batches of up to `max_batch` blocks."""

    def __init__(self, site: Site, state: DiskState, max_batch: int) -> None:
        self._site = site
        self._state = state
        self._pages = aligned_memory(max_batch * PAGE)
        self._staging: memoryview | None = None
        self.max_batch = max_batch
        self._piece = -(-max_batch // _PIECES)
        self._pool = ThreadPoolExecutor(_PIECES, thread_name_prefix="disk-write")

    def open_head(self) -> None:
        """A new segment. Raises OSError when there is no space for it."""
        with self._state.lock:
            number = self._state.log.next_number
        page = SegmentPage(number=number, geometry=self._site.geometry, identity=self._site.identity)
        self._state.open_segment(create_segment(self._site.files, self._site.directory, page))

    def room(self) -> int:
        """How many blocks the next `append` takes."""
        with self._state.lock:
            return min(self.max_batch, self._state.log.head_room)

    def append(self, blocks: Sequence[BlockPage], payloads: Sequence[memoryview]) -> list[Place]:
        """Writes the first of `blocks`, as many as the head and a batch have room for: payloads, then pages.

        They are dead until the state admits them. Raises OSError; then none of them will be found again.
        """
        with self._state.lock:
            run = self._state.log.reserve(min(len(blocks), self.max_batch))
            file = self._state.files[run.place.segment]
        began = time.monotonic()
        blocks, payloads = blocks[: run.length], payloads[: run.length]
        places = [Place(run.place.segment, run.place.slot + index) for index in range(run.length)]
        self._write_payloads(file, run.place.slot, self._writable(payloads))
        num_bytes = self._site.geometry.block_bytes
        pages = [pack_block(block, place, num_bytes) for block, place in zip(blocks, places, strict=True)]
        self._write_pages(file, run, pages)
        num_written = run.length * (PAGE + self._site.geometry.stride)
        self._state.count(bytes_written=num_written, write_s=time.monotonic() - began)
        return places

    def mark_dead(self, places: Sequence[Place]) -> None:
        """Writes over the pages of slots whose blocks are gone, so that a restart does not bring them back."""
        for run in runs(places, self.max_batch):
            with self._state.lock:
                file = self._state.files.get(run.place.segment)
            if file is not None:
                slots = range(run.place.slot, run.place.slot + run.length)
                self._write_pages(file, run, [pack_dead(Place(file.number, slot)) for slot in slots])

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def _write_payloads(self, file: SegmentFile, slot: int, payloads: Sequence[memoryview]) -> None:
        """Writes payloads, whole strides side by side, in a few pieces at the same time; all of them end first."""
        stride = self._site.geometry.stride
        pieces = [payloads[start : start + self._piece] for start in range(0, len(payloads), self._piece)]
        offsets = [
            file.geometry.payload_offset(slot) + stride * start for start in range(0, len(payloads), self._piece)
        ]
        write = partial(self._site.files.write, file.fd)
        if len(pieces) == 1:
            write(pieces[0], offsets[0])
            return
        waiting = [self._pool.submit(write, piece, offset) for piece, offset in zip(pieces, offsets, strict=True)]
        wait(waiting)
        for done in waiting:
            done.result()

    def _writable(self, payloads: Sequence[memoryview]) -> list[memoryview]:
        """The payloads as they can be written side by side: themselves, or copies with padding between them."""
        geometry = self._site.geometry
        fits = geometry.stride == geometry.block_bytes
        if fits and (not self._site.files.direct or all(is_aligned(payload) for payload in payloads)):
            return list(payloads)
        if self._staging is None:
            self._staging = aligned_memory(self.max_batch * geometry.stride)
        for index, payload in enumerate(payloads):
            self._staging[index * geometry.stride :][: geometry.block_bytes] = payload
        return [self._staging[index * geometry.stride :][: geometry.stride] for index in range(len(payloads))]

    def _write_pages(self, file: SegmentFile, run: Run, pages: Sequence[bytes]) -> None:
        memory = self._pages[: len(pages) * PAGE]
        memory[:] = b"".join(pages)
        self._site.files.write(file.fd, [memory], file.geometry.page_offset(run.place.slot))
