"""What a disk tier knows, under one lock: which blocks it holds, where, with which digests, and who reads which.

It moves no bytes. Changes are told to the owner in their order, outside the lock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.kv.prefix_directory import PrefixDirectory
from tandem.kv.segment_log import Place, SegmentLog
from tandem.prefix_store.disk_files import SegmentFile
from tandem.prefix_store.disk_stats import Counters
from tandem.types import BlockHash

logger = logging.getLogger(__name__)

Names = tuple[BlockHash, ...]
OnChange = Callable[[Names, Names], None]
"""Told which names have come and which are gone. Called by several threads, one at a time; must not change the tier."""


def ignore(added: Names, removed: Names) -> None:
    """Nobody listens."""


class Located(NamedTuple):
    """A block for a reader: its file stays readable until `let_go`."""

    name: BlockHash
    place: Place
    digest: int
    file: SegmentFile


class DiskState:
    """See the module. Methods take the lock themselves; `lock` is for looking at several things at once."""

    def __init__(self, directory: PrefixDirectory, log: SegmentLog) -> None:
        self.lock = threading.Lock()
        self.directory = directory
        self.log = log
        self.files: dict[int, SegmentFile] = {}
        self.digests: dict[BlockHash, int] = {}
        self.counters = Counters()
        self.generation = 0
        """Grows with every `clear`: what was begun before is not put in after."""
        self.num_reads = 0
        self.when_dead: Callable[[], None] = lambda: None
        """Called, outside the lock, when slots have died that nobody was about to mark."""
        self._no_reads = threading.Condition(self.lock)
        self._dead: list[Place] = []
        self.on_change: OnChange = ignore
        self._events: deque[tuple[Names, Names]] = deque()
        self._telling = threading.Lock()

    def count(self, **amounts: float) -> None:
        """Adds to counters, by their names."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def locate(self, names: Sequence[BlockHash]) -> list[Located]:
        """The leading blocks that are here, for a read. `let_go` must follow."""
        with self.lock:
            self.num_reads += 1
            return [self._located(name) for name in names[: self.directory.match(names)]]

    def locate_segment(self, number: int) -> list[Located]:
        """The live blocks of a segment, by slot, for a read; none when it is gone. `let_go` must follow."""
        with self.lock:
            self.num_reads += 1
            present = number in self.files
            return [self._located(name) for name in self.log.live(number)] if present else []

    def _located(self, name: BlockHash) -> Located:
        place = self.log.place(name)
        assert place is not None
        return Located(name, place, self.digests[name], self.files[place.segment].acquire())

    def let_go(self, located: Sequence[Located]) -> None:
        """The end of a read."""
        with self.lock:
            for block in located:
                block.file.release()
            self.num_reads -= 1
            if self.num_reads == 0:
                self._no_reads.notify_all()

    def give_way(self, timeout_s: float) -> None:
        """Waits for a moment without reads, but no longer than `timeout_s`."""
        with self._no_reads:
            self._no_reads.wait_for(lambda: self.num_reads == 0, timeout_s)

    @property
    def has_dead(self) -> bool:
        """Whether slots are to be marked."""
        return bool(self._dead)

    def admit(
        self,
        names: Sequence[BlockHash],
        places: Sequence[Place],
        digests: Sequence[int],
        *,
        tenant: str,
        generation: int,
    ) -> int:
        """Makes the last blocks of a prefix visible, which lie at `places`; how many found room, evicting others."""
        first = len(names) - len(places)
        with self.lock:
            admitted: Names = ()
            if generation == self.generation and self.directory.match(names) == first:
                admission = self.directory.insert(names, tenant=tenant)
                admitted = admission.admitted
                self._forget(admission.evicted)
                self.counters.evictions += len(admission.evicted)
                self._events.append((admitted, admission.evicted))
            for name, place, digest in zip(admitted, places, digests, strict=False):
                settled = self.log.settle(name, place)
                assert settled, "a segment went while it was written"
                self.digests[name] = digest
            self._dead += places[len(admitted) :]
        self._tell()
        return len(admitted)

    def relocate(self, name: BlockHash, old: Place, new: Place) -> None:
        """A block was copied on; unless it has gone meanwhile, the copy is the block."""
        with self.lock:
            if self.log.place(name) == old:
                self.log.settle(name, new)
                self._dead.append(old)
            else:
                self._dead.append(new)

    def lose(self, name: BlockHash, place: Place) -> int:
        """A block turned out to be no good: it goes, with all that is only reached through it. How many went."""
        with self.lock:
            gone = self.directory.remove(name) if self.log.place(name) == place else ()
            self._forget(gone)
            self._events.append(((), gone))
        self._tell()
        self.when_dead()
        return len(gone)

    def remove(self, names: Sequence[BlockHash]) -> Names:
        """Removes blocks with all that is only reached through them; what went."""
        with self.lock:
            gone = self.directory.remove(*names)
            self._forget(gone)
            self._events.append(((), gone))
        self._tell()
        self.when_dead()
        return gone

    def clear(self) -> int:
        """Forgets every block, pinned or not; how many there were."""
        with self.lock:
            gone = self.directory.clear()
            self._forget(gone)
            self.generation += 1
            self._events.append(((), gone))
        self._tell()
        return len(gone)

    def open_segment(self, file: SegmentFile) -> None:
        """A new head."""
        with self.lock:
            self.log.open(file.number)
            self.files[file.number] = file

    def retire(self, number: int) -> Path:
        """A segment without live blocks is out of use; the path to delete. Those who read it still can."""
        with self.lock:
            self.log.drop(number)
            file = self.files.pop(number)
            file.release()
            self._dead = [place for place in self._dead if place.segment != number]
            return file.path

    def take_dead(self) -> list[Place]:
        """Slots whose pages name blocks that are gone, each given out once."""
        with self.lock:
            dead, self._dead = sorted(self._dead), []
            return dead

    def bury(self, places: Sequence[Place]) -> None:
        """More such slots."""
        with self.lock:
            self._dead += places

    def _forget(self, names: Sequence[BlockHash]) -> None:
        for name in names:
            place = self.log.forget(name)
            assert place is not None
            self._dead.append(place)
            del self.digests[name]

    def _tell(self) -> None:
        with self._telling:
            while self._events:
                added, removed = self._events.popleft()
                if added or removed:
                    self._call(added, removed)

    def _call(self, added: Names, removed: Names) -> None:
        try:
            self.on_change(added, removed)
        except Exception:
            logger.exception("the listener of a disk tier failed: what it knows is no longer complete")

    def check_invariants(self) -> None:
        """Asserts that directory, log, digests and files agree."""
        with self.lock:
            self.directory.check_invariants()
            self.log.check_invariants()
            names = set(self.directory.names())
            assert names == set(self.digests)
            assert all(self.log.place(name) is not None for name in names)
            assert len(names) == sum(len(self.log.live(number)) for number in self.log.segments)
            assert set(self.files) == set(self.log.segments)
