"""A link of the ucx transport while it is being opened: what UCX still holds of it, at the seam to UCX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest

from kv_transfer.host import own_identity
from kv_transfer.progress import ProgressThread
from kv_transfer.staging import StagingPool

ucx = pytest.importorskip("kv_transfer.ucx")
ucx_link = pytest.importorskip("kv_transfer.ucx_link")
ucx_native = pytest.importorskip("kv_transfer.ucx_native")
ucx_wire = pytest.importorskip("kv_transfer.ucx_wire")


@dataclass
class HeldRequest:
    """A request that ends when the test says so."""

    completed: bool = False

    def check_error(self) -> None:
        pass


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

    def close(self) -> None:
        self.ended.append("closed")

    def abandon(self) -> None:
        self.ended.append("abandoned")


class Opening:
    """A link whose HELLO is under way, driven by hand as the transport's thread would."""

    def __init__(self) -> None:
        self.endpoint = HeldEndpoint()
        self.greetings = 0
        self.thread = ProgressThread("unused")
        self.link = ucx_link.UcxLink(self.endpoint, self.thread, StagingPool(), nonce=1, error_handling=False)
        hello = ucx_wire.Hello(nonce=1, reads_remote=True, identity=own_identity())
        self.link.open(hello, None, on_open=self._greeted)
        self.engine = ucx._Engine(cast("ucx_native.Worker", None))
        self.engine.links = [self.link]

    def _greeted(self) -> None:
        self.greetings += 1


@pytest.fixture
def opening() -> Iterator[Opening]:
    made = Opening()
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
    assert opening.endpoint.ended == ["closed"]
    assert opening.link.finished


def test_an_endpoint_whose_hello_is_never_taken_is_left_to_the_end_of_its_worker(opening: Opening) -> None:
    opening.link.end("the transport was closed")
    opening.link.release_endpoint()
    assert opening.endpoint.ended == ["abandoned"]
