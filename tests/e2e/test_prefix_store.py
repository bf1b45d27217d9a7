"""The prefix store in a whole cluster: conversations find their prefix again, on either pool and after restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from itertools import takewhile
from typing import Any

import pytest
import redis.asyncio

from cluster.access import Access
from cluster.cache_client import CacheClient
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2_grpc
from tandem.rpc.tandem.v1.inference_pb2 import PrefixSelector, TokenIds
from tests.e2e.live import Answer, LiveCluster, generate, live_cluster, run
from tests.tiny_model import save_tiny_llama

CONFIG = {
    "pin_cores": False,  # every cluster that other tests start meanwhile would take the same ones
    "prefill": {"num_workers": 1, "num_blocks": 64},
    "decode": {"num_workers": 1, "num_blocks": 128},
    "transfer": {"transport": "shm"},
}
VOCABULARY = 257
"""The tokenizer's: the model has more tokens, which cannot come back in a prompt."""
PROMPT = [(7 * i) % 200 + 3 for i in range(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    directory = tmp_path_factory.mktemp("store")
    model = save_tiny_llama(directory / "model", num_kv_heads=2)
    store = {"host_bytes": 32 << 20, "disk_bytes": 256 << 20, "disk_path": str(directory / "disk")}
    config = {**CONFIG, "model": {"source": str(model)}, "prefix_store": store}
    with live_cluster(directory, config) as live:
        yield live


async def ask(cluster: LiveCluster, prompt: list[int], **fields: Any) -> Answer:
    async with open_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await generate(stub, prompt, max_tokens=20, ignore_eos=True, **fields)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Looks for a minute at most."""
    async with asyncio.timeout(60):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.1)


async def store_record(client: redis.asyncio.Redis) -> dict[str, Any] | None:
    """Of the one node's store."""
    texts = [await client.get(key) async for key in client.scan_iter(match="tandem:tandem:store:*")]
    return next((json.loads(text) for text in texts if text is not None), None)


async def has_announced(client: redis.asyncio.Redis, tier: str, num_blocks: int) -> bool:
    """Whether the store has told the cluster of so many blocks."""
    record = await store_record(client)
    return record is not None and await client.scard(f"tandem:tandem:kv:{record['owner']}:{tier}") >= num_blocks


def test_a_conversation_finds_its_prefix_again_and_gets_the_same_tokens(cluster: LiveCluster) -> None:
    async def talk() -> None:
        cold = await ask(cluster, PROMPT, cache_salt="cold")
        first = await ask(cluster, PROMPT)
        assert first.tokens == cold.tokens
        assert first.usage.cached_tokens == 0
        async with redis.asyncio.from_url(cluster.redis) as client:
            await eventually(lambda: has_announced(client, "host", 2 * ((len(PROMPT) + 19) // 16)))
        warm = await ask(cluster, PROMPT)
        assert warm.tokens == cold.tokens
        assert warm.usage.cached_tokens == (len(PROMPT) - 1) // 16 * 16
        known = list(takewhile(lambda token: token < VOCABULARY, first.tokens))
        turn = [*PROMPT, *known, 5, 6, 7]
        follow_up, alone = await ask(cluster, turn), await ask(cluster, turn, cache_salt="alone")
        assert follow_up.tokens == alone.tokens
        assert follow_up.usage.cached_tokens >= len(PROMPT) // 16 * 16  # the rest where loading it is quicker

    run(talk())


def test_a_killed_store_is_started_again_and_has_what_was_on_disk(cluster: LiveCluster) -> None:
    prompt = [*PROMPT[50:], *PROMPT[:50]]

    async def play() -> None:
        first = await ask(cluster, prompt)
        async with redis.asyncio.from_url(cluster.redis) as client:
            await eventually(lambda: has_announced(client, "disk", 3 * (len(prompt) // 16)))
            before = await store_record(client)
            assert before is not None
            os.kill(before["pid"], signal.SIGKILL)
            assert len((await ask(cluster, [*prompt, 1, 2, 3])).tokens) == 20

            async def is_back() -> bool:
                record = await store_record(client)
                return record is not None and record["pid"] != before["pid"]

            await eventually(is_back)
            assert await has_announced(client, "disk", 2 * (len(prompt) // 16))
        again = await ask(cluster, prompt)
        assert again.tokens == first.tokens

    run(play())


async def num_on_disk(admin: CacheClient) -> int:
    return (await admin.stats()).nodes[0].tiers[1].num_blocks


async def until_more(admin: CacheClient, num_blocks: int) -> None:
    """Until the disk tier has so many: then the host tier has them, too."""
    while True:
        if await num_on_disk(admin) >= num_blocks:
            return
        await asyncio.sleep(0.1)


def test_operators_see_keep_and_clear_what_a_cluster_has_cached(cluster: LiveCluster) -> None:
    prompt = [(11 * i) % 200 + 3 for i in range(160)]
    selector = PrefixSelector(token_ids=TokenIds(ids=prompt), cache_salt="kept")

    async def operate() -> None:
        async with CacheClient(Access(endpoint=cluster.grpc)) as admin, asyncio.timeout(60):
            num_before = await num_on_disk(admin)
            await ask(cluster, prompt, cache_salt="kept")
            await until_more(admin, num_before + (len(prompt) + 19) // 16)
            (node,) = (await admin.pin(selector)).nodes
            assert (node.num_blocks, node.error) == (len(prompt) // 16, "")
            cleared = await admin.clear()
            assert [one.error for one in [*cleared.nodes, *cleared.workers]] == ["", "", ""]
            stats = await admin.stats()
            assert [worker.device.num_named_blocks for worker in stats.workers] == [0, 0]
            assert [tier.num_blocks for tier in stats.nodes[0].tiers] == [node.num_blocks, node.num_blocks, 0]
            (verified,) = (await admin.verify(timeout_s=60)).nodes
            assert (verified.num_checked, verified.num_damaged, verified.error) == (2 * node.num_blocks, 0, "")
            assert (await admin.unpin(selector)).nodes[0].num_blocks == node.num_blocks
            assert (await admin.clear()).nodes[0].num_blocks == node.num_blocks

    run(operate())
