"""Makes room in a disk tier's log: copies the live blocks of the emptiest segment on and deletes it. Writer's thread.

That there is room for the copies is the log's doing. Where it is not so, after a change of capacity or a write that
failed, the oldest segment is dropped with what lives in it: it is a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.kv.segment_log import runs
from tandem.prefix_store.disk_files import aligned_memory
from tandem.prefix_store.disk_format import PAGE, BlockPage, parse_block, payload_digest
from tandem.prefix_store.disk_records import RecordWriter, Site
from tandem.prefix_store.disk_state import DiskState, Located

_GIVE_WAY_S = 0.05
"""How long one batch of copies waits at most for a moment without reads."""


class Collector:
    """One tier's. `copy` reads and writes at most a batch at a time."""

    def __init__(self, site: Site, state: DiskState, writer: RecordWriter) -> None:
        self._site = site
        self._state = state
        self._writer = writer
        self._memory: tuple[memoryview, memoryview] | None = None

    def make_room(self) -> None:
        """Sees to it that the head has a free slot. Raises OSError."""
        while True:
            self.retire_dead()
            with self._state.lock:
                log = self._state.log
                if log.head_room:
                    return
                opens = log.may_open(for_collection=False)
                victim = None if opens else log.victim()
                copies = victim is not None and log.can_copy(victim)
            if opens:
                self._writer.open_head()
            elif victim is not None and copies:
                self.collect(victim)
            else:
                self.drop_oldest()

    def retire_dead(self) -> None:
        """Deletes segments in which nothing lives any more."""
        with self._state.lock:
            dead = self._state.log.dead()
        for number in dead:
            self._retire(number)

    def retire_all(self) -> None:
        """Deletes every segment that nothing lives in, the head too."""
        with self._state.lock:
            numbers = [number for number in self._state.log.segments if not self._state.log.live(number)]
        for number in numbers:
            self._retire(number)

    def settle_in(self) -> None:
        """Sees to it that there is room for a collection, where an earlier run left none.

        It had more capacity, other segments, or was ended within a collection.
        """
        while True:
            self.retire_dead()
            with self._state.lock:
                log = self._state.log
                if not log.segments or log.may_open(for_collection=True):
                    return
                victim = log.victim()
                copies = victim is not None and log.used_bytes <= log.capacity_bytes and log.can_copy(victim)
            if victim is not None and copies:
                self.collect(victim)
            else:
                self.drop_oldest()

    def collect(self, number: int) -> None:
        """Copies a segment's live blocks on, one batch at a time, in the gaps between reads, and deletes it."""
        with self._state.lock:
            log = self._state.log
            places = {log.place(name): name for name in log.live(number)}
            order = [place for place in places if place is not None]
        for run in runs(order, self._writer.max_batch):
            self._state.give_way(_GIVE_WAY_S)
            names = {places[place] for place in order[run.start : run.start + run.length]}
            self._copy([block for block in self._located(number) if block.name in names])
        self._retire(number)
        self._state.count(segments_collected=1)

    def drop_oldest(self) -> None:
        """Forgets a segment's live blocks and deletes it."""
        with self._state.lock:
            number = self._state.log.segments[0]
            names = self._state.log.live(number)
        self._state.count(evictions=len(self._state.remove(names)))
        self._retire(number)

    def _located(self, number: int) -> list[Located]:
        """The segment's blocks. This thread is the one that closes files, so they need not be held."""
        located = self._state.locate_segment(number)
        self._state.let_go(located)
        return located

    def _copy(self, blocks: Sequence[Located]) -> None:
        """Copies neighbours, but for those that are damaged or cannot be read: they are lost."""
        try:
            found = self._read(blocks)
        except OSError:
            if len(blocks) > 1:
                for block in blocks:
                    self._copy([block])
            else:
                self._state.lose(blocks[0].name, blocks[0].place)
                self._state.count(read_errors=1)
            return
        whole: list[tuple[Located, BlockPage, memoryview]] = []
        for block, page, payload in found:
            if page is None:
                self._state.lose(block.name, block.place)
                self._state.count(checksum_failures=1)
            else:
                whole.append((block, page, payload))
        self._write(whole)

    def _write(self, whole: list[tuple[Located, BlockPage, memoryview]]) -> None:
        while whole:
            if not self._has_head():
                self._writer.open_head()
            places = self._writer.append([page for _, page, _ in whole], [payload for *_, payload in whole])
            for (block, *_), place in zip(whole, places, strict=False):
                self._state.relocate(block.name, block.place, place)
            whole = whole[len(places) :]
            self._state.count(blocks_copied=len(places))

    def _read(self, blocks: Sequence[Located]) -> list[tuple[Located, BlockPage | None, memoryview]]:
        """Each block with its page and payload; without a page when either is not whole."""
        if not blocks:
            return []
        first, last = blocks[0], blocks[-1]
        count = last.place.slot - first.place.slot + 1
        geometry = first.file.geometry
        pages, payloads = self._buffers()
        files, fd = self._site.files, first.file.fd
        page_bytes = files.read(fd, [pages[: count * PAGE]], geometry.page_offset(first.place.slot))
        payload_bytes = files.read(fd, [payloads[: count * geometry.stride]], geometry.payload_offset(first.place.slot))
        found = []
        for block in blocks:
            index = block.place.slot - first.place.slot
            page = parse_block(pages[index * PAGE :][:PAGE], block.place, geometry.block_bytes)
            payload = payloads[index * geometry.stride :][: geometry.block_bytes]
            fits = (index + 1) * PAGE <= page_bytes and (index + 1) * geometry.stride <= payload_bytes
            ok = fits and isinstance(page, BlockPage) and page.name == block.name
            ok = ok and payload_digest(payload) == block.digest
            found.append((block, page if ok and isinstance(page, BlockPage) else None, payload))
        return found

    def _buffers(self) -> tuple[memoryview, memoryview]:
        if self._memory is None:
            num = self._writer.max_batch
            self._memory = aligned_memory(num * PAGE), aligned_memory(num * self._site.geometry.stride)
        return self._memory

    def _has_head(self) -> bool:
        with self._state.lock:
            return self._state.log.head_room > 0

    def _retire(self, number: int) -> None:
        self._state.retire(number).unlink(missing_ok=True)
