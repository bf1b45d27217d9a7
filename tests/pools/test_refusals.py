"""Calls that do not fit together: typed errors on both sides, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.errors import (
    BY_CODE,
    DuplicateRequest,
    HandoffFailed,
    IncompatiblePeer,
    InvalidRequest,
    RequestCancelled,
    TandemError,
    TicketRefused,
)
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import Role
from tests.legs import Legs, offer_of
from tests.pair import Pair, PairOptions, make_prompt, monolithic, running_pair, until

PROMPT = make_prompt(20)


async def refusal(pair: Pair, *messages: worker_pb2.SourceMessage) -> TandemError:
    """The error that a handoff with these messages ends with."""

    async def source() -> AsyncIterator[worker_pb2.SourceMessage]:
        for message in messages:
            yield message

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in pair.decode_stub.Handoff(source()):
            pass
    return from_rpc_error(refused.value)


async def runs_as_before(pair: Pair) -> None:
    await pair.settled()
    assert await pair.run(PROMPT) == monolithic(pair.model, PROMPT)


def test_another_fingerprint_makes_both_legs_incompatible(gqa: Path) -> None:
    async def mismatch() -> None:
        async with running_pair(gqa, PairOptions(decode_fingerprint="ff" * 16)) as pair:
            legs = await Legs(pair, PROMPT).open()
            assert [type(error) for error in await legs.errors()] == [IncompatiblePeer, IncompatiblePeer]
            with pytest.raises(IncompatiblePeer):
                await pair.run(PROMPT)

    asyncio.run(mismatch())


def test_a_handoff_that_no_leg_waits_for_is_refused(gqa: Path) -> None:
    async def unknown() -> None:
        async with running_pair(gqa) as pair:
            legs = Legs(pair, PROMPT)
            error = await legs.open_prefill().error()
            assert type(error) is HandoffFailed
            assert legs.handoff_id in error.message
            await runs_as_before(pair)

    asyncio.run(unknown())


@pytest.mark.parametrize(
    ("handoff_id", "expected"), [("", InvalidRequest), ("x" * 32, InvalidRequest), ("0" * 32, HandoffFailed)]
)
def test_an_offer_with_a_wrong_id_is_refused(gqa: Path, handoff_id: str, expected: type[TandemError]) -> None:
    async def wrong() -> None:
        async with running_pair(gqa) as pair:
            offer = offer_of(Legs(pair, PROMPT), handoff_id=handoff_id).message
            assert type(await refusal(pair, worker_pb2.SourceMessage(offer=offer))) is expected

    asyncio.run(wrong())


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (worker_pb2.SourceMessage(),),
        (worker_pb2.SourceMessage(renew=worker_pb2.LeaseRenewal(epoch=4)),),
        (worker_pb2.SourceMessage(record=worker_pb2.HandoffRecord(epoch=4)),),
    ],
    ids=["nothing", "empty", "renewal", "record"],
)
def test_a_handoff_that_does_not_begin_with_an_offer_is_refused(
    gqa: Path, messages: tuple[worker_pb2.SourceMessage, ...]
) -> None:
    async def malformed() -> None:
        async with running_pair(gqa) as pair:
            assert type(await refusal(pair, *messages)) is HandoffFailed

    asyncio.run(malformed())


def test_an_offer_of_another_length_is_refused_and_the_next_request_goes_on(gqa: Path) -> None:
    async def length() -> None:
        async with running_pair(gqa) as pair:
            legs = Legs(pair, PROMPT)
            await legs.open_decode()
            offer = offer_of(legs).message
            offer.num_prompt_tokens = 21
            assert type(await refusal(pair, worker_pb2.SourceMessage(offer=offer))) is HandoffFailed
            legs.decode.close()
            await runs_as_before(pair)

    asyncio.run(length())


def test_a_second_offer_of_the_same_handoff_is_refused_and_the_first_goes_on(gqa: Path) -> None:
    async def twice() -> None:
        async with running_pair(gqa) as pair:
            pair.prefill_executor.stop()
            legs = await Legs(pair, PROMPT).open()
            await asyncio.to_thread(pair.prefill_executor.stopped.wait)
            error = await refusal(pair, worker_pb2.SourceMessage(offer=offer_of(legs).message))
            assert type(error) is TicketRefused
            pair.prefill_executor.go()
            assert await legs.errors() == (None, None)
            assert legs.tokens() == monolithic(gqa, PROMPT)

    asyncio.run(twice())


BAD_CONTINUATIONS = {
    "a second offer": worker_pb2.SourceMessage(offer=worker_pb2.HandoffOffer()),
    "an empty message": worker_pb2.SourceMessage(),
    "a finish reason of the future": worker_pb2.SourceMessage(
        record=worker_pb2.HandoffRecord(
            epoch=4, first_tokens=[worker_pb2.FirstToken(finish_reason=99)]  # type: ignore[arg-type]
        )
    ),
}


@pytest.mark.parametrize("message", BAD_CONTINUATIONS.values(), ids=BAD_CONTINUATIONS)
def test_a_malformed_message_in_a_handoff_ends_it_at_once(gqa: Path, message: worker_pb2.SourceMessage) -> None:
    async def malformed() -> None:
        async with running_pair(gqa, PairOptions(lease_s=60.0)) as pair:
            legs = Legs(pair, PROMPT)
            await legs.open_decode()
            call: Any = pair.decode_stub.Handoff()
            await call.write(worker_pb2.SourceMessage(offer=offer_of(legs).message))
            assert (await call.read()).WhichOneof("message") == "ticket"
            await call.write(message)
            answer = await call.read()
            assert answer.WhichOneof("message") == "abort"
            error = await legs.decode.error()
            assert error is not None
            assert BY_CODE[answer.abort.code] is type(error)
            await call.done_writing()
            await pair.settled()

    asyncio.run(malformed())


def test_a_request_id_in_use_is_refused_on_both_legs_and_the_first_request_goes_on(gqa: Path) -> None:
    async def twice() -> None:
        async with running_pair(gqa) as pair:
            pair.prefill_executor.stop()
            first = await Legs(pair, PROMPT).open()
            await asyncio.to_thread(pair.prefill_executor.stopped.wait)
            second = Legs(pair, PROMPT)
            second.request = first.request
            with pytest.raises(AssertionError, match="DuplicateRequest"):
                await second.open_decode()
            assert type(await second.open_prefill().error()) is DuplicateRequest
            pair.prefill_executor.go()
            assert await first.errors() == (None, None)
            assert first.tokens() == monolithic(gqa, PROMPT)

    asyncio.run(twice())


def test_an_id_is_in_use_until_the_iteration_that_its_ended_request_is_in_is_over(gqa: Path) -> None:
    async def reused() -> None:
        async with running_pair(gqa) as pair:
            first = await one_iteration_ended_in(pair)
            second = Legs(pair, PROMPT)
            second.request = first.request
            with pytest.raises(AssertionError, match="DuplicateRequest"):
                await second.open_decode()
            pair.decode_executor.go()
            await pair.settled()
            await second.open_decode()
            second.open_prefill()
            assert await second.errors() == (None, None)
            assert second.tokens() == monolithic(gqa, PROMPT)

    async def one_iteration_ended_in(pair: Pair) -> Legs:
        pair.decode_executor.stop()
        legs = await Legs(pair, PROMPT).open()
        await until(pair.decode_executor.stopped.is_set)
        await pair.control_stub(Role.DECODE).Abort(worker_pb2.AbortRequest(request_id=legs.request.request_id))
        assert type(await legs.decode.error()) is RequestCancelled
        return legs

    asyncio.run(reused())


def test_an_id_is_in_use_until_the_chunk_that_its_ended_prompt_is_in_is_over(gqa: Path) -> None:
    async def reused() -> None:
        async with running_pair(gqa) as pair:
            pair.prefill_executor.stop()
            first, second = Legs(pair, PROMPT, max_tokens=1), Legs(pair, PROMPT, max_tokens=1)
            second.request = first.request
            first.open_prefill(hands_over=False)
            await until(pair.prefill_executor.stopped.is_set)
            await pair.control_stub(Role.PREFILL).Abort(worker_pb2.AbortRequest(request_id=first.request.request_id))
            assert type(await first.prefill.error()) is RequestCancelled
            assert type(await second.open_prefill(hands_over=False).error()) is DuplicateRequest
            pair.prefill_executor.go()
            await pair.settled()
            assert await second.open_prefill(hands_over=False).error() is None
            await second.prefill.seen("first_token")

    asyncio.run(reused())


def test_a_decode_worker_that_is_not_there_fails_the_prefill_leg(gqa: Path) -> None:
    async def absent() -> None:
        async with running_pair(gqa) as pair:
            legs = Legs(pair, PROMPT)
            legs.target.decode_address = "127.0.0.1:1"
            legs.target.handoff_id = uuid.uuid4().hex
            error = await legs.open_prefill().error()
            assert error is not None
            assert error.code in ("worker_unavailable", "handoff_failed")
            await runs_as_before(pair)

    asyncio.run(absent())
