"""What every transport must do, in one process."""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import wait

import pytest
import torch

from kv_transfer.transport import MessageHeader, Transport
from kv_transfer.transports import make_transport
from tandem.errors import LinkClosed, TransportError
from tandem.prefix_store.slab import Slab
from tandem.types import WorkerId
from tests.kv_transfer.kinds import ON_GPUS, ON_HOST, fill
from tests.kv_transfer.peers import HANDOFF, TIMEOUT_S, RecordingSink, cut, make_header

MIB = 1 << 20


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("num_bytes", [1, 100, 4096, 8191, 8192, 8193, 65_537, MIB + 1])
def test_a_payload_arrives_whole_however_it_is_cut(
    source: Transport, destination: Transport, num_bytes: int
) -> None:
    sink = RecordingSink(destination.allocate(num_bytes))
    destination.serve(sink)
    memory = source.allocate(num_bytes)
    link = source.connect(destination.address())
    cuts = list(itertools.product([None, 777, 99_999], [None, 1000, 100_000]))
    for index, (sent_pieces, placed_pieces) in enumerate(cuts):
        segments = cut(fill(memory), sent_pieces)
        sink.piece_bytes = placed_pieces
        header = make_header(segments)
        link.send(header, segments).result(TIMEOUT_S)
        assert sink.wait_landed(index + 1)[-1] is None
        assert same(torch.cat(segments), torch.cat(sink.segments(header))), (sent_pieces, placed_pieces)


def test_a_payload_of_one_piece_is_sent_as_it_lies(source: Transport, destination: Transport) -> None:
    destination.serve(RecordingSink(destination.allocate(MIB), piece_bytes=1000))
    memory = fill(source.allocate(MIB))
    link = source.connect(destination.address())
    link.send(make_header([memory]), [memory]).result(TIMEOUT_S)
    assert link.stats().num_gathers == 0
    segments = cut(memory, 100)
    link.send(make_header(segments), segments).result(TIMEOUT_S)
    assert link.stats().num_gathers == 1


def test_sixty_four_megabytes_arrive_in_one_message(source: Transport, destination: Transport) -> None:
    sink = RecordingSink(destination.allocate(64 * MIB))
    destination.serve(sink)
    memory = fill(source.allocate(64 * MIB))
    source.connect(destination.address()).send(make_header([memory]), [memory]).result(TIMEOUT_S)
    assert sink.wait_landed(1) == [None]
    assert same(memory, sink.memory)


def test_memory_that_the_transport_did_not_allocate_can_be_sent_and_received_into(
    source: Transport, destination: Transport, devices: tuple[torch.device, torch.device]
) -> None:
    sink = RecordingSink(torch.zeros(3 * MIB, dtype=torch.uint8, device=devices[1]))
    destination.serve(sink)
    memory = fill(torch.zeros(3 * MIB, dtype=torch.uint8, device=devices[0]))
    segments = [memory[:100], memory[100:]]
    source.connect(destination.address()).send(make_header(segments), segments).result(TIMEOUT_S)
    assert sink.wait_landed(1) == [None]
    assert same(memory, sink.memory)


@pytest.mark.parametrize("kind", ON_HOST, indirect=True)
def test_memory_that_was_lent_is_sent_as_it_lies(source: Transport, destination: Transport) -> None:
    slab = Slab(num_slots=8, block_bytes=8192)
    source.lend(slab.fd, torch.from_numpy(slab.everything))
    sink = RecordingSink(destination.allocate(8192))
    destination.serve(sink)
    payload = slab.tensor_of(3)
    payload.copy_(torch.arange(8192) % 251)
    link = source.connect(destination.address())
    link.send(make_header([payload]), [payload]).result(TIMEOUT_S)
    assert sink.wait_landed(1) == [None]
    assert same(sink.memory, payload)
    assert link.stats().num_gathers == 0
    source.close()
    slab.close()


@pytest.mark.parametrize(
    ("kind", "expected"), [("ucx", "off"), ("ucx over posix", "off"), ("ucx over tcp", "on")], indirect=["kind"]
)
def test_ucx_handles_errors_of_its_endpoints_but_where_that_would_cost_it_shared_memory(
    source: Transport, destination: Transport, expected: str
) -> None:
    destination.serve(RecordingSink(destination.allocate(1)))
    assert source.connect(destination.address()).detail.endswith(f"endpoint error handling {expected}")


