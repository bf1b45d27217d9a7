"""`tandem cache` by its command line, against a real router over a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cache_commands import COMMANDS, PIN_EXAMPLE
from cluster.cli import app
from cluster.embedded_redis import EmbeddedRedis
from cluster.store_host import StoreHost
from tandem.config import ModelConfig
from tests.cached_router import absent_workers, cached_router
from tests.router_harness import tokenizer
from tests.store_nodes import BLOCK_BYTES, chain, client_of, put, run, store_node

TOKENS = ["--tokens", "0,1,2", "--salt", "0"]
"""The first three blocks of `chain(n)`."""

Tandem = Callable[..., Awaitable[tuple[int, str, str]]]
Body = Callable[[Tandem, StoreHost], Awaitable[None]]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    tokenizer()  # takes seconds the first time, in which no store would be heard
    redis = EmbeddedRedis()
    asyncio.run(redis.start())
    yield redis.url
    redis.stop()


def invoke(arguments: Sequence[str], typed: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["cache", *arguments], input=typed, env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def tandem_at(endpoint: str) -> Tandem:
    async def tandem(*arguments: str, typed: str | None = None) -> tuple[int, str, str]:
        return await asyncio.to_thread(invoke, [*arguments, "--endpoint", endpoint], typed)

    return tandem


def with_cache(redis_url: str, body: Body) -> None:
    """A node with four blocks, and a router whose workers do not answer."""

    async def test() -> None:
        async with (
            store_node(redis_url) as host,
            client_of(host) as client,
            cached_router(redis_url, absent_workers()) as server,
        ):
            await put(client, chain(4))
            await body(tandem_at(server.grpc_address), host)

    run(test)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_an_example_and_the_options_of_access(name: str) -> None:
    status, out, _ = invoke([name, "--help"])
    assert status == 0
    assert f"Example: tandem cache {name}" in out
    assert all(option in out for option in ("--endpoint", "--tls-ca-file", "--api-key", "--json"))


def test_the_group_has_a_page_of_its_commands() -> None:
    _, out, _ = invoke(["--help"])
    assert all(name in out for name in COMMANDS)


def test_stats_show_tiers_and_workers_as_tables_or_as_data(redis_url: str) -> None:
    async def body(tandem: Tandem, host: StoreHost) -> None:
        status, out, _ = await tandem("stats")
        assert status == 0
        (row,) = [line.split() for line in out.splitlines() if line.startswith("n1") and "host" in line]
        assert row[:3] == ["n1", "host", "4/16"]
        assert "prefill-0" in out
        assert "unreachable" in out
        status, out, _ = await tandem("stats", "--json")
        assert json.loads(out)["nodes"][0]["tiers"][0]["num_bytes"] == 4 * BLOCK_BYTES

    with_cache(redis_url, body)


def test_a_listed_prefix_is_pinned_and_unpinned_by_its_name(redis_url: str) -> None:
    async def body(tandem: Tandem, host: StoreHost) -> None:
        _, out, _ = await tandem("list", "--json")
        (prefix,) = json.loads(out)["prefixes"]
        assert prefix["block"] == chain(4)[3].hex()
        assert await tandem("pin", "--block", prefix["block"]) == (0, "n1: pinned 4 blocks\n", "")
        _, out, _ = await tandem("list")
        assert prefix["block"] in out
        assert "yes" in out
        assert await tandem("unpin", "--block", prefix["block"]) == (0, "n1: unpinned 4 blocks\n", "")

    with_cache(redis_url, body)


def test_token_ids_and_a_salt_name_a_prefix_that_a_clear_spares(redis_url: str) -> None:
    async def body(tandem: Tandem, host: StoreHost) -> None:
        assert await tandem("pin", *TOKENS) == (0, "n1: pinned 3 of 3 blocks\n", "")
        status, out, err = await tandem("clear", "--yes")
        assert status == 1  # the workers do not answer
        assert out == "n1: forgot 1 blocks\n"
        assert err.startswith("tandem: not done everywhere: ")
        assert "prefill-0: " in err
        assert host.store.host.match(chain(4)) == 3

    with_cache(redis_url, body)


def test_clear_asks_and_takes_no_for_an_answer(redis_url: str) -> None:
    async def body(tandem: Tandem, host: StoreHost) -> None:
        for typed in ("n\n", ""):
            status, _, err = await tandem("clear", typed=typed)
            assert status == 1
            assert "Forget everything" in err
            assert host.store.host.match(chain(4)) == 4
        await tandem("clear", typed="y\n")
        assert host.store.host.match(chain(4)) == 0

    with_cache(redis_url, body)


def test_verify_ends_with_1_where_a_block_is_damaged(redis_url: str) -> None:
    async def body(tandem: Tandem, host: StoreHost) -> None:
        assert await tandem("verify") == (0, "n1: read 4 blocks, all whole\n", "")
        held = host.store.host.borrow(chain(4))
        host.store.host.slab.bytes_of(held[3].slot)[0] ^= 1
        host.store.host.give_back(held)
        assert await tandem("verify") == (1, "n1: read 4 blocks, 1 damaged, removed\n", "")

    with_cache(redis_url, body)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "in one way: its text, --tokens or --block"),
        (["text", "--tokens", "1"], 2, "in one way"),
        (["--tokens", "1,x"], 2, "token ids with commas between them, got '1,x'"),
        (["--block", "xyz"], 1, "32 hex digits"),
        (["--block", "ab" * 16], 1, "no node's store has the first block of this prefix"),
    ],
)
def test_what_names_no_prefix_is_one_line(
    redis_url: str, arguments: list[str], status: int, message: str
) -> None:
    async def body(tandem: Tandem, host: StoreHost) -> None:
        ended, out, err = await tandem("pin", *arguments)
        assert (ended, out, len(err.splitlines())) == (status, "", 1)
        assert message in err

    with_cache(redis_url, body)


def test_a_cluster_without_stores_says_what_to_set(redis_url: str) -> None:
    async def test() -> None:
        async with cached_router(redis_url, absent_workers(), has_stores=False) as server:
            tandem = tandem_at(server.grpc_address)
            status, out, _ = await tandem("stats")
            assert status == 0
            assert out.startswith("this cluster keeps prefixes in its workers' own memory only: set prefix_store.host")
            assert "decode-0" in out
            status, out, err = await tandem("list")
            assert (status, out) == (1, "")
            assert "set prefix_store.host_bytes" in err

    run(test)


def test_an_absent_router_is_one_line_that_says_what_to_do() -> None:
    status, out, err = invoke(["stats", "--endpoint", "127.0.0.1:1"])
    assert (status, out) == (1, "")
    assert err.splitlines() == [
        "tandem: no router answers at 127.0.0.1:1; start one with `tandem up` or give --endpoint HOST:PORT"
    ]


def test_a_prompt_is_read_from_a_pipe(redis_url: str) -> None:
    async def body(tandem: Tandem, host: StoreHost) -> None:
        ended, _, err = await tandem("pin", "-", typed="A text that nobody has asked for yet.")
        assert ended == 1
        assert "no node's store has the first block" in err

    with_cache(redis_url, body)


def test_the_example_of_a_pin_fills_a_block() -> None:
    block_size = ModelConfig().block_size
    assert len(tokenizer().encode(PIN_EXAMPLE)) >= block_size
    docs = (Path(__file__).parents[2] / "docs" / "prefix-store.md").read_text()
    assert f"tandem cache pin '{PIN_EXAMPLE}' --salt tenant-a" in docs
