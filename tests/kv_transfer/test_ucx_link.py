"""A link of the ucx transport at the seam to UCX: what UCX still holds of it, and what becomes of its endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from kv_transfer.host import own_identity
from kv_transfer.progress import ProgressThread
from kv_transfer.staging import StagingPool

if TYPE_CHECKING:
    from kv_transfer.ucx_endpoints import EndpointPool

ucx = pytest.importorskip("kv_transfer.ucx")
ucx_endpoints = pytest.importorskip("kv_transfer.ucx_endpoints")
ucx_link = pytest.importorskip("kv_transfer.ucx_link")
ucx_native = pytest.importorskip("kv_transfer.ucx_native")
ucx_wire = pytest.importorskip("kv_transfer.ucx_wire")


@dataclass
class HeldRequest:
    """A request that ends when the test says so."""

    completed: bool = False
    error: Exception | None = None

    def check_error(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class HeldEndpoint:
    """An endpoint to a peer that has not answered; small messages leave at once."""

    lanes: tuple[str, ...] = ("cma",)
    reads_remote: bool = True
    large: list[HeldRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def send(self, view: memoryview, tag: int) -> HeldRequest:
        request = HeldRequest(completed=view.nbytes < ucx_native.RENDEZVOUS_BYTES)
        if not request.completed:
            self.large.append(request)
        return request

    alive: bool = True

    def close(self) -> None:
        self.ended.append("closed")

    def break_off(self) -> None:
        self.ended.append("broken off")

    def abandon(self) -> None:
        self.ended.append("abandoned")


class Opening:
    """A link whose HELLO is under way, driven by hand as the transport's thread would."""

    def __init__(self, *, error_handling: bool = False) -> None:
        self.endpoint = HeldEndpoint()
        self.greetings = 0
        self.thread = ProgressThread("unused")
        self.link = ucx_link.UcxLink(
            self.endpoint,
            self.thread,
            StagingPool(),
            nonce=1,
            error_handling=error_handling,
            release=lambda endpoint, _: endpoint.ended.append("released"),
        )
        hello = ucx_wire.Hello(nonce=1, reads_remote=True, identity=own_identity())
        self.link.open(hello, None, on_settled=self._greeted)
        self.engine = ucx._Engine(cast("ucx_native.Worker", None))
        self.engine.links = [self.link]

    def _greeted(self) -> None:
        self.greetings += 1


@pytest.fixture
def opening(request: pytest.FixtureRequest) -> Iterator[Opening]:
    made = Opening(error_handling=getattr(request, "param", False))
    yield made
    made.thread.start()
    made.thread.stop()


def test_a_link_whose_hello_nobody_took_yet_is_looked_at_again(opening: Opening) -> None:
    opening.link.advance()
    assert not opening.link.idle
    assert opening.engine.patience_s() is not None
    opening.endpoint.large[0].completed = True
    opening.link.advance()
    assert opening.greetings == 1
    assert opening.link.idle
    assert opening.engine.patience_s() is None


def test_a_link_that_is_closed_while_it_opens_keeps_its_endpoint_until_the_hello_is_taken(opening: Opening) -> None:
    opening.link.end("the caller gave up")
    opening.link.advance()
    assert opening.endpoint.ended == []
    assert not opening.link.finished
    opening.endpoint.large[0].completed = True
    opening.link.advance()
    assert opening.endpoint.ended == ["released"]
    assert opening.link.finished


def test_an_endpoint_whose_hello_is_never_taken_is_left_to_the_end_of_its_worker(opening: Opening) -> None:
    opening.link.end("the transport was closed")
    opening.link.release_endpoint()
    assert opening.endpoint.ended == ["abandoned"]


def test_a_link_whose_hello_fails_has_ended(opening: Opening) -> None:
    hello = opening.endpoint.large[0]
    hello.completed, hello.error = True, RuntimeError("connection reset")
    opening.link.advance()
    assert (opening.greetings, opening.link.closed) == (1, True)


def test_who_waits_for_a_link_to_open_hears_of_its_end(opening: Opening) -> None:
    opening.link.end("the transport was closed")
    assert (opening.greetings, opening.link.closed) == (1, True)
    opening.endpoint.large[0].completed = True
    opening.link.advance()
    assert opening.greetings == 1


WITH_ERROR_HANDLING = pytest.mark.parametrize("opening", [True], indirect=True)


@WITH_ERROR_HANDLING
def test_what_a_living_peer_takes_in_time_costs_no_endpoint(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(ucx_link.time, "monotonic", lambda: now_s)
    opening.link.end("the link was closed")
    now_s += ucx_link._LINGER_S - 0.1
    opening.link.advance()
    assert opening.endpoint.ended == []
    opening.endpoint.large[0].completed = True
    opening.link.advance()
    assert opening.endpoint.ended == ["released"]


@WITH_ERROR_HANDLING
def test_what_a_living_peer_does_not_take_in_time_is_broken_off(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(ucx_link.time, "monotonic", lambda: now_s)
    opening.link.end("the link was closed")
    now_s += ucx_link._LINGER_S + 0.1
    opening.link.advance()
    assert opening.endpoint.ended == ["broken off"]
    opening.link.advance()
    assert opening.endpoint.ended == ["broken off"]


@WITH_ERROR_HANDLING
def test_what_a_dead_peer_has_not_taken_is_broken_off_at_once(opening: Opening) -> None:
    opening.link.end("the peer's process ended", peer_dead=True)
    assert opening.endpoint.ended == ["broken off"]


def test_an_idle_endpoint_to_a_dead_peer_serves_no_other_link(opening: Opening) -> None:
    opening.endpoint.large[0].completed = True
    opening.link.advance()
    opening.link.end("the peer's process ended", peer_dead=True)
    assert opening.endpoint.ended == ["closed"]


class Opener:
    """A worker that opens endpoints to nobody."""

    def __init__(self) -> None:
        self.opened: list[HeldEndpoint] = []

    def connect(self, address: bytes, *, error_handling: bool) -> HeldEndpoint:
        self.opened.append(HeldEndpoint())
        return self.opened[-1]


@pytest.fixture
def pool() -> Iterator[EndpointPool]:
    thread = ProgressThread("unused")
    thread.start()
    yield ucx_endpoints.EndpointPool(cast("ucx_native.Worker", Opener()), thread)
    thread.stop()


def opened_by(pool: EndpointPool, address: bytes) -> HeldEndpoint:
    return cast(HeldEndpoint, pool.open(address, error_handling=True))


def test_an_endpoint_serves_the_next_link_to_the_same_worker_alone(pool: EndpointPool) -> None:
    first = opened_by(pool, b"one")
    pool.keep(b"one", first, None)
    assert opened_by(pool, b"other") is not first
    assert opened_by(pool, b"one") is first
    assert opened_by(pool, b"one") is not first
    assert first.ended == []


def test_an_endpoint_that_broke_while_it_was_kept_is_closed(pool: EndpointPool) -> None:
    first = opened_by(pool, b"one")
    pool.keep(b"one", first, None)
    first.alive = False
    assert opened_by(pool, b"one") is not first
    assert first.ended == ["closed"]


def test_of_too_many_kept_endpoints_the_oldest_are_closed(pool: EndpointPool) -> None:
    endpoints = [HeldEndpoint() for _ in range(ucx_endpoints.MAX_SPARE + 2)]
    for index, endpoint in enumerate(endpoints):
        pool.keep(str(index).encode(), endpoint, None)
    assert [endpoint.ended for endpoint in endpoints[:3]] == [["closed"], ["closed"], []]
    pool.close()
    assert all(endpoint.ended == ["closed"] for endpoint in endpoints)
