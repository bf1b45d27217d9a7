"""Sizes from a file: what it may hold, and that only its changes count, over a real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis

from cluster.embedded_redis import EmbeddedRedis
from cluster.sizes_file import CATCH_UP_S, SizesFile, changed_sizes, read_sizes
from tandem.errors import ConfigError
from tandem.pool_state import FileSizes, PoolState
from tandem.types import Role
from tests.metadata import state_of, valkey
from tests.router_harness import runs_async

P, D = Role.PREFILL, Role.DECODE


def sizes(prefill: int, decode: int, generation: int = 0) -> FileSizes:
    return FileSizes(sizes={P: prefill, D: decode}, generation=generation)


@dataclass
class Bench:
    """A file, and the desired state that it is written to."""

    path: Path
    server: EmbeddedRedis
    state: PoolState
    notes: list[str]
    now_s: float = 0.0

    def write(self, prefill: int, decode: int, generation: int = 0) -> None:
        self.path.write_text(f"prefill: {prefill}\ndecode: {decode}\ngeneration: {generation}\n")

    def follower(self, is_acting: Callable[[], bool] = lambda: True) -> SizesFile:
        return SizesFile(
            self.path, self.state, is_acting=is_acting, note=self.notes.append, clock=lambda: self.now_s
        )

    async def desired(self) -> tuple[int | None, int | None]:
        found = await self.state.get()
        return found.prefill and found.prefill.size, found.decode and found.decode.size


@asynccontextmanager
async def benches(tmp_path: Path) -> AsyncIterator[Bench]:
    async with valkey() as server, state_of(server) as state:
        yield Bench(path=tmp_path / "sizes.yaml", server=server, state=state, notes=[])


def test_a_file_says_sizes_and_perhaps_a_generation(tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text("prefill: 3\ndecode: 0\n")
    assert read_sizes(path) == sizes(3, 0)
    path.write_text('{"prefill": 3, "decode": 2, "generation": 7}')
    assert read_sizes(path) == sizes(3, 2, 7)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read"),
        ("", "must be like 'prefill: 3'"),
        ("prefill: 3", "decode must be 0 to 1024, got None"),
        ("prefill: -1\ndecode: 1", "prefill must be 0 to 1024, got -1"),
        ("prefill: 1\ndecode: 2000", "decode must be 0 to 1024, got 2000"),
        ("prefill: true\ndecode: 1", "prefill must be 0 to 1024, got True"),
        ("prefill: 1\ndecode: 1\ndecod: 2", "has decod; known are prefill, decode, generation"),
        ("prefill: [", "is not YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_says_why(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "sizes.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_sizes(path)


@pytest.mark.parametrize(
    ("last", "said", "changed"),
    [
        (None, sizes(1, 2), {P: 1, D: 2}),
        (sizes(1, 2), sizes(1, 2), {}),
        (sizes(1, 2), sizes(1, 3), {D: 3}),
        (sizes(1, 2, 5), sizes(1, 3, 6), {D: 3}),
        (sizes(1, 2, 5), sizes(1, 3, 5), {D: 3}),
        (sizes(1, 2, 5), sizes(1, 3, 4), {D: 3}),
    ],
)
def test_only_what_the_file_changed_counts(
    last: FileSizes | None, said: FileSizes, changed: dict[Role, int]
) -> None:
    assert changed_sizes(last, said) == changed


@runs_async
async def test_a_change_of_one_pool_in_the_file_leaves_what_was_asked_of_the_other_by_hand(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        file = bench.follower()
        bench.write(1, 2, 1)
        await file.look()
        assert await bench.desired() == (1, 2)
        await bench.state.set_size(P, 5)
        await file.look()
        assert await bench.desired() == (5, 2)
        bench.write(1, 4, 2)
        await file.look()
        assert await bench.desired() == (5, 4)
        assert bench.notes[-1] == "the sizes file asks for decode=4 (generation 2)"
        bench.write(2, 4, 3)
        await file.look()
        assert await bench.desired() == (2, 4)


@runs_async
async def test_a_new_controller_does_not_undo_what_was_asked_by_hand(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        bench.write(1, 2, 1)
        await bench.follower().look()
        await bench.state.set_size(D, 7)
        await bench.follower().look()
        assert await bench.desired() == (1, 7)


@runs_async
async def test_a_controller_whose_file_lags_behind_does_not_bring_old_sizes_back(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        bench.write(1, 3, 2)
        await bench.follower().look()
        bench.write(1, 2, 1)
        await bench.follower().look()
        assert await bench.desired() == (1, 3)


@runs_async
async def test_a_rollback_brings_old_sizes_back_also_when_redis_is_away_at_first(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        file = bench.follower()
        bench.write(1, 3, 2)
        await file.look()
        bench.write(1, 2, 1)
        with Redis.from_url(bench.server.url) as redis:
            redis.config_set("maxmemory", 1)  # writes are refused
            await file.look()
            assert await bench.desired() == (1, 3)
            redis.config_set("maxmemory", 0)
        await file.look()
        assert await bench.desired() == (1, 2)
        await bench.state.set_size(D, 7)
        await file.look()
        assert await bench.desired() == (1, 7)


@runs_async
async def test_a_rollback_that_no_controller_saw_counts_when_the_file_can_be_no_late_copy(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        bench.write(1, 3, 2)
        await bench.follower().look()
        bench.write(1, 2, 1)
        file = bench.follower()
        await file.look()
        bench.now_s = CATCH_UP_S - 1
        await file.look()
        assert await bench.desired() == (1, 3)
        bench.now_s = CATCH_UP_S
        await file.look()
        assert await bench.desired() == (1, 2)


@runs_async
async def test_a_redis_that_lost_its_memory_is_told_what_the_file_said_and_no_size_is_undone(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        file = bench.follower()
        bench.write(1, 2, 1)
        await file.look()
        with Redis.from_url(bench.server.url) as redis:
            redis.flushall()
        await bench.state.initialise(D, 7)  # as a controller does with what it last knew
        await file.look()
        assert (await bench.desired())[1] == 7
        assert await bench.state.file_sizes() == sizes(1, 2, 1)


@runs_async
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_followed_again_later(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        file = bench.follower()
        bench.write(1, 2)
        await file.look()
        for text in ("decode: x", "{"):
            bench.path.write_text(text)
            await file.look()
        assert await bench.desired() == (1, 2)
        bench.write(1, 3)
        await file.look()
        assert await bench.desired() == (1, 3)


@runs_async
async def test_the_end_of_the_cluster_forgets_the_file_too(tmp_path: Path) -> None:
    async with benches(tmp_path) as bench:
        bench.write(1, 2)
        await bench.follower().look()
        await bench.state.clear()
        assert await bench.state.file_sizes() is None
