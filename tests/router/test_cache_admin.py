"""What operators ask of the caches, over gRPC: a real router, real stores, a real Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.access import Access
from cluster.cache_client import CacheClient
from cluster.embedded_redis import EmbeddedRedis
from cluster.store_host import StoreHost
from router.naming import PromptNames
from tandem.errors import InvalidRequest, RequestNotFound, TandemError, Unauthenticated, WorkerUnavailable
from tandem.prefix_store.registry import StoreRegistry
from tandem.rpc.tandem.v1.inference_pb2 import PrefixSelector, TokenIds
from tests.cached_router import NOBODY, absent_workers, cached_router
from tests.router_harness import tokenizer
from tests.store_nodes import BLOCK_BYTES, CLUSTER, FINGERPRINT, chain, client_of, put, run, store_node, until

TEXT = "You are a helpful assistant. Answer in one sentence."


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    tokenizer()  # takes seconds the first time, in which no store would be heard
    redis = EmbeddedRedis()
    asyncio.run(redis.start())
    yield redis.url
    redis.stop()


@asynccontextmanager
async def admin_of(redis_url: str, *, block_size: int = 1, **router: Any) -> AsyncIterator[CacheClient]:
    """A client of a router with two workers that do not answer."""
    async with (
        cached_router(redis_url, absent_workers(block_size=block_size), **router) as server,
        CacheClient(Access(endpoint=server.grpc_address)) as client,
    ):
        yield client


def with_one_store(
    redis_url: str, body: Callable[[StoreHost, CacheClient], Coroutine[Any, Any, None]], **changes: Any
) -> None:
    async def test() -> None:
        async with store_node(redis_url, **changes) as host, admin_of(redis_url) as admin:
            await body(host, admin)

    run(test)


def tokens(num_tokens: int, salt: str = "0") -> PrefixSelector:
    """The prompt whose blocks `chain` names, with the seed as its salt."""
    return PrefixSelector(token_ids=TokenIds(ids=range(num_tokens)), cache_salt=salt)


async def fails(kind: type[TandemError], call: Coroutine[Any, Any, Any], match: str) -> None:
    with pytest.raises(kind, match=match):
        await call


def test_the_counts_have_every_tier_of_every_node_and_say_which_worker_is_silent(
    redis_url: str, tmp_path: Path
) -> None:
    async def test() -> None:
        async with (
            store_node(redis_url, "a", disk=tmp_path) as a,
            store_node(redis_url, "b") as b,
            client_of(a) as client,
            admin_of(redis_url) as admin,
        ):
            await put(client, chain(3))
            (await client.acquire(chain(4))).release()
            await until(lambda: a.store.disk is not None and a.store.disk.match(chain(3)) == 3)
            stats = await admin.stats()
            assert (stats.has_stores, stats.is_enabled) == (True, True)
            assert [node.node for node in stats.nodes] == ["a", "b"]
            host, disk, remote = stats.nodes[0].tiers
            assert (host.num_blocks, host.num_hits, host.num_misses) == (3, 3, 1)
            assert (host.num_bytes, host.capacity_bytes) == (3 * BLOCK_BYTES, 16 * BLOCK_BYTES)
            assert (disk.tier, disk.num_blocks, remote.tier) == ("disk", 3, "remote")
            assert stats.nodes[0].num_clients == 1
            assert [tier.tier for tier in stats.nodes[1].tiers] == ["host", "remote"]
            assert len(b.store.host) == 0
            silent = [(w.worker_id, w.state, w.HasField("device")) for w in stats.workers]
            assert silent == [("decode-0", "unreachable", False), ("prefill-0", "unreachable", False)]

    run(test)


def test_prefixes_are_listed_once_by_their_last_block_with_the_uses_of_all_nodes(redis_url: str) -> None:
    async def test() -> None:
        async with (
            store_node(redis_url, "a") as a,
            store_node(redis_url, "b") as b,
            client_of(a) as on_a,
            client_of(b) as on_b,
            admin_of(redis_url) as admin,
        ):
            for client in (on_a, on_b):
                await put(client, chain(4), tenant="secret")
                (await client.acquire(chain(4))).release()
            await put(on_a, chain(2, seed=1))
            (await on_a.acquire(chain(1, seed=1))).release()
            listed = (await admin.hottest(10)).prefixes
            shown = [(p.block, p.num_blocks, p.num_tokens, p.num_uses, list(p.nodes)) for p in listed]
            assert shown == [
                (chain(4)[3].hex(), 4, 4, 2, ["a", "b"]),
                (chain(1, seed=1)[0].hex(), 1, 1, 1, ["a"]),
                (chain(2, seed=1)[1].hex(), 2, 2, 0, ["a"]),
            ]
            assert listed[0].tenant == hashlib.blake2b(b"secret", digest_size=8).hexdigest()
            assert listed[1].tenant == ""
            assert len((await admin.hottest(1)).prefixes) == 1

    run(test)


def test_a_prompt_is_pinned_where_it_is_and_outlives_a_clear_until_it_is_unpinned(redis_url: str) -> None:
    async def test() -> None:
        async with (
            store_node(redis_url, "a") as a,
            store_node(redis_url, "b"),
            client_of(a) as client,
            admin_of(redis_url) as admin,
        ):
            await put(client, chain(5))
            answer = await admin.pin(tokens(3))
            assert [(n.node, n.num_blocks) for n in answer.nodes] == [("a", 3), ("b", 0)]
            assert answer.num_blocks == 3
            cleared = await admin.clear()
            assert [(n.node, n.num_blocks, n.error) for n in cleared.nodes] == [("a", 2, ""), ("b", 0, "")]
            assert all(worker.error for worker in cleared.workers)
            assert (await client.lookup(chain(5))).num_host == 3
            assert [n.num_blocks for n in (await admin.unpin(tokens(5))).nodes] == [3, 0]
            assert (await admin.clear()).nodes[0].num_blocks == 3
            a.store.host.check_invariants()

    run(test)


def test_a_text_is_pinned_by_the_names_that_its_requests_have(redis_url: str) -> None:
    async def test() -> None:
        ids = tokenizer().encode(TEXT)
        names = PromptNames(ids, salt="s").of(FINGERPRINT, 4).blocks
        async with (
            store_node(redis_url) as host,
            client_of(host) as client,
            admin_of(redis_url, block_size=4) as admin,
        ):
            assert await put(client, names, tenant="s") == len(ids) // 4
            answer = await admin.pin(PrefixSelector(text=TEXT, cache_salt="s"))
            assert (answer.nodes[0].num_blocks, answer.num_blocks) == (len(names), len(names))
            with pytest.raises(RequestNotFound, match="first block"):
                await admin.pin(PrefixSelector(text=TEXT))

    run(test)


def test_a_listed_block_is_pinned_with_all_that_leads_to_it(redis_url: str) -> None:
    async def body(host: StoreHost, admin: CacheClient) -> None:
        async with client_of(host) as client:
            await put(client, chain(4))
        (prefix,) = (await admin.hottest(5)).prefixes
        assert (await admin.pin(PrefixSelector(block=prefix.block))).nodes[0].num_blocks == 4
        assert host.store.host.num_pinned == 4
        assert (await admin.hottest(5)).prefixes[0].is_pinned
        assert (await admin.unpin(PrefixSelector(block=prefix.block))).nodes[0].num_blocks == 4
        assert host.store.host.num_pinned == 0

    with_one_store(redis_url, body)


def test_a_block_that_is_left_on_disk_alone_is_unpinned_by_its_name(redis_url: str, tmp_path: Path) -> None:
    async def body(host: StoreHost, admin: CacheClient) -> None:
        async with client_of(host) as client:
            await put(client, chain(3))
        await until(lambda: host.store.disk is not None and host.store.disk.match(chain(3)) == 3)
        selector = PrefixSelector(block=chain(3)[2].hex())
        await admin.pin(selector)
        host.store.host.remove(chain(1))  # as a damaged block is
        assert (await admin.unpin(selector)).nodes[0].num_blocks == 3
        assert (await admin.clear()).nodes[0].num_blocks == 3

    with_one_store(redis_url, body, disk=tmp_path)


@pytest.mark.parametrize(
    ("selector", "kind", "message"),
    [
        (PrefixSelector(), InvalidRequest, "text, token_ids or block"),
        (PrefixSelector(block="xyz"), InvalidRequest, "32 hex digits"),
        (PrefixSelector(block="ab"), InvalidRequest, "32 hex digits"),
        (PrefixSelector(block="ab" * 16, cache_salt="s"), InvalidRequest, "does not go with a block"),
        (PrefixSelector(token_ids=TokenIds()), InvalidRequest, "empty"),
        (PrefixSelector(token_ids=TokenIds(ids=[10**9])), InvalidRequest, "vocabulary|token"),
        (PrefixSelector(text="x", cache_salt="s" * 300), InvalidRequest, "cache_salt"),
        (PrefixSelector(block="ab" * 16), RequestNotFound, "first block"),
        (tokens(5, "other"), RequestNotFound, "first block"),
    ],
)
def test_what_names_no_cached_prefix_is_refused(
    redis_url: str, selector: PrefixSelector, kind: type[TandemError], message: str
) -> None:
    async def body(host: StoreHost, admin: CacheClient) -> None:
        await fails(kind, admin.pin(selector), message)

    with_one_store(redis_url, body)


def test_a_prompt_shorter_than_a_block_is_refused_and_so_is_a_list_without_end(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url), admin_of(redis_url, block_size=16) as admin:
            await fails(InvalidRequest, admin.pin(tokens(15)), "15 tokens, less than a block of 16")
            await fails(InvalidRequest, admin.hottest(1001), "1 to 1000")

    run(test)


def test_a_node_that_does_not_answer_is_named_and_hides_no_other(redis_url: str) -> None:
    async def body(host: StoreHost, admin: CacheClient) -> None:
        registry = StoreRegistry(redis_url, cluster=CLUSTER, ttl_s=60)
        await registry.put(replace(host.record, node="dead", address=NOBODY))
        try:
            async with client_of(host) as client:
                await put(client, chain(2))
            stats = await admin.stats()
            assert [(n.node, bool(n.error), bool(n.tiers)) for n in stats.nodes] == [
                ("dead", True, False),
                ("n1", False, True),
            ]
            assert [f.node for f in (await admin.hottest(5)).failures] == ["dead"]
            pinned = await admin.pin(tokens(2))
            assert [(n.num_blocks, bool(n.error)) for n in pinned.nodes] == [(0, True), (2, False)]
            verified = await admin.verify(timeout_s=30)
            assert [(n.num_checked, bool(n.error)) for n in verified.nodes] == [(0, True), (2, False)]
        finally:
            await registry.remove("dead")
            await registry.close()

    with_one_store(redis_url, body)


def test_damaged_blocks_are_found_and_removed(redis_url: str) -> None:
    async def body(host: StoreHost, admin: CacheClient) -> None:
        async with client_of(host) as client:
            await put(client, chain(3))
        (held,) = host.store.host.borrow(chain(3))[2:]
        host.store.host.slab.bytes_of(held.slot)[0] ^= 1
        (node,) = (await admin.verify(timeout_s=30)).nodes
        assert (node.num_checked, node.num_damaged) == (3, 1)
        assert host.store.host.match(chain(3)) == 2

    with_one_store(redis_url, body)


def test_a_cluster_without_stores_says_so_and_still_counts_its_workers(redis_url: str) -> None:
    async def test() -> None:
        async with admin_of(redis_url, has_stores=False) as admin:
            stats = await admin.stats()
            assert (stats.has_stores, len(stats.nodes), len(stats.workers)) == (False, 0, 2)
            for call in (admin.hottest(5), admin.pin(tokens(3)), admin.unpin(tokens(3)), admin.verify(timeout_s=5)):
                await fails(InvalidRequest, call, r"set prefix_store\.host_bytes")
            assert len((await admin.clear()).workers) == 2

    run(test)


def test_stores_that_are_yet_to_come_are_no_fault_of_the_caller(redis_url: str) -> None:
    async def test() -> None:
        async with admin_of(redis_url) as admin:
            await fails(WorkerUnavailable, admin.hottest(5), "no prefix store is there yet")

    run(test)


def test_without_redis_the_stores_are_not_known() -> None:
    async def test() -> None:
        redis = EmbeddedRedis()
        await redis.start()
        async with admin_of(redis.url) as admin:
            redis.stop()
            await fails(WorkerUnavailable, admin.stats(), "Redis is away")

    run(test)


def test_calls_want_an_api_key_as_all_others(redis_url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")

    async def test() -> None:
        async with admin_of(redis_url, has_stores=False, api_keys_file=str(keys)) as admin:
            await fails(Unauthenticated, admin.clear(), "API key")

    run(test)
