"""Strangers at a worker's doors: what comes without the cluster's key moves nothing and harms nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tandem.errors import ForeignCall, TandemError, TicketRefused
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.secret import ClusterKey
from tandem.types import Epoch, WorkerId
from tests.legs import Legs, offer_of
from tests.pair import Pair, PairOptions, make_prompt, monolithic, running_pair, until
from tests.silent_source import silent_source

PROMPT = make_prompt(20)
OTHER_KEY = ClusterKey(b"o" * 32)


async def refusal(pair: Pair, offer: worker_pb2.HandoffOffer) -> TandemError:
    async def source() -> AsyncIterator[worker_pb2.SourceMessage]:
        yield worker_pb2.SourceMessage(offer=offer)

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in pair.decode_stub.Handoff(source()):
            pass
    return from_rpc_error(refused.value)


@pytest.mark.parametrize(
    "claims",
    [
        {"key": OTHER_KEY},
        {"lifetime_s": -60.0},
        {"destination": WorkerId("decode-9")},
        {"destination_epoch": Epoch(3)},
        {"request_id": "somebody-elses"},
    ],
    ids=["forged", "expired", "for another worker", "for an earlier life", "for another request"],
)
def test_a_wrong_offer_is_refused_and_the_true_one_is_still_taken(gqa: Path, claims: dict[str, object]) -> None:
    async def wrong() -> None:
        async with running_pair(gqa) as pair:
            legs = Legs(pair, PROMPT)
            await legs.open_decode()
            if "request_id" in claims:
                claims["handoff_id"] = legs.handoff_id
            error = await refusal(pair, offer_of(legs, **claims).message)  # type: ignore[arg-type]
            assert type(error) is TicketRefused
            if "request_id" in claims:
                legs.decode.close()
                return
            legs.open_prefill()
            assert await legs.errors() == (None, None)
            assert legs.tokens() == monolithic(gqa, PROMPT)

    asyncio.run(wrong())


def test_an_offer_that_was_overheard_is_not_taken_again_when_its_handoff_is_over(gqa: Path) -> None:
    async def replayed() -> None:
        async with running_pair(gqa) as pair:
            async with silent_source(pair) as (legs, source):
                source.call.cancel()
                await legs.decode.error()
            await pair.settled()
            assert "used before" in (await refusal(pair, source.offer_message)).message

    asyncio.run(replayed())


@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_message_with_anothers_code_is_not_written(gqa: Path, transport: str) -> None:
    async def forged() -> None:
        async with (
            running_pair(gqa, PairOptions(transport=transport)) as pair,  # type: ignore[arg-type]
            silent_source(pair) as (legs, source),
        ):
            before = pair.decode.executor.cache.slab.clone()
            for link_key in (b"", b"guess"):
                await source.send(layer=0, first_block=0, link_key=link_key)
            await until(lambda: pair.decode.receiver.arrived.num_forged == 2)  # sends end sooner
            assert torch.equal(pair.decode.executor.cache.slab, before)
            await source.send(layer=0, first_block=0)
            legs.decode.close()
            source.call.cancel()

    asyncio.run(forged())


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": Epoch(3)},
        {"num_layers": 2},
        {"num_blocks": 2},
        {"num_bytes": 8},
        {"first_head": 1},
        {"num_heads": 1},
        {"source_rank": 1},
        {"destination_rank": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_message_that_says_other_than_the_handoff_is_not_written_though_its_code_is_right(
    gqa: Path, change: dict[str, Any]
) -> None:
    async def wrong() -> None:
        async with running_pair(gqa) as pair, silent_source(pair) as (legs, source):
            before = pair.decode.executor.cache.slab.clone()
            await source.send(layer=0, first_block=0, **change)
            await until(lambda: pair.decode.receiver.arrived.num_refused == 1)
            assert torch.equal(pair.decode.executor.cache.slab, before)
            legs.decode.close()
            source.call.cancel()

    asyncio.run(wrong())


def test_a_router_of_another_cluster_is_refused_by_both_workers(gqa: Path) -> None:
    async def foreign() -> None:
        async with running_pair(gqa, PairOptions(router_key=OTHER_KEY)) as pair:
            with pytest.raises(ForeignCall):
                await pair.run(PROMPT)
            assert type(await Legs(pair, PROMPT).open_prefill().error()) is ForeignCall

    asyncio.run(foreign())


def test_a_prefill_worker_of_another_cluster_hands_nothing_over(gqa: Path) -> None:
    async def foreign() -> None:
        async with running_pair(gqa, PairOptions(prefill_key=OTHER_KEY)) as pair:
            with pytest.raises(TandemError, match="another cluster"):
                await pair.run(PROMPT)

    asyncio.run(foreign())
