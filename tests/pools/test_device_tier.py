"""What a worker says of its own cached blocks, and how they are cleared, over its real gRPC service.

The model is `HashExecutor`, whose next token depends on every byte of KV.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.access import Access
from cluster.cache_client import CacheClient
from tandem.model.spec import fingerprint
from tandem.prefix_store.client import at
from tandem.rpc.tandem.v1.inference_pb2 import PrefixSelector, TokenIds
from tandem.rpc.tandem.v1.worker_pb2 import ClearDeviceTierRequest, GetStatusRequest
from tandem.types import Role
from tests.cached_router import cached_router, workers_of
from tests.hash_executor import BLOCK_SIZE, SPEC, HashExecutor, expected
from tests.legs import Legs
from tests.pair import Pair, PairOptions, make_prompt, running_pair
from tests.pair import until as settled
from tests.pools.test_metrics import scrape, value
from tests.router_harness import tokenizer
from tests.store_nodes import run, store_node, until

pytestmark = pytest.mark.usefixtures("redis_url")
"""Of all: it lives as long as the session, so it has to be there before the module's first test."""

PROMPT = make_prompt(90)
NUM_FULL = 90 // BLOCK_SIZE
NUM_USABLE = 89 // BLOCK_SIZE
LAYOUT = SPEC.kv_layout(block_size=BLOCK_SIZE, dtype="float32")
STORE = {
    "fingerprint": fingerprint(SPEC, LAYOUT),
    "block_bytes": LAYOUT.num_layers * LAYOUT.block_layer_bytes,
    "num_slots": 128,
}


async def clear(pair: Pair, role: Role) -> int:
    reply = await pair.control_stub(role).ClearDeviceTier(ClearDeviceTierRequest())
    return reply.num_blocks


async def tier(pair: Pair, role: Role) -> tuple[int, int]:
    """(named, of them only cached)."""
    device = (await pair.control_stub(role).GetStatus(GetStatusRequest())).device_tier
    return device.num_named_blocks, device.num_cached_blocks


@pytest.mark.parametrize("role", list(Role))
def test_a_cleared_worker_has_forgotten_its_blocks_and_computes_them_again(role: Role) -> None:
    async def test() -> None:
        async with running_pair(Path("hash"), PairOptions(make_executor=HashExecutor)) as pair:
            await pair.run(PROMPT, max_tokens=3)
            await settled(pair.is_empty)
            assert await tier(pair, role) == (NUM_FULL, NUM_FULL)
            assert await clear(pair, role) == NUM_FULL
            assert await tier(pair, role) == (0, 0)
            assert await clear(pair, role) == 0
            before = pair.prefill.num_tokens
            assert await pair.run(PROMPT, max_tokens=3) == expected(PROMPT, 3)
            num_found = 0 if role is Role.PREFILL else NUM_USABLE * BLOCK_SIZE
            assert pair.prefill.num_tokens - before == len(PROMPT) - num_found

    run(test)


def test_blocks_of_a_running_request_are_not_cleared() -> None:
    async def test() -> None:
        async with running_pair(Path("hash"), PairOptions(make_executor=HashExecutor)) as pair:
            pair.decode_executor.stop()
            legs = await Legs(pair, PROMPT, max_tokens=3).open()
            await settled(lambda: pair.decode.scheduler.num_running == 1)
            assert await clear(pair, Role.DECODE) == 0
            named, cached = await tier(pair, Role.DECODE)
            assert (named, cached) == (NUM_FULL, 0)
            pair.decode_executor.go()
            assert await legs.errors() == (None, None)
            assert legs.tokens() == expected(PROMPT, 3)

    run(test)


def test_many_blocks_are_cleared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.write_back._CLEARED_AT_ONCE", 4)

    async def test() -> None:
        async with running_pair(Path("hash"), PairOptions(make_executor=HashExecutor)) as pair:
            await pair.run(PROMPT, max_tokens=3)
            await settled(pair.is_empty)
            assert await clear(pair, Role.PREFILL) == NUM_FULL
            pair.prefill.scheduler.check_invariants()

    run(test)


