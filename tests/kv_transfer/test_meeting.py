"""Two sides of a link make a process group over their control socket, whatever the other one says or does not say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from unittest.mock import ANY

import pytest
import torch

from kv_transfer.collective import CollectiveTransport
from kv_transfer.collective_wire import Address, receive_exactly
from kv_transfer.group import DESTINATION_RANK, SOURCE_RANK, Group, Groups
from kv_transfer.meeting import Meeting
from kv_transfer.segments import HOST
from tandem.errors import LinkClosed, TransportError
from tandem.types import WorkerId
from tests.kv_transfer.peers import TIMEOUT_S, RecordingSink, make_header

LOCALHOST = "127.0.0.1"


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.5)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def serving() -> Iterator[CollectiveTransport]:
    transport = CollectiveTransport(worker_id=WorkerId("destination"))
    transport.serve(RecordingSink(torch.zeros(1000, dtype=torch.uint8)))
    yield transport
    transport.close()


def test_both_sides_have_the_group_when_they_part_and_the_socket_is_free(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    groups = [Groups(HOST, host=LOCALHOST) for _ in sockets]
    with ThreadPoolExecutor() as threads:
        opening: list[Future[Group]] = [
            threads.submit(made.open, sock, None, "name", rank)
            for made, sock, rank in zip(groups, sockets, (SOURCE_RANK, DESTINATION_RANK), strict=True)
        ]
        source, destination = (future.result(TIMEOUT_S) for future in opening)
        received = torch.zeros(100, dtype=torch.uint8)
        sending = threads.submit(source.send, torch.full((100,), 7, dtype=torch.uint8))
        destination.receive(received)
        sending.result(TIMEOUT_S)
    assert received.tolist() == [7] * 100
    for sock in sockets:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


def test_what_one_side_sets_the_other_one_gets(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = map(Meeting, sockets)
    theirs.set("a", b"\0\1")
    theirs.set("b", "text")
    ours.wait(["b", "a"])
    assert (ours.get("a"), ours.get("b")) == (b"\0\1", b"text")
    ours.set("own", b"1")
    assert ours.get("own") == theirs.get("own") == b"1"


@pytest.mark.parametrize(
    "said",
    [
        b"X",
        b"N" + (1).to_bytes(2, "little") + (1 << 30).to_bytes(4, "little"),
        b"N" + (1).to_bytes(2, "little") + (0).to_bytes(4, "little") + b"\xff",
        b"E",
        (b"N" + (0).to_bytes(2, "little") + (0).to_bytes(4, "little")) * 2 + b"X",
    ],
    ids=["another protocol", "a huge value", "a key that is no text", "nothing", "notes and then nonsense"],
)
def test_nonsense_is_refused(sockets: tuple[socket.socket, socket.socket], said: bytes) -> None:
    sockets[1].sendall(said)
    with pytest.raises(TransportError) as caught:
        Meeting(sockets[0]).get("key")
    assert not isinstance(caught.value, LinkClosed)


def test_a_meeting_has_no_room_for_notes_without_end(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = map(Meeting, sockets)

    def talk() -> None:
        for index in range(5000):
            try:
                theirs.set(str(index), b"")
            except LinkClosed:
                return

    thread = threading.Thread(target=talk)
    thread.start()
    with pytest.raises(TransportError, match="too much"):
        ours.get("never")
    sockets[0].shutdown(socket.SHUT_RDWR)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("ends", [True, False], ids=["gone", "silent"])
def test_a_side_that_says_no_more_ends_the_meeting(
    sockets: tuple[socket.socket, socket.socket], ends: bool
) -> None:
    if ends:
        sockets[1].close()
    with pytest.raises(TransportError, match=r"the peer (is gone|closed the link)"):
        Groups(HOST, host=LOCALHOST).open(sockets[0], None, "name", SOURCE_RANK)


def say(sock: socket.socket, key: bytes, value: bytes) -> None:
    sock.sendall(b"N" + len(key).to_bytes(2, "little") + len(value).to_bytes(4, "little") + key + value)


def hear(sock: socket.socket) -> bytes:
    """The value of the next note."""
    kind_and_sizes = receive_exactly(sock, 7)
    receive_exactly(sock, int.from_bytes(kind_and_sizes[1:3], "little"))
    return receive_exactly(sock, int.from_bytes(kind_and_sizes[3:], "little"))


@pytest.mark.parametrize("length", [0, 8, 50, 160, 1000])
def test_a_side_that_says_too_little_or_too_much_of_itself_is_refused(
    sockets: tuple[socket.socket, socket.socket], length: int
) -> None:
    """Gloo would read on behind its end."""
    say(sockets[1], b"0/1", (b"\xff" * 8 + bytes(length))[:length])
    with pytest.raises(TransportError, match="protocol"):
        Groups(HOST, host=LOCALHOST).open(sockets[0], None, "name", SOURCE_RANK)


def test_a_name_that_ends_elsewhere_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[0].settimeout(TIMEOUT_S)
    with ThreadPoolExecutor() as threads:
        groups = Groups(HOST, host=LOCALHOST)
        opening = threads.submit(groups.open, sockets[0], None, "name", SOURCE_RANK)
        said = bytearray(hear(sockets[1]))
        said[0] += 1  # the length of its host's name
        say(sockets[1], b"0/1", bytes(said))
        with pytest.raises(TransportError, match="protocol"):
            opening.result(TIMEOUT_S)


def test_a_side_that_says_everything_and_never_connects_is_not_waited_for(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.group.OPEN_TIMEOUT_S", 1.0)
    sockets[0].settimeout(TIMEOUT_S)
    with ThreadPoolExecutor() as threads:
        began_s = time.monotonic()
        groups = Groups(HOST, host=LOCALHOST)
        opening = threads.submit(groups.open, sockets[0], None, "name", SOURCE_RANK)
        said = bytearray(hear(sockets[1]))
        port_at = 8 + said[0] + 8 + 2  # behind the name, two lengths and the address's family
        said[port_at : port_at + 2] = b"\xff\xff"  # the highest: the other side is to connect
        say(sockets[1], b"0/1", bytes(said))
        with pytest.raises(TransportError, match="could not be made"):
            opening.result(TIMEOUT_S)
        assert time.monotonic() - began_s < 4.0


def test_a_side_that_says_a_byte_now_and_then_is_not_waited_for(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    over = threading.Event()

    def drip() -> None:
        sockets[1].sendall(b"N" + (1).to_bytes(2, "little") + (1000).to_bytes(4, "little"))
        while not over.wait(0.05):
            sockets[1].sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    began_s = time.monotonic()
    try:
        with pytest.raises(TransportError):
            Meeting(sockets[0]).get("key")
        assert time.monotonic() - began_s < 10.0
    finally:
        over.set()
        thread.join()


def test_a_source_that_says_nothing_holds_up_no_other_one(serving: CollectiveTransport) -> None:
    address = Address.unpack(serving.address())
    with socket.create_connection((address.host, address.control_port)) as silent:
        silent.sendall(address.token + bytes(8))
        assert silent.recv(1) == b"N"  # its meeting has begun
        source = CollectiveTransport(worker_id=WorkerId("source"))
        payload = torch.ones(10, dtype=torch.uint8)
        source.connect(serving.address()).send(make_header([payload]), [payload]).result(TIMEOUT_S)
        assert serving_still_waits_for(silent)
        source.close()


def serving_still_waits_for(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return True
    return False


def test_host_memory_needs_no_store_that_anybody_may_write_to(serving: CollectiveTransport) -> None:
    address = Address.unpack(serving.address())
    assert address == Address(backend="gloo", host=ANY, control_port=ANY, store_port=0, token=ANY)
