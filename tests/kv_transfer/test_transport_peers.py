"""What every transport must do between processes, above all when the other one dies or stops."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import wait

import numpy as np
import pytest
import torch

from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from tandem.errors import LinkClosed, TransportError
from tandem.types import WorkerId
from tests.kv_transfer.peers import (
    FAR_UCX,
    HANDOFF,
    TIMEOUT_S,
    Peer,
    RecordingSink,
    make_header,
    name_of,
)

MIB = 1 << 20
LARGE = 4 * MIB


pytestmark = pytest.mark.usefixtures("ended_forks")


@pytest.fixture(params=["shm", "ucx", "collective", FAR_UCX])
def kind(request: pytest.FixtureRequest) -> str:
    """A peer's transport, and where it says that it is."""
    return str(request.param)


@pytest.fixture
def transport(kind: str) -> Iterator[Transport]:
    made = make_transport(name_of(kind), worker_id=WorkerId("local"))
    yield made
    made.close()


def serving(transport: Transport, *, piece_bytes: int | None = None) -> RecordingSink:
    sink = RecordingSink(transport.allocate(8 * LARGE), piece_bytes=piece_bytes)
    transport.serve(sink)
    return sink


def test_another_process_receives_what_is_sent(kind: str, transport: Transport) -> None:
    with Peer(kind, "serve", str(8 * LARGE)) as peer:
        memory = transport.allocate(8 * LARGE).random_(0, 255)
        link = transport.connect(peer.address())
        for i, piece in enumerate(memory.split(LARGE)):
            link.send(make_header([piece], i * LARGE), [piece]).result(TIMEOUT_S)
        assert peer.finish() == "8 placed, 8 landed, 0 errors"


def test_what_another_process_sends_arrives(kind: str, transport: Transport) -> None:
    sink = serving(transport)
    with Peer(kind, "send", transport.address().hex(), str(LARGE), "-8") as peer:
        assert sink.wait_landed(8) == [None] * 8
        assert peer.read() == "sent"
    assert torch.equal(sink.memory[-LARGE:], (torch.arange(LARGE) % 251).to(torch.uint8))


def test_the_link_says_what_was_negotiated(kind: str, transport: Transport) -> None:
    with Peer(kind, "serve", "1") as peer:
        detail = transport.connect(peer.address()).detail
    same_host = ["cma", "posix", "sysv"]
    expected = {"shm": ["memfd"], "ucx": same_host, "collective": ["gloo"], FAR_UCX: ["tcp"]}[kind]
    assert any(word in detail for word in expected)
    assert ("endpoint error handling on" in detail) == (kind == FAR_UCX)


def test_connecting_to_a_process_that_ended_fails(kind: str, transport: Transport) -> None:
    with Peer(kind, "serve", "1") as peer:
        address = peer.address()
    with pytest.raises(TransportError):
        transport.connect(address)


def test_a_receiver_that_is_killed_fails_its_senders(kind: str, transport: Transport) -> None:
    with Peer(kind, "serve", str(8 * LARGE)) as peer:
        memory = transport.allocate(LARGE)
        link = transport.connect(peer.address())
        peer.stop()
        sends = [link.send(make_header([memory]), [memory]) for _ in range(50)]
        peer.signal(signal.SIGKILL)
        assert isinstance(sends[-1].exception(TIMEOUT_S), LinkClosed)
        assert not wait(sends, TIMEOUT_S).not_done
    with pytest.raises(LinkClosed):
        link.send(make_header([memory]), [memory]).result(TIMEOUT_S)


@pytest.mark.parametrize("piece_bytes", [None, 100_000], ids=["contiguous", "fragmented"])
def test_a_sender_that_is_killed_leaves_no_message_unreported(
    kind: str, transport: Transport, piece_bytes: int | None
) -> None:
    sink = serving(transport, piece_bytes=piece_bytes)
    with Peer(kind, "send", transport.address().hex(), str(LARGE), "8") as peer:
        sink.wait_landed(10)
        peer.signal(signal.SIGKILL)
        peer.wait()
    sink.refuse()
    transport.quiesce(HANDOFF).result(TIMEOUT_S)
    sink.wait_landed(len(sink.placed))
    assert len(sink.landings) == len(sink.placed)
    assert not sink.memory.fill_(0).any()


def test_after_a_killed_sender_the_next_one_is_served(kind: str, transport: Transport) -> None:
    sink = serving(transport)
    for _ in range(2):
        with Peer(kind, "send", transport.address().hex(), str(LARGE), "8") as peer:
            sink.wait_landed(len(sink.landings) + 10)
            peer.signal(signal.SIGKILL)


