"""The misbehaving transport of `tests/fakes.py` does to each message what its policy says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from kv_transfer.loopback import ShmTransport
from tandem.errors import LinkClosed
from tandem.types import WorkerId
from tests.fakes import Fault, FaultyTransport
from tests.kv_transfer.peers import TIMEOUT_S, RecordingSink, make_header


class Wire:
    """A faulty source, a sound destination, and one payload."""

    def __init__(self) -> None:
        self.fault = Fault.NONE
        self.source = FaultyTransport(ShmTransport(worker_id=WorkerId("source")), lambda header, index: self.fault)
        self.destination = ShmTransport(worker_id=WorkerId("destination"))
        self.sink = RecordingSink(self.destination.allocate(1000))
        self.destination.serve(self.sink)
        self.memory = self.source.allocate(1000).random_(0, 255)
        self.link = self.source.connect(self.destination.address())

    def send(self, fault: Fault) -> Future[None]:
        self.fault = fault
        return self.link.send(make_header([self.memory]), [self.memory])


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.source.close()
    made.destination.close()


def test_a_dropped_message_resolves_and_never_lands(wire: Wire) -> None:
    wire.send(Fault.DROP).result(TIMEOUT_S)
    wire.send(Fault.NONE).result(TIMEOUT_S)
    assert wire.sink.wait_landed(1) == [None]
    assert len(wire.sink.placed) == 1


def test_a_corrupted_message_lands_as_an_error_and_leaves_the_source_alone(wire: Wire) -> None:
    before = wire.memory.clone()
    wire.send(Fault.CORRUPT).result(TIMEOUT_S)
    assert "digest" in str(wire.sink.wait_landed(1)[0])
    assert torch.equal(before, wire.memory)


def test_a_duplicated_message_lands_twice(wire: Wire) -> None:
    wire.send(Fault.DUPLICATE).result(TIMEOUT_S)
    assert wire.sink.wait_landed(2) == [None, None]


def test_a_delayed_message_lands_when_it_is_released(wire: Wire) -> None:
    sent = wire.send(Fault.DELAY)
    assert wire.source.num_held == 1
    assert not wire.sink.placed
    wire.source.release()
    sent.result(TIMEOUT_S)
    assert wire.sink.wait_landed(1) == [None]


def test_closing_the_link_fails_what_was_delayed(wire: Wire) -> None:
    sent = wire.send(Fault.DELAY)
    wire.link.close()
    with pytest.raises(LinkClosed):
        sent.result(TIMEOUT_S)
