"""Memory of GPUs over UCX: the order of waits, which a CPU can show, and whole transfers, which need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kv_transfer import device_memory
from kv_transfer.digest import digest
from kv_transfer.ucx import UcxTransport
from tandem.errors import TransportError
from tandem.types import WorkerId
from tests.gpus import need_gpus
from tests.kv_transfer.peers import HANDOFF, TIMEOUT_S, RecordingSink, cut, make_header

MIB = 1 << 20
GPU = torch.device("cuda", 0)


class FakeCuda:
    """Notes what CUDA is asked, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"set {device}")

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, str(device))

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "its own")

    def set_stream(self, stream: FakeStream) -> None:
        self.calls.append(f"queue on stream of {stream.name}")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(f"set {device}")
        yield
        self.calls.append("set the one before")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.set_stream(stream)
        yield
        self.calls.append("queue on the stream before")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def synchronize(self) -> None:
        self.cuda.calls.append(f"wait for stream of {self.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.cuda.calls.append(f"record on stream of {stream.name}")

    def synchronize(self) -> None:
        self.cuda.calls.append("wait for event")


def test_the_producers_stream_is_marked_at_once_and_waited_for_later() -> None:
    cuda = FakeCuda()
    wait_written = device_memory.mark(GPU, cuda)
    assert cuda.calls == ["record on stream of cuda:0"]
    wait_written()
    assert cuda.calls == ["record on stream of cuda:0", "wait for event"]


def test_the_transports_thread_gets_the_gpus_context() -> None:
    cuda = FakeCuda()
    device_memory.prepare_thread(GPU, cuda)
    assert cuda.calls == ["set cuda:0", "wait for stream of cuda:0"]


def test_a_transports_own_thread_does_not_queue_behind_the_engine() -> None:
    cuda = FakeCuda()
    device_memory.take_thread(GPU, cuda)
    assert cuda.calls == ["set cuda:0", "wait for stream of cuda:0", "queue on stream of its own"]


def test_a_stream_of_its_own_is_left_again() -> None:
    cuda = FakeCuda()
    with device_memory.own_stream(GPU, cuda):
        device_memory.finish(GPU, cuda)
    assert cuda.calls == [
        "set cuda:0",
        "queue on stream of its own",
        "wait for stream of cuda:0",
        "queue on the stream before",
        "set the one before",
    ]


def test_host_memory_asks_nothing_of_cuda() -> None:
    cuda, host = FakeCuda(), torch.device("cpu")
    device_memory.take_thread(host, cuda)
    device_memory.mark(host, cuda)()
    with device_memory.own_stream(host, cuda):
        device_memory.finish(host, cuda)
    assert cuda.calls == []


def test_tensors_are_gathered_scattered_and_digested_as_host_memory_is() -> None:
    whole = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    gathered = torch.empty_like(whole)
    device_memory.gather(list(whole.split(300)), gathered)
    assert torch.equal(gathered, whole)
    scattered = torch.empty_like(whole)
    assert device_memory.scatter(list(scattered.split(77)), gathered, with_digest=True) == digest([whole])
    assert torch.equal(scattered, whole)
    assert device_memory.digest_memory(list(whole.split(300))) == digest([whole])


def test_memory_that_is_neither_the_hosts_nor_a_gpus_is_refused() -> None:
    with pytest.raises(TransportError, match="meta"):
        device_memory.as_memory([torch.empty(10, dtype=torch.uint8, device="meta")], 10)


@pytest.fixture
def ends() -> Iterator[tuple[UcxTransport, UcxTransport]]:
    need_gpus()
    source, destination = (UcxTransport(worker_id=WorkerId(name), device=GPU) for name in ("source", "destination"))
    yield source, destination
    source.close()
    destination.close()


def _fill(memory: torch.Tensor) -> torch.Tensor:
    return memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [1, 8191, 8193, MIB + 1, 64 * MIB])
@pytest.mark.parametrize(("sent_pieces", "placed_pieces"), [(None, None), (99_999, None), (None, 100_000)])
def test_a_gpus_memory_arrives_whole_however_it_is_cut(
    ends: tuple[UcxTransport, UcxTransport], num_bytes: int, sent_pieces: int | None, placed_pieces: int | None
) -> None:
    source, destination = ends
    sink = RecordingSink(destination.allocate(num_bytes), piece_bytes=placed_pieces)
    destination.serve(sink)
    segments = cut(_fill(source.allocate(num_bytes)), sent_pieces)
    header = make_header(segments)
    source.connect(destination.address()).send(header, segments).result(TIMEOUT_S)
    assert sink.wait_landed(1) == [None]
    assert torch.equal(torch.cat(segments), torch.cat(sink.segments(header)))


@pytest.mark.gpu
@pytest.mark.parametrize("piece_bytes", [None, 100_000])
def test_no_byte_of_a_gpus_payload_passes_through_a_tensor_of_the_host(
    ends: tuple[UcxTransport, UcxTransport], monkeypatch: pytest.MonkeyPatch, piece_bytes: int | None
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("a copy to the host")

    source, destination = ends
    sink = RecordingSink(destination.allocate(8 * MIB), piece_bytes=piece_bytes)
    destination.serve(sink)
    segments = cut(_fill(source.allocate(8 * MIB)), piece_bytes)
    header = make_header(segments, with_digest=False)
    link = source.connect(destination.address())
    with monkeypatch.context() as patch:
        for name in ("cpu", "numpy", "tolist"):
            patch.setattr(torch.Tensor, name, refuse)
        link.send(header, segments).result(TIMEOUT_S)
        assert sink.wait_landed(1) == [None]
    assert torch.equal(torch.cat(segments), torch.cat(sink.segments(header)))


@pytest.mark.gpu
def test_what_a_gpu_still_computes_is_sent_as_computed(ends: tuple[UcxTransport, UcxTransport]) -> None:
    source, destination = ends
    sink = RecordingSink(destination.allocate(MIB))
    destination.serve(sink)
    memory = source.allocate(MIB)
    link = source.connect(destination.address())
    busy: Any = torch.randn(4096, 4096, device=GPU)
    for _ in range(50):
        busy = busy @ busy
    memory.fill_(7)
    link.send(make_header([memory], with_digest=False), [memory]).result(TIMEOUT_S)
    assert sink.wait_landed(1) == [None]
    assert bool((sink.memory == 7).all())


@pytest.mark.gpu
def test_nothing_is_written_to_a_gpu_after_quiesce(ends: tuple[UcxTransport, UcxTransport]) -> None:
    source, destination = ends
    sink = RecordingSink(destination.allocate(8 * MIB))
    destination.serve(sink)
    memory = _fill(source.allocate(8 * MIB))
    link = source.connect(destination.address())
    sends = [link.send(make_header([memory], with_digest=False), [memory]) for _ in range(40)]
    sink.wait_placed(3)
    sink.refuse()
    destination.quiesce(HANDOFF).result(TIMEOUT_S)
    sink.memory.zero_()
    for send in sends:
        send.result(TIMEOUT_S)
    assert not bool(sink.memory.any())
