"""Which benchmarks `make bench` runs: all that there are."""

from __future__ import annotations

from pathlib import Path

from benchmarks.__main__ import NAMES, REPLAYS, to_run

DIRECTORY = Path(__file__).parents[2] / "benchmarks"


def test_every_module_that_is_a_benchmark_is_run() -> None:
    runs_alone = {
        path.stem
        for path in DIRECTORY.glob("*.py")
        if "--json" in (source := path.read_text()) and 'if __name__ == "__main__"' in source
    }
    assert runs_alone - {"__main__"} == set(NAMES)


def test_those_that_replay_a_trace_are_left_out_where_it_is_not_unless_they_are_named() -> None:
    assert to_run([], has_trace=True) == list(NAMES)
    assert to_run([], has_trace=False) == [name for name in NAMES if name not in REPLAYS]
    assert to_run(["eviction"], has_trace=False) == ["eviction"]