def test_metrics_say_where_the_prompts_kv_came_from_and_what_was_written_back(redis_url: str) -> None:
    async def test() -> None:
        async with store_node(redis_url, **STORE) as host:
            options = PairOptions(make_executor=HashExecutor, store=at(host.record.address))
            async with running_pair(Path("hash"), options) as pair:
                await pair.run(PROMPT, max_tokens=3)
                await until(lambda: len(host.store.host.visible()) >= NUM_FULL and pair.is_empty())
                await pair.run(PROMPT, max_tokens=3)
                await settled(pair.is_empty)
                _, samples = await scrape(pair.prefill.metrics.registry)
                _, decode = await scrape(pair.decode.metrics.registry)
                name = "tandem_prefill_prefix_tokens_total"
                assert value(samples, name, source="computed") == 2 * 90 - NUM_USABLE * BLOCK_SIZE
                assert value(samples, name, source="device") == NUM_USABLE * BLOCK_SIZE
                assert value(samples, name, source="store") == 0
                assert value(samples, "tandem_prefill_named_blocks", state="cached") == NUM_FULL
                written = [
                    value(each, f"tandem_{part}_write_back_blocks_total", outcome="written")
                    for part, each in (("prefill", samples), ("decode", decode))
                ]
                assert sum(written) == NUM_FULL
                assert value(samples, "tandem_prefill_load_wait_seconds_count") == 0
            async with running_pair(Path("hash"), options) as pair:
                await pair.run(PROMPT, max_tokens=3)
                await settled(pair.is_empty)
                _, samples = await scrape(pair.prefill.metrics.registry)
                assert value(samples, name, source="store") == NUM_USABLE * BLOCK_SIZE
                assert value(samples, name, source="device") == 0
                assert value(samples, "tandem_prefill_load_wait_seconds_count") == 1

    run(test)


def test_an_operator_clears_workers_and_stores_but_not_what_is_pinned(redis_url: str) -> None:
    tokenizer()  # takes seconds the first time, in which no store would be heard
    salt = "s"

    async def test() -> None:
        async with store_node(redis_url, **STORE) as host:
            options = PairOptions(make_executor=HashExecutor, store=at(host.record.address))
            async with (
                running_pair(Path("hash"), options) as pair,
                cached_router(redis_url, workers_of(pair)) as server,
                CacheClient(Access(endpoint=server.grpc_address)) as admin,
            ):
                await pair.run(PROMPT, max_tokens=3, salt=salt)
                await until(lambda: len(host.store.host.visible()) >= NUM_FULL and pair.is_empty())
                (prefix,) = (await admin.hottest(5)).prefixes
                assert prefix.num_tokens == NUM_FULL * BLOCK_SIZE
                await admin.pin(PrefixSelector(block=prefix.block))
                await pair.run(make_prompt(90, 1), max_tokens=3, salt=salt)
                await until(lambda: len(host.store.host.visible()) >= 2 * NUM_FULL and pair.is_empty())
                stats = await admin.stats()
                assert [w.device.num_named_blocks for w in stats.workers] == [2 * NUM_FULL, 2 * NUM_FULL]
                cleared = await admin.clear()
                assert [(n.num_blocks, n.error) for n in cleared.nodes] == [(NUM_FULL, "")]
                assert [(w.num_blocks, w.error) for w in cleared.workers] == [(2 * NUM_FULL, "")] * 2
                before = pair.prefill.num_tokens
                assert await pair.run(PROMPT, max_tokens=3, salt=salt) == expected(PROMPT, 3)
                assert pair.prefill.num_tokens - before == len(PROMPT) - NUM_USABLE * BLOCK_SIZE
                unknown = PrefixSelector(token_ids=TokenIds(ids=PROMPT), cache_salt="other")
                with pytest.raises(Exception, match="first block"):
                    await admin.pin(unknown)

    run(test)