def holders(memory: torch.Tensor) -> int:
    """How many hold the bytes, in whatever form."""
    return int(torch._C._storage_Use_Count(memory.untyped_storage()._cdata))  # type: ignore[attr-defined]


def until_descriptors(most: int) -> None:
    """Returns when this process has no more descriptors than that."""
    deadline = time.monotonic() + TIMEOUT_S
    while (found := len(os.listdir("/proc/self/fd"))) > most:
        assert time.monotonic() < deadline, f"{found} descriptors, not {most}"
        time.sleep(0.05)


@pytest.mark.parametrize("is_closed_first", [True, False], ids=["closed", "open"])
def test_receivers_that_come_and_go_leave_no_descriptor(
    kind: str, transport: Transport, is_closed_first: bool
) -> None:
    found = []
    memory = transport.allocate(LARGE)
    for _ in range(4):
        with Peer(kind, "serve", str(LARGE)) as peer:
            link = transport.connect(peer.address())
            link.send(make_header([memory]), [memory]).result(TIMEOUT_S)
            if is_closed_first:
                link.close()
        found.append(len(os.listdir("/proc/self/fd")))
    until_descriptors(found[0])


def test_senders_that_come_and_go_leave_no_descriptor(kind: str, transport: Transport) -> None:
    sink = serving(transport)
    found = []
    for _ in range(4):
        with Peer(kind, "send", transport.address().hex(), str(LARGE), "8") as peer:
            sink.wait_landed(len(sink.landings) + 10)
            peer.signal(signal.SIGKILL)
        found.append(len(os.listdir("/proc/self/fd")))
    until_descriptors(found[0])


