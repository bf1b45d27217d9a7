from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tandem.errors import ConfigError
from tandem.kv.pinned import PinnedArena
from tandem.model.device_io import HOST, CudaIo, HostIo, io_for
from tandem.model.devices import choose_device, device_name
from tests.fake_cuda import NotedCuda
from tests.gpus import need_gpus


def test_what_comes_back_is_waited_for_and_what_goes_is_not() -> None:
    cuda = NotedCuda()
    io = CudaIo(HOST, allocate=cuda.allocate, cuda=cuda)
    there = [io.put(torch.arange(5)), io.put(torch.ones(3, 2))]
    assert cuda.calls == []
    assert io.get(there[0]).tolist() == [0, 1, 2, 3, 4]
    assert cuda.calls == ["wait for what compute had"]
    assert io.get(there[1]).tolist() == [[1.0, 1.0]] * 3


def test_pinned_copies_of_inputs_are_kept_until_the_iteration_is_over_and_then_used_again() -> None:
    cuda = NotedCuda()
    io = CudaIo(HOST, allocate=cuda.allocate, cuda=cuda)
    for _ in range(3):
        there = [io.put(torch.full((1000,), value)) for value in range(4)]
        assert [int(each[0]) for each in there] == [0, 1, 2, 3]
        io.finish()
    assert cuda.calls == ["wait for compute"] * 3
    assert len(cuda.allocated) == 1


def test_an_arena_gives_pieces_that_do_not_overlap_and_grows_for_large_ones() -> None:
    arena = PinnedArena(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    shapes = [(3,), (1 << 20,), (7, 5), (0,), (1 << 19,), (1 << 19,)]
    pieces = [arena.like(torch.empty(shape, dtype=torch.float32)) for shape in shapes]
    for value, piece in enumerate(pieces):
        piece.fill_(value)
    assert all(bool((piece == value).all()) for value, piece in enumerate(pieces))
    assert [tuple(piece.shape) for piece in pieces] == shapes


def test_the_host_moves_nothing() -> None:
    tensor, io = torch.ones(2), io_for(HOST)
    assert isinstance(io, HostIo)
    assert io.put(tensor) is io.get(tensor) is tensor


def cuda_with(count: int) -> SimpleNamespace:
    return SimpleNamespace(
        is_available=lambda: count > 0, device_count=lambda: count, get_device_name=lambda device: "a GPU"
    )


def test_a_gpu_is_taken_where_there_is_one_and_the_configuration_lets_it() -> None:
    assert choose_device("auto", cuda=cuda_with(0)) == HOST
    assert choose_device("auto", cuda=cuda_with(1)) == torch.device("cuda", 0)
    assert choose_device("cpu", cuda=cuda_with(1)) == HOST
    with pytest.raises(ConfigError, match="sees no GPU here") as caught:
        choose_device("cuda", cuda=cuda_with(0))
    assert caught.value.param == "model.device"


def test_a_rank_takes_the_gpu_that_ray_shows_it_or_its_turn_among_those_it_sees() -> None:
    assert [choose_device("cuda", rank=rank, cuda=cuda_with(1)).index for rank in range(3)] == [0, 0, 0]
    assert [choose_device("cuda", rank=rank, cuda=cuda_with(2)).index for rank in range(3)] == [0, 1, 0]


def test_devices_have_names_for_people() -> None:
    assert device_name(HOST) == "cpu"
    assert device_name(torch.device("cuda", 1), cuda=cuda_with(2)) == "cuda:1 (a GPU)"


@pytest.mark.gpu
def test_numbers_come_back_from_a_gpu_as_they_went() -> None:
    (gpu,) = need_gpus()
    io = CudaIo(gpu)
    for _ in range(3):
        with io.current():
            there = io.put(torch.arange(100_000)) * 2
            assert io.get(there).tolist() == list(range(0, 200_000, 2))
            io.finish()
