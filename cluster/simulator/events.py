"""The simulator's clock: what happens when. Pure; time passes only from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Event = Callable[[], None]


@dataclass(slots=True)
class EventQueue:
    """Events in order of time; those of one moment in the order in which they were added."""

    now: float = 0.0
    """Seconds since the start."""
    _events: list[tuple[float, int, Event]] = field(default_factory=list)
    _num_added: int = 0

    def __len__(self) -> int:
        return len(self._events)

    def at(self, when_s: float, event: Event) -> None:
        """Has `event` called at `when_s`, which must not be past."""
        assert when_s >= self.now, f"{when_s} s is past, it is {self.now} s"
        heapq.heappush(self._events, (when_s, self._num_added, event))
        self._num_added += 1

    def after(self, delay_s: float, event: Event) -> None:
        """Has `event` called `delay_s` seconds from now."""
        self.at(self.now + delay_s, event)

    def run(self) -> None:
        """Calls events until there are none."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
