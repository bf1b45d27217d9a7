"""What a directory holds when it is opened: reads the pages of all segments and checks the blocks written last.

A payload is written before its page, so after a crash of the process a whole page means a whole payload. After a loss
of power that need not be so: the newest blocks are read again until enough in a row are whole, and every later read
checks its block anyway.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.errors import ForeignDirectory
from tandem.kv.segment_log import Place
from tandem.prefix_store.disk_files import SegmentFile, aligned_memory, segment_path
from tandem.prefix_store.disk_format import (
    PAGE,
    VERSION,
    BlockPage,
    SegmentPage,
    SlotState,
    parse_block,
    parse_segment,
    payload_digest,
)
from tandem.prefix_store.disk_records import Site

logger = logging.getLogger(__name__)

_SEGMENT_NAME = re.compile(r"segment-(\d{12,})\.kv")
_PAGES_AT_ONCE = 1024


@dataclass(slots=True)
class Recovered:
    """Open segments with their first free slots, the best copy of every block, and all other whole pages."""

    segments: list[tuple[SegmentFile, int]] = field(default_factory=list)
    blocks: dict[bytes, tuple[BlockPage, Place]] = field(default_factory=dict)
    superseded: list[Place] = field(default_factory=list)
    num_damaged: int = 0

    def close(self) -> None:
        """Closes what was opened."""
        for file, _ in self.segments:
            file.release()

    def offer(self, page: BlockPage, place: Place) -> None:
        """One whole page. Of two copies of a block, the one written later is kept."""
        present = self.blocks.get(page.name)
        if present is None or (present[0].sequence, present[1]) < (page.sequence, place):
            self.blocks[page.name] = (page, place)
        if present is not None:
            self.superseded.append(place if self.blocks[page.name] is present else present[1])


def recover(site: Site, tail_blocks: int) -> Recovered:
    """Opens every segment. Raises ForeignDirectory when blocks of another identity, size or version are there.

    Segments that are damaged or empty are deleted. The last `tail_blocks` blocks have been read and are whole.
    """
    matches = (_SEGMENT_NAME.fullmatch(path.name) for path in site.directory.iterdir())
    numbers = sorted(int(match[1]) for match in matches if match is not None)
    for number in numbers:
        _check_is_ours(site, number)
    found = Recovered()
    try:
        for number in numbers:
            _open(site, number, found)
        _check_tail(site, found, tail_blocks)
    except BaseException:
        found.close()
        raise
    return found


def _open(site: Site, number: int, found: Recovered) -> None:
    path = segment_path(site.directory, number)
    fd = site.files.open(path)
    try:
        page = _first_page(site, fd)
        if page is not None and page.number == number:
            next_slot = _read_slots(site, fd, page, found)
            if next_slot:
                found.segments.append((SegmentFile(path, os.dup(fd), page), next_slot))
                return
        found.num_damaged += page is None
    finally:
        os.close(fd)
    path.unlink()


def _first_page(site: Site, fd: int) -> SegmentPage | None:
    memory = aligned_memory(PAGE)
    try:
        return parse_segment(memory) if site.files.read(fd, [memory], 0) == PAGE else None
    except OSError as exc:
        logger.warning("a segment cannot be read: %s", exc)
        return None


def _check_is_ours(site: Site, number: int) -> None:
    wanted = (VERSION, site.identity, site.geometry.block_bytes)
    fd = site.files.open(segment_path(site.directory, number))
    try:
        page = _first_page(site, fd)
    finally:
        os.close(fd)
    if page is not None and (page.version, page.identity, page.geometry.block_bytes) != wanted:
        raise ForeignDirectory(
            f"{site.directory} holds blocks of {page.geometry.block_bytes} bytes of {page.identity!r} "
            f"(format {page.version}), wanted are {wanted[2]} bytes of {wanted[1]!r} (format {wanted[0]}): "
            "choose another directory or delete this one"
        )


def _read_slots(site: Site, fd: int, segment: SegmentPage, found: Recovered) -> int:
    """Offers the blocks of a segment; its first slot that was never used."""
    geometry = segment.geometry
    end = os.fstat(fd).st_size
    next_slot = 0
    for slot, memory in _pages(site, fd, geometry.num_slots):
        place = Place(segment.number, slot)
        page = parse_block(memory, place, geometry.block_bytes)
        if page is not SlotState.EMPTY:
            next_slot = slot + 1
        if isinstance(page, BlockPage) and geometry.payload_offset(slot) + geometry.stride <= end:
            found.offer(page, place)
        elif isinstance(page, BlockPage) or page is SlotState.DAMAGED:
            found.num_damaged += 1
    return next_slot


def _pages(site: Site, fd: int, num_slots: int) -> Iterator[tuple[int, memoryview]]:
    memory = aligned_memory(min(num_slots, _PAGES_AT_ONCE) * PAGE)
    for first in range(0, num_slots, _PAGES_AT_ONCE):
        count = min(_PAGES_AT_ONCE, num_slots - first)
        try:
            num_bytes = site.files.read(fd, [memory[: count * PAGE]], (1 + first) * PAGE)
        except OSError as exc:
            logger.warning("pages of a segment cannot be read: %s", exc)
            continue
        for index in range(num_bytes // PAGE):
            yield first + index, memory[index * PAGE :][:PAGE]


def _check_tail(site: Site, found: Recovered, tail_blocks: int) -> None:
    """Cuts the newest blocks whose payloads are not whole, until `tail_blocks` in a row are."""
    files = {file.number: file for file, _ in found.segments}
    newest = sorted(found.blocks.values(), key=lambda block: -block[0].sequence)
    num_whole = 0
    for page, place in newest:
        if num_whole == tail_blocks:
            return
        num_whole += 1
        if not _is_whole(site, files[place.segment], page, place):
            del found.blocks[page.name]
            found.superseded.append(place)
            found.num_damaged += 1
            num_whole = 0


def _is_whole(site: Site, file: SegmentFile, page: BlockPage, place: Place) -> bool:
    memory = aligned_memory(file.geometry.stride)
    try:
        num_read = site.files.read(file.fd, [memory], file.geometry.payload_offset(place.slot))
    except OSError as exc:
        logger.warning("a block cannot be read: %s", exc)
        return False
    return num_read == memory.nbytes and payload_digest(memory[: site.geometry.block_bytes]) == page.digest
