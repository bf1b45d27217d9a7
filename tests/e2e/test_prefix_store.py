"""The prefix store in a whole cluster: conversations find their prefix again, on either pool and after restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import redis.asyncio

from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2_grpc
from tests.e2e.live import Answer, LiveCluster, generate, live_cluster, run
from tests.tiny_model import save_tiny_llama

CONFIG = {
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


async def until_announced(cluster: LiveCluster, num_names: int) -> None:
    """Until that many blocks of some tier are known to Redis."""
    async with redis.asyncio.from_url(cluster.redis) as client:
        async with asyncio.timeout(30):
            while True:
                keys = [key async for key in client.scan_iter(match="tandem:tandem:kv:*:*")]
                counts = {key.decode(): await client.scard(key) for key in keys if await client.type(key) == b"set"}
                if any(":host" in key and count >= num_names for key, count in counts.items()):
                    return
                await asyncio.sleep(0.1)


def test_a_conversation_finds_its_prefix_again_and_gets_the_same_tokens(cluster: LiveCluster) -> None:
    async def talk() -> None:
        cold = await ask(cluster, PROMPT, cache_salt="cold")
        first = await ask(cluster, PROMPT)
        assert first.tokens == cold.tokens
        assert first.usage.cached_tokens == 0
        await until_announced(cluster, 2 * ((len(PROMPT) + 19) // 16))
        warm = await ask(cluster, PROMPT)
        assert warm.tokens == cold.tokens
        assert warm.usage.cached_tokens == (len(PROMPT) - 1) // 16 * 16
        known = list(takewhile(lambda token: token < VOCABULARY, first.tokens))
        turn = [*PROMPT, *known, 5, 6, 7]
        follow_up, alone = await ask(cluster, turn), await ask(cluster, turn, cache_salt="alone")
        assert follow_up.tokens == alone.tokens
        assert follow_up.usage.cached_tokens == (len(PROMPT) + len(known)) // 16 * 16

    run(talk())
