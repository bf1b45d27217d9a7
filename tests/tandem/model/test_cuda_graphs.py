from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from tandem.model.cuda_graphs import NUM_WARM_UPS, CudaCapturer, Graph, GraphLadder, ladder, rung


class RecordedGraph:
    """Runs again what was launched while it was captured."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Recorder:
    """In place of CUDA: `launch` goes to the graph that is being captured, else to the device."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.run_eagerly: list[int] = []
        self._open: RecordedGraph | None = None

    def launch(self, size: int) -> None:
        (self.run_eagerly if self._open is None else self._open.launched).append(size)

    def new(self) -> Graph:
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    def capture(self, graph: Graph) -> AbstractContextManager[None]:
        return self._capture(graph)

    @contextmanager
    def _capture(self, graph: Graph) -> Iterator[None]:
        assert isinstance(graph, RecordedGraph)
        self._open = graph
        yield
        self._open = None


def test_a_ladder_is_dense_where_batches_are_small_and_ends_at_the_largest() -> None:
    assert ladder(1) == (1,)
    assert ladder(3) == (1, 2, 3)
    assert ladder(30) == (1, 2, 4, 8, 16, 24, 30)


def test_a_batch_goes_to_the_smallest_rung_that_holds_it() -> None:
    sizes = ladder(32)
    assert [rung(sizes, n) for n in (1, 3, 4, 5, 9, 32, 33)] == [1, 4, 4, 8, 16, 32, None]


def test_a_size_is_warmed_up_and_captured_once_and_then_only_replayed() -> None:
    recorder = Recorder()
    graphs = GraphLadder(recorder.launch, (1, 2, 4), recorder)
    assert [graphs.replay(n) for n in (3, 4, 3)] == [4, 4, 4]
    assert recorder.run_eagerly == [4] * NUM_WARM_UPS
    assert [(g.launched, g.num_replays) for g in recorder.graphs] == [([4], 3)]


def test_a_batch_beyond_the_ladder_is_left_to_the_caller() -> None:
    recorder = Recorder()
    assert GraphLadder(recorder.launch, (1, 2), recorder).replay(3) is None
    assert not recorder.graphs


@pytest.mark.gpu
def test_a_captured_iteration_reads_its_inputs_anew() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    inputs, outputs = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def run(size: int) -> None:
        outputs[:size] = inputs[:size] * 2

    graphs = GraphLadder(run, (2, 4), CudaCapturer())
    for value in (1.0, 5.0):
        inputs.fill_(value)
        assert graphs.replay(3) == 4
        assert outputs.tolist() == [2 * value] * 4
