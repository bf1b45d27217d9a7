"""The one thread that changes a disk tier's files: stores what was put, marks what is gone, makes room.

Puts wait in a queue of bounded length. One is stored batch by batch: room, payloads, pages, and only then names.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from tandem.prefix_store.disk_collector import Collector
from tandem.prefix_store.disk_files import NO_SPACE
from tandem.prefix_store.disk_format import BlockPage, payload_digest
from tandem.prefix_store.disk_records import RecordWriter, Site
from tandem.prefix_store.disk_state import DiskState
from tandem.prefix_store.disk_stats import NotStored, Stored
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

_MAX_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A prefix that waits to be stored. Its payloads are the caller's, who keeps them as they are until `done`."""

    names: tuple[BlockHash, ...]
    payloads: tuple[memoryview, ...]
    tenant: str
    generation: int
    done: Future[int] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Files of a cleared tier that wait to be deleted; `done` gets `count`."""

    count: int
    done: Future[int] = field(default_factory=Future)


class DiskWriter:
    """Owns the thread. `start` after the state is complete."""

    def __init__(self, site: Site, state: DiskState, *, max_batch: int, queue_blocks: int, sequence: int) -> None:
        self._state = state
        self._records = RecordWriter(site, state, max_batch)
        self.collector = Collector(site, state, self._records)
        self._queue: deque[Put | Clear] = deque()
        self._queue_blocks = queue_blocks
        self._queued = 0
        self._sequence = sequence
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._state.when_dead = self.wake
        self._thread.start()

    @property
    def queued_blocks(self) -> int:
        """Blocks of puts that are not done."""
        return self._queued

    def put(self, job: Put) -> None:
        """Queues a put, or answers it at once where there is no room for it. An empty queue takes a put of any size."""
        job.done.set_running_or_notify_cancel()
        with self._changed:
            full = bool(self._queued) and self._queued + len(job.names) > self._queue_blocks
            why = NotStored.CLOSED if self._closed else NotStored.QUEUE_FULL if full else None
            if why is None:
                self._queued += len(job.names)
                self._queue.append(job)
                self._changed.notify()
        if why is not None:
            self._state.count(refused=1)
            self._answer(job, why)

    def clear(self, job: Clear) -> None:
        """Queues the deletion of a cleared tier's files."""
        job.done.set_running_or_notify_cancel()
        with self._changed:
            if not self._closed:
                self._queue.append(job)
                self._changed.notify()
                return
        job.done.set_result(job.count)

    def wake(self) -> None:
        """Slots have died that are to be marked."""
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread. A put that is being stored ends with its batch, those that wait are not stored."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._records.close()

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Waits for something to do and does it; False after the last. Keeps nothing of it when it returns."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._queue) or self._state.has_dead)
            job = self._queue.popleft() if self._queue else None
            is_last = self._closed and job is None
        if isinstance(job, Put):
            self._guarded(partial(self._put, job), job.done)
        elif isinstance(job, Clear):
            self._guarded(partial(self._clear, job), job.done)
        else:
            self._tidy()
        return not is_last

    def _guarded(self, work: Callable[[], None], done: Future[int]) -> None:
        """Whoever waits for a job hears of a fault of ours; the thread goes on."""
        try:
            work()
        except Exception as exc:
            logger.exception("a disk tier's writer failed")
            if not done.done():
                done.set_exception(exc)

    def _put(self, job: Put) -> None:
        try:
            why = NotStored.CLOSED if self._closed else self._store(job)
        except OSError as exc:
            why = NotStored.DISK_FULL if exc.errno in NO_SPACE else NotStored.IO_ERROR
            self._state.count(write_errors=1)
            logger.warning("blocks were not stored: %s", exc)
        finally:
            with self._changed:
                self._queued -= len(job.names)
        self._tidy()
        self._answer(job, why)

    def _answer(self, job: Put, why: NotStored | None) -> None:
        with self._state.lock:
            num_stored = self._state.directory.match(job.names)
        if num_stored < len(job.names) and why is not NotStored.QUEUE_FULL:
            self._state.count(not_stored=len(job.names) - num_stored)
        for payload in job.payloads:
            payload.release()  # the caller may unmap it from here on
        job.done.set_result(Stored(num_stored, why if num_stored < len(job.names) else None))

    def _store(self, job: Put) -> NotStored | None:
        """Stores what is missing; again from its beginning where that has gone meanwhile."""
        why: NotStored | None = NotStored.CLEARED
        for _ in range(_MAX_TRIES):
            if why is not NotStored.CLEARED or job.generation != self._state.generation:
                break
            why = self._store_once(job)
        return why

    def _store_once(self, job: Put) -> NotStored | None:
        with self._state.lock:
            end = self._state.directory.match(job.names)
        while end < len(job.names):
            if self._closed:
                return NotStored.CLOSED
            self.collector.make_room()
            num_written, num_admitted = self._store_batch(job, end)
            self._tidy()
            if num_admitted < num_written:
                with self._state.lock:
                    is_broken = self._state.directory.match(job.names) < end + num_admitted
                return NotStored.CLEARED if is_broken or job.generation != self._state.generation else NotStored.NO_ROOM
            end += num_admitted
        return None

    def _store_batch(self, job: Put, first: int) -> tuple[int, int]:
        """Writes some blocks from `first` on; how many, and how many of them are visible now."""
        payloads = job.payloads[first : first + self._records.room()]
        pages = self._pages(job, first, payloads)
        places = self._records.append(pages, payloads)
        count = len(places)
        admitted = self._state.admit(
            job.names[: first + count],
            places,
            [page.digest for page in pages[:count]],
            tenant=job.tenant,
            generation=job.generation,
        )
        self._state.count(blocks_written=count)
        return count, admitted

    def _pages(self, job: Put, first: int, payloads: Sequence[memoryview]) -> list[BlockPage]:
        with self._state.lock:
            clock = self._state.directory.clock
        pages = []
        for index, payload in enumerate(payloads, start=first):
            self._sequence += 1
            pages.append(
                BlockPage(
                    name=job.names[index],
                    parent=job.names[index - 1] if index else None,
                    tenant=job.tenant,
                    sequence=self._sequence,
                    clock=clock,
                    digest=payload_digest(payload),
                )
            )
        return pages

    def _clear(self, job: Clear) -> None:
        self.collector.retire_all()
        self._tidy()
        job.done.set_result(job.count)

    def _tidy(self) -> None:
        """Deletes dead segments and marks dead slots. What cannot be marked now may come back after a restart."""
        try:
            self.collector.retire_dead()
            self._records.mark_dead(self._state.take_dead())
        except OSError as exc:
            self._state.count(write_errors=1)
            logger.warning("slots of blocks that are gone were not marked: %s", exc)