def test_a_thousand_small_messages_land_once_each(source: Transport, destination: Transport) -> None:
    count, size = 1000, 64
    sink = RecordingSink(destination.allocate(count * size))
    destination.serve(sink)
    pieces = fill(source.allocate(count * size)).split(size)
    link = source.connect(destination.address())
    before = link.stats()
    wait([link.send(make_header([piece], i * size), [piece]) for i, piece in enumerate(pieces)], TIMEOUT_S)
    assert sink.wait_landed(count) == [None] * count
    assert same(torch.cat(pieces), sink.memory)
    assert link.stats().num_messages - before.num_messages == count
    assert link.stats().num_bytes - before.num_bytes == count * size
    assert link.stats().busy_s > 0


def test_many_links_to_one_peer_do_not_disturb_each_other(source: Transport, destination: Transport) -> None:
    count, size = 24, 100_000
    sink = RecordingSink(destination.allocate(count * size))
    destination.serve(sink)
    pieces = fill(source.allocate(count * size)).split(size)
    links = [source.connect(destination.address()) for _ in range(count)]
    wait([link.send(make_header([p], i * size), [p]) for i, (link, p) in enumerate(zip(links, pieces, strict=True))])
    assert sink.wait_landed(count) == [None] * count
    assert same(torch.cat(pieces), sink.memory)


def test_two_transports_send_to_each_other(source: Transport, destination: Transport) -> None:
    sinks = {transport: RecordingSink(transport.allocate(MIB)) for transport in (source, destination)}
    for transport, sink in sinks.items():
        transport.serve(sink)
    for here, there in ((source, destination), (destination, source)):
        memory = fill(here.allocate(MIB))
        here.connect(there.address()).send(make_header([memory]), [memory]).result(TIMEOUT_S)
        assert sinks[there].wait_landed(1) == [None]
        assert same(memory, sinks[there].memory)


@pytest.mark.parametrize("kind", [*ON_HOST, ON_GPUS[0]], indirect=True)
def test_a_transport_can_send_to_itself(source: Transport) -> None:
    sink = RecordingSink(source.allocate(MIB))
    source.serve(sink)
    memory = fill(source.allocate(MIB))
    source.connect(source.address()).send(make_header([memory]), [memory]).result(TIMEOUT_S)
    assert sink.wait_landed(1) == [None]


@pytest.mark.parametrize("num_bytes", [10, MIB])
def test_a_refused_message_frees_the_source_and_is_not_reported(
    source: Transport, destination: Transport, num_bytes: int
) -> None:
    sink = RecordingSink(destination.allocate(num_bytes))
    sink.refused_layers = {1}
    destination.serve(sink)
    memory = fill(source.allocate(num_bytes))
    link = source.connect(destination.address())
    for layer in (0, 1, 2):
        link.send(make_header([memory], layer=layer), [memory]).result(TIMEOUT_S)
    assert sink.wait_landed(2) == [None, None]
    assert sorted(header.layer for header, _ in sink.landings) == [0, 2]


@pytest.mark.parametrize("placed_pieces", [None, 1000])
def test_a_payload_that_does_not_match_its_digest_lands_as_an_error(
    source: Transport, destination: Transport, placed_pieces: int | None
) -> None:
    sink = RecordingSink(destination.allocate(MIB), piece_bytes=placed_pieces)
    destination.serve(sink)
    memory = fill(source.allocate(MIB))
    link = source.connect(destination.address())
    header = make_header([memory])
    memory[12345] ^= 1
    link.send(header, [memory]).result(TIMEOUT_S)
    assert "digest" in str(sink.wait_landed(1)[0])
    link.send(make_header([memory], with_digest=False), [memory]).result(TIMEOUT_S)
    assert sink.wait_landed(2)[1] is None