@pytest.mark.parametrize("kind", [FAR_UCX], indirect=True)
def test_a_stopped_receiver_on_another_host_holds_nothing_for_long(
    kind: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX then ends by itself what the peer does not take; the transport goes on with others."""
    monkeypatch.setattr("kv_transfer.ucx_link._LINGER_S", 0.2)
    memory = transport.allocate(LARGE)
    with Peer(kind, "serve", str(LARGE)) as peer:
        link = transport.connect(peer.address())
        peer.stop()
        references = holders(memory)
        sends = [link.send(make_header([memory]), [memory]) for _ in range(20)]
        link.close()
        assert isinstance(sends[-1].exception(TIMEOUT_S), LinkClosed)
        del sends
        deadline = time.monotonic() + TIMEOUT_S
        while holders(memory) > references:
            assert time.monotonic() < deadline, "the memory is still held"
            time.sleep(0.05)
        with Peer(kind, "serve", str(LARGE)) as other:
            transport.connect(other.address()).send(make_header([memory]), [memory]).result(TIMEOUT_S)
            assert other.finish() == "1 placed, 1 landed, 0 errors"


def test_a_receiver_that_is_killed_after_its_link_was_closed_holds_nothing(kind: str, transport: Transport) -> None:
    memory = transport.allocate(LARGE)
    with Peer(kind, "serve", str(LARGE)) as peer:
        link = transport.connect(peer.address())
        peer.stop()
        references = holders(memory)
        for _ in range(20):
            link.send(make_header([memory]), [memory])
        link.close()
        del link
    deadline = time.monotonic() + 8.0  # less than a link lingers for a living peer
    while holders(memory) > references:
        assert time.monotonic() < deadline, "the memory is still held"
        time.sleep(0.05)


@pytest.mark.parametrize("ends_first", [True, False], ids=["killed", "stopped"])
def test_a_closed_transport_holds_no_descriptor_for_what_a_lost_receiver_had_not_taken(
    kind: str, ends_first: bool
) -> None:
    """Nor does a link to it that somebody has kept."""
    found, kept = [], []
    for _ in range(4):
        transport = make_transport(name_of(kind), worker_id=WorkerId("local"))
        memory = transport.allocate(LARGE)
        with Peer(kind, "serve", str(LARGE)) as peer:
            address = peer.address()
            kept += [transport.connect(address) for _ in range(2)]
            kept[-1].send(make_header([memory]), [memory]).result(TIMEOUT_S)
            peer.stop()
            sends = [kept[-1].send(make_header([memory]), [memory]) for _ in range(20)]
            if ends_first:
                peer.signal(signal.SIGKILL)
                peer.wait()
                assert not wait(sends, TIMEOUT_S).not_done
            transport.close()
        found.append(len(os.listdir("/proc/self/fd")))
    until_descriptors(found[0])


@pytest.mark.parametrize("num_bytes", [100, LARGE])
def test_closing_a_link_does_not_wait_for_a_stopped_receiver(kind: str, transport: Transport, num_bytes: int) -> None:
    with Peer(kind, "serve", str(8 * LARGE)) as peer:
        memory = transport.allocate(num_bytes)
        link = transport.connect(peer.address())
        peer.stop()
        sends = [link.send(make_header([memory]), [memory]) for _ in range(5000 if num_bytes == 100 else 50)]
        link.close()
        assert all(send.done() for send in sends)
        assert isinstance(sends[-1].exception(), LinkClosed)
        assert peer.is_stopped()


def test_a_receiver_that_goes_on_after_the_link_was_closed_disturbs_nobody(kind: str, transport: Transport) -> None:
    with Peer(kind, "serve", str(8 * LARGE)) as peer:
        memory = transport.allocate(LARGE)
        address = peer.address()
        link = transport.connect(address)
        peer.stop()
        for _ in range(50):
            link.send(make_header([memory]), [memory])
        link.close()
        peer.signal(signal.SIGCONT)
        transport.connect(address).send(make_header([memory]), [memory]).result(TIMEOUT_S)
        placed, landed, _ = peer.finish().split(", ")
        assert placed.split()[0] == landed.split()[0]


@pytest.mark.parametrize("piece_bytes", [None, 100_000], ids=["contiguous", "fragmented"])
def test_quiesce_does_not_wait_for_a_stopped_sender(kind: str, transport: Transport, piece_bytes: int | None) -> None:
    sink = serving(transport, piece_bytes=piece_bytes)
    with Peer(kind, "send", transport.address().hex(), str(LARGE), "8") as peer:
        sink.wait_landed(5)
        peer.stop()
        sink.refuse()
        transport.quiesce(HANDOFF).result(TIMEOUT_S)
        assert len(sink.landings) == len(sink.placed)
        sink.memory.fill_(0)
        peer.signal(signal.SIGCONT)
        transport.quiesce(HANDOFF).result(TIMEOUT_S)
        assert not sink.memory.any()


def test_closing_a_transport_does_not_wait_for_a_stopped_peer(kind: str, transport: Transport) -> None:
    with Peer(kind, "serve", str(8 * LARGE)) as peer:
        address = peer.address()
        other = make_transport(transport.name, worker_id=WorkerId("other"))  # type: ignore[arg-type]
        memory = other.allocate(LARGE)
        link = other.connect(address)
        peer.stop()
        sends = [link.send(make_header([memory]), [memory]) for _ in range(50)]
        other.close()
        assert all(send.done() for send in sends)
        assert isinstance(sends[-1].exception(), LinkClosed)
        assert peer.is_stopped()


def test_garbage_from_a_peer_does_not_stop_the_shm_transport() -> None:
    transport = make_transport("shm", worker_id=WorkerId("local"))
    serving(transport)
    for garbage in (b"x", b"M" + bytes(200), secrets.token_bytes(5000)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as intruder:
            intruder.settimeout(TIMEOUT_S)
            intruder.connect(b"\0" + transport.address())
            intruder.send(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert intruder.recv(10) == b""
    memory = transport.allocate(10)
    transport.connect(transport.address()).send(make_header([memory]), [memory]).result(TIMEOUT_S)
    transport.close()


def test_garbage_from_a_peer_does_not_stop_the_ucx_transport(caplog: pytest.LogCaptureFixture) -> None:
    native = pytest.importorskip("kv_transfer.ucx_native")
    wire = pytest.importorskip("kv_transfer.ucx_wire")
    transport = make_transport("ucx", worker_id=WorkerId("local"))
    sink = serving(transport)
    intruder = native.Worker(None)
    endpoint = intruder.connect(wire.unpack_address(transport.address())[1], error_handling=False)
    requests = []
    for garbage in (b"x", b"TUC2" + bytes(70), secrets.token_bytes(50_000)):
        view = np.frombuffer(garbage, dtype=np.uint8)
        requests += [endpoint.send(view, wire.CONTROL_TAG), endpoint.send(view, wire.payload_tag(5, 5))]
    deadline = time.monotonic() + TIMEOUT_S
    while not all(request.completed for request in requests):
        intruder.progress()
        assert time.monotonic() < deadline
    memory = transport.allocate(10)
    transport.connect(transport.address()).send(make_header([memory]), [memory]).result(TIMEOUT_S)
    assert sink.wait_landed(1) == [None]
    assert "ignoring a control message" in caplog.text
    endpoint.close()
    intruder.close()
    transport.close()
