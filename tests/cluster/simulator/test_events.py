"""The simulator's clock and its fabric."""

from __future__ import annotations

import pytest

from cluster.simulator.events import EventQueue
from cluster.simulator.network import Network
from kv_transfer.sizing import LinkSpeed
from tandem.types import WorkerId

P0, P1, D0, D1 = (WorkerId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))


def test_events_come_in_order_of_time_and_those_of_one_moment_as_they_were_added() -> None:
    events, seen = EventQueue(), []
    for when_s, name in [(2.0, "d"), (1.0, "a"), (1.0, "b"), (1.5, "c")]:
        events.at(when_s, lambda name=name: seen.append((events.now, name)))  # type: ignore[misc]
    events.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.5, "c"), (2.0, "d")]
    assert not len(events)


def test_an_event_may_add_events() -> None:
    events, seen = EventQueue(), []
    events.at(1.0, lambda: events.after(0.5, lambda: seen.append(events.now)))
    events.run()
    assert seen == [1.5]


def test_the_past_is_refused() -> None:
    events = EventQueue(now=2.0)
    with pytest.raises(AssertionError, match="past"):
        events.at(1.0, lambda: None)


def landings(*messages: tuple[WorkerId, WorkerId, float]) -> list[float]:
    """When messages that are all posted at 0 land, over links of 100 bytes a second and a latency of 1 s."""
    events = EventQueue()
    network = Network(events=events, speed=LinkSpeed(bytes_per_s=100, latency_s=1.0))
    landed: list[float] = []
    for source, destination, num_bytes in messages:
        network.send(source, destination, num_bytes, lambda: landed.append(events.now))
    events.run()
    return landed


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    assert landings((P0, D0, 200)) == [3.0]


def test_messages_of_one_port_follow_each_other_and_latencies_overlap() -> None:
    assert landings((P0, D0, 200), (P0, D0, 100), (P0, D1, 100)) == [3.0, 4.0, 5.0]
    assert landings((P0, D0, 200), (P1, D0, 100)) == [3.0, 4.0]


def test_other_ports_are_free() -> None:
    assert landings((P0, D0, 200), (P1, D1, 200)) == [3.0, 3.0]
