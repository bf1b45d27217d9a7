"""The simulated fabric: each worker has one port out and one in; messages pass in the order they were posted. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.simulator.events import EventQueue
from kv_transfer.sizing import LinkSpeed
from tandem.types import WorkerId


@dataclass(kw_only=True, slots=True)
class Network:
    """All links have one speed. A message occupies both its ports for as long as its bytes take."""

    events: EventQueue
    speed: LinkSpeed
    num_bytes: float = 0.0
    num_messages: int = 0
    busy_s: dict[WorkerId, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which each worker's port out was occupied."""
    _free_out: dict[WorkerId, float] = field(default_factory=dict)
    _free_in: dict[WorkerId, float] = field(default_factory=dict)

    def send(self, source: WorkerId, destination: WorkerId, num_bytes: float, landed: Callable[[], None]) -> None:
        """Posts a message now; `landed` is called when its last byte has arrived."""
        wire_s = num_bytes / self.speed.bytes_per_s
        start_s = max(self.events.now, self._free_out.get(source, 0.0), self._free_in.get(destination, 0.0))
        self._free_out[source] = self._free_in[destination] = start_s + wire_s
        self.busy_s[source] += wire_s
        self.num_bytes += num_bytes
        self.num_messages += 1
        self.events.at(start_s + wire_s + self.speed.latency_s, landed)
