"""Opening a link of the ucx transport while something else happens to the transport."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from tandem.errors import LinkClosed, TransportError
from tandem.types import WorkerId
from tests.kv_transfer.peers import TIMEOUT_S, Peer, RecordingSink

ucx = pytest.importorskip("kv_transfer.ucx")


pytestmark = pytest.mark.usefixtures("ended_forks")


@pytest.fixture
def transport() -> Iterator[Transport]:
    made = make_transport("ucx", worker_id=WorkerId("local"))
    yield made
    made.close()


def test_closing_the_transport_ends_a_connect_at_once(transport: Transport) -> None:
    with Peer("ucx", "serve", "1") as peer, ThreadPoolExecutor() as threads:
        address = peer.address()
        peer.stop()
        began_s = time.monotonic()
        connecting = threads.submit(transport.connect, address)
        while not transport._engine.links:  # type: ignore[attr-defined]
            time.sleep(0.001)
        transport.close()
        with pytest.raises(LinkClosed, match="the transport is closed"):
            connecting.result(TIMEOUT_S)
        assert time.monotonic() - began_s < ucx._CONNECT_TIMEOUT_S - 1.0


def test_a_connect_behind_the_end_of_the_worker_fails_at_once(transport: Transport) -> None:
    """Between that and the end of the thread."""
    other = make_transport("ucx", worker_id=WorkerId("other"))
    other.serve(RecordingSink(other.allocate(1)))
    thread = transport._thread  # type: ignore[attr-defined]
    thread.run_and_wait(transport._close_all, TIMEOUT_S)  # type: ignore[attr-defined]
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    began_s = time.monotonic()
    with pytest.raises(LinkClosed, match="the transport is closed"):
        transport.connect(other.address())
    assert time.monotonic() - began_s < ucx._CONNECT_TIMEOUT_S - 1.0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    thread.stop()
    transport._closed = True  # type: ignore[attr-defined]
    other.close()


def test_a_link_that_opens_when_nobody_waits_for_it_any_more_is_closed(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_transport("ucx", worker_id=WorkerId("other"))
    other.serve(RecordingSink(other.allocate(1)))
    monkeypatch.setattr(ucx, "_CONNECT_TIMEOUT_S", 0.1)
    held_up = threading.Event()
    thread = transport._thread  # type: ignore[attr-defined]
    thread.post(held_up.wait)
    with pytest.raises(TransportError, match="held up"):
        transport.connect(other.address())
    held_up.set()
    assert thread.run_and_wait(lambda: None, TIMEOUT_S)
    assert all(link.closed for link in transport._engine.links)  # type: ignore[attr-defined]
    other.close()


def test_a_link_that_somebody_keeps_holds_nothing_of_a_closed_transport() -> None:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    other = make_transport("ucx", worker_id=WorkerId("other"))
    other.serve(RecordingSink(other.allocate(1)))
    made = make_transport("ucx", worker_id=WorkerId("local"))
    kept = [made.connect(other.address()) for _ in range(2)]
    kept[0].close()
    made.close()
    other.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert all(link.stats().num_messages == 0 for link in kept)