class RaisingSink(RecordingSink):
    """Raises once in `place`, then once in `landed`, then behaves."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self.failures = ["place", "landed"]

    def place(self, header: MessageHeader) -> list[torch.Tensor] | None:
        if self.failures[:1] == ["place"]:
            raise RuntimeError(self.failures.pop(0))
        super().place(header)
        return self.segments(header)

    def landed(self, header: MessageHeader, error: TransportError | None) -> None:
        if self.failures[:1] == ["landed"]:
            raise RuntimeError(self.failures.pop(0))
        super().landed(header, error)


def test_a_sink_that_raises_is_logged_and_the_link_survives(
    source: Transport, destination: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    sink = RaisingSink(destination.allocate(MIB))
    destination.serve(sink)
    memory = fill(source.allocate(MIB))
    link = source.connect(destination.address())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            link.send(make_header([memory]), [memory]).result(TIMEOUT_S)
        assert sink.wait_landed(1) == [None]
    assert "failed to place" in caplog.text
    assert "failed to take note" in caplog.text


def test_a_sink_that_places_too_little_is_told_so(source: Transport, destination: Transport) -> None:
    sink = RecordingSink(destination.allocate(100))
    destination.serve(sink)
    memory = fill(source.allocate(200))
    source.connect(destination.address()).send(make_header([memory]), [memory]).result(TIMEOUT_S)
    assert "the header says 200" in str(sink.wait_landed(1)[0])


@pytest.mark.parametrize("address", [b"", b"nonsense", b"tandem-shm/1/", b"tandem-ucx/2/" + b"x" * 60])
def test_connecting_to_a_malformed_address_fails(source: Transport, address: bytes) -> None:
    with pytest.raises(TransportError):
        source.connect(address)


def test_connecting_to_a_closed_transport_fails(
    name: str, source: Transport, devices: tuple[torch.device, torch.device]
) -> None:
    gone = make_transport(name, worker_id=WorkerId("gone"), device=devices[1])
    gone.serve(RecordingSink(torch.zeros(1, dtype=torch.uint8)))
    address = gone.address()
    gone.close()
    with pytest.raises(TransportError):
        source.connect(address)


def test_serving_twice_is_an_error(destination: Transport) -> None:
    sink = RecordingSink(destination.allocate(1))
    destination.serve(sink)
    with pytest.raises(TransportError):
        destination.serve(sink)


@pytest.mark.parametrize(
    "segment",
    [torch.zeros(9, dtype=torch.uint8), torch.zeros(10, dtype=torch.int8), torch.zeros(20, dtype=torch.uint8)[::2]],
    ids=["too short", "not bytes", "not contiguous"],
)
def test_sending_what_is_not_the_headers_bytes_fails_the_future(
    source: Transport, destination: Transport, segment: torch.Tensor
) -> None:
    destination.serve(RecordingSink(destination.allocate(10)))
    header = make_header([torch.zeros(10, dtype=torch.uint8)])
    with pytest.raises(TransportError):
        source.connect(destination.address()).send(header, [segment]).result(TIMEOUT_S)


def test_sending_on_a_closed_link_fails_with_link_closed(source: Transport, destination: Transport) -> None:
    destination.serve(RecordingSink(destination.allocate(10)))
    memory = source.allocate(10)
    link = source.connect(destination.address())
    link.close()
    link.close()
    with pytest.raises(LinkClosed):
        link.send(make_header([memory]), [memory]).result(TIMEOUT_S)


def test_sending_on_a_closed_transport_fails_with_link_closed(source: Transport, destination: Transport) -> None:
    destination.serve(RecordingSink(destination.allocate(10)))
    memory = source.allocate(10)
    link = source.connect(destination.address())
    source.close()
    source.close()
    with pytest.raises(LinkClosed):
        link.send(make_header([memory]), [memory]).result(TIMEOUT_S)
    with pytest.raises(LinkClosed):
        source.connect(destination.address())


def test_closing_a_transport_ends_every_unfinished_send(source: Transport, destination: Transport) -> None:
    destination.serve(RecordingSink(destination.allocate(4 * MIB)))
    memory = fill(source.allocate(4 * MIB))
    link = source.connect(destination.address())
    sends = [link.send(make_header([memory], with_digest=False), [memory]) for _ in range(100)]
    source.close()
    errors = [send.exception(TIMEOUT_S) for send in sends]
    assert all(error is None or isinstance(error, LinkClosed) for error in errors)
    assert isinstance(errors[-1], LinkClosed)


@pytest.mark.parametrize("placed_pieces", [None, 100_000])
def test_nothing_is_written_after_quiesce(
    source: Transport, destination: Transport, placed_pieces: int | None
) -> None:
    sink = RecordingSink(destination.allocate(8 * MIB), piece_bytes=placed_pieces)
    destination.serve(sink)
    memory = fill(source.allocate(8 * MIB))
    link = source.connect(destination.address())
    sends = [link.send(make_header([memory], with_digest=False), [memory]) for _ in range(40)]
    sink.wait_placed(3)
    sink.refuse()
    destination.quiesce(HANDOFF).result(TIMEOUT_S)
    assert len(sink.landings) == len(sink.placed)
    sink.memory.fill_(0)
    wait(sends, TIMEOUT_S)
    destination.quiesce(HANDOFF).result(TIMEOUT_S)
    assert not sink.memory.any()


def test_quiesce_of_an_unknown_handoff_resolves_even_before_serving(destination: Transport) -> None:
    destination.quiesce(HANDOFF).result(TIMEOUT_S)
