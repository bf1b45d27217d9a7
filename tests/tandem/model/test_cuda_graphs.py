from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tandem.model.cuda_graphs import NUM_WARM_UPS, CudaCapturer, Graph, GraphLadder
from tests.gpus import need_gpus


class RecordedGraph:
    """Notes how often it is replayed."""

    def __init__(self, launched: list[int]) -> None:
        self.launched = launched
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Recorder:
    """In place of CUDA: `launch` goes to the graph that is being captured, else to the device."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.run_eagerly: list[int] = []
        self._launched = self.run_eagerly

    def launch(self, size: int) -> None:
        self._launched.append(size)

    def capture(self, run: Callable[[], None]) -> Graph:
        self._launched = []
        run()
        self.graphs.append(RecordedGraph(self._launched))
        self._launched = self.run_eagerly
        return self.graphs[-1]


def test_a_size_is_warmed_up_and_captured_once_and_then_only_replayed() -> None:
    recorder = Recorder()
    graphs = GraphLadder(recorder.launch, (1, 2, 4), recorder)
    for _ in range(3):
        graphs.replay(4)
    assert recorder.run_eagerly == [4] * NUM_WARM_UPS
    assert [(g.launched, g.num_replays) for g in recorder.graphs] == [([4], 3)]
    graphs.replay(1)
    assert graphs.num_captured == 2


class FakeCuda:
    """Notes with what graphs are made."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def graph_pool_handle(self) -> str:
        self.calls.append("pool")
        return "the pool"

    def CUDAGraph(self) -> RecordedGraph:
        return RecordedGraph([])

    @contextmanager
    def graph(self, graph: RecordedGraph, *, pool: str, capture_error_mode: str) -> Iterator[None]:
        self.calls.append(f"begin in {pool}, {capture_error_mode}")
        yield
        self.calls.append("end")


def test_graphs_share_one_pool_and_bear_with_what_other_threads_do() -> None:
    cuda = FakeCuda()
    capturer = CudaCapturer(cuda)
    for _ in range(2):
        capturer.capture(lambda: cuda.calls.append("launch"))
    assert cuda.calls == ["pool", *["begin in the pool, thread_local", "launch", "end"] * 2]


@pytest.mark.gpu
def test_a_captured_iteration_reads_its_inputs_anew() -> None:
    need_gpus()
    inputs, outputs = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def run(size: int) -> None:
        outputs[:size] = inputs[:size] * 2

    graphs = GraphLadder(run, (2, 4), CudaCapturer())
    for value in (1.0, 5.0):
        inputs.fill_(value)
        graphs.replay(4)
        assert outputs.tolist() == [2 * value] * 4
