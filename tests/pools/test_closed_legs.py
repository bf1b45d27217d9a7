"""A leg, or both, closed or aborted in each phase: every block comes back, and the others keep their exact tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from decode_pool.leg import Leg as DecodeLeg
from decode_pool.worker import DecodeWorker
from kv_transfer.handoff import Record
from kv_transfer.transport import MessageHeader
from router.dispatcher import LegDispatch
from router.policy import Route
from tandem.config import TransportName
from tandem.errors import RequestCancelled
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import Role
from tests.fakes import Fault
from tests.legs import Legs
from tests.pair import (
    CHUNK_TOKENS,
    SETTLE_S,
    Pair,
    PairOptions,
    make_live_request,
    make_prompt,
    monolithic,
    running_pair,
    until,
)

TRANSPORTS: list[TransportName] = ["shm", "ucx"]
NEIGHBOUR = make_prompt(44, seed=1)
NEIGHBOUR_TOKENS = 30
VICTIM = make_prompt(70)
VICTIM_TOKENS = 40
NEIGHBOUR_BLOCKS = 10
VICTIM_BLOCKS = 14


async def close_decode(legs: Legs) -> None:
    legs.decode.close()


async def close_prefill(legs: Legs) -> None:
    legs.prefill.close()


async def close_both(legs: Legs) -> None:
    legs.decode.close()
    legs.prefill.close()


async def abort_on_decode(legs: Legs) -> None:
    await legs.pair.control_stub(Role.DECODE).Abort(worker_pb2.AbortRequest(request_id=legs.request.request_id))


async def abort_on_prefill(legs: Legs) -> None:
    await legs.pair.control_stub(Role.PREFILL).Abort(worker_pb2.AbortRequest(request_id=legs.request.request_id))


ENDINGS: list[Callable[[Legs], Awaitable[None]]] = [
    close_decode,
    close_prefill,
    close_both,
    abort_on_decode,
    abort_on_prefill,
]


async def before_the_ticket(legs: Legs) -> None:
    """The victim's offer waits for blocks that its neighbour holds."""
    pair = legs.pair
    await legs.open()
    await until(lambda: legs.request.request_id in pair.decode.scheduler)
    assert pair.decode.scheduler.num_waiting == 1


async def prefilling(legs: Legs) -> None:
    """The engine of the prefill worker stands in one of the victim's chunks."""
    legs.pair.prefill_executor.stop()
    await legs.open()
    await until(legs.pair.prefill_executor.stopped.is_set)


async def moving(legs: Legs) -> None:
    """All of the victim's messages are held back, its record is with the decode worker."""
    await legs.open()
    await legs.prefill.seen("first_token")
    await until(lambda: legs.pair.fabric.num_held == 9)


async def delivered(legs: Legs) -> None:
    """The victim waits for its first decode iteration."""
    await legs.open()
    await until(lambda: legs.pair.decode.scheduler.num_running == 2)


async def decoding(legs: Legs) -> None:
    """The victim has given tokens."""
    legs.pair.decode_executor.go()
    await legs.open()
    await legs.decode.seen("token", count=3)


PHASES: list[Callable[[Legs], Awaitable[None]]] = [before_the_ticket, prefilling, moving, delivered, decoding]


async def end_in_phase(
    model: Path,
    transport: TransportName,
    reach: Callable[[Legs], Awaitable[None]],
    end: Callable[[Legs], Awaitable[None]],
) -> None:
    held: set[str] = set()

    def policy(header: MessageHeader, index: int) -> Fault:
        return Fault.DELAY if header.handoff_id in held else Fault.NONE

    decode_blocks = VICTIM_BLOCKS if reach is before_the_ticket else 64
    lease_s = 1.5 if reach is moving else 10.0
    options = PairOptions(transport=transport, faults=policy, decode_blocks=decode_blocks, lease_s=lease_s)
    async with running_pair(model, options) as pair:
        neighbour = await neighbour_in_decode(pair)
        legs = Legs(pair, VICTIM, max_tokens=VICTIM_TOKENS)
        if reach is moving:
            held.add(legs.handoff_id)
        await reach(legs)
        await end(legs)
        pair.prefill_executor.go()
        pair.decode_executor.go()
        await end_of(legs, completes=reach in (delivered, decoding) and end in (close_prefill, abort_on_prefill))
        if reach is moving:
            await until(lambda: pair.fabric.num_held == 0)
        assert await neighbour == monolithic(model, NEIGHBOUR, max_tokens=NEIGHBOUR_TOKENS)
        await pair.settled()
        assert await pair.run(VICTIM, max_tokens=9) == monolithic(model, VICTIM, max_tokens=9)


async def neighbour_in_decode(pair: Pair) -> asyncio.Task[list[int]]:
    """Another request, whose first decode iteration is stopped before it begins."""
    pair.decode_executor.stop()
    task = asyncio.create_task(pair.run(NEIGHBOUR, max_tokens=NEIGHBOUR_TOKENS))
    await until(pair.decode_executor.stopped.is_set)
    return task


async def end_of(legs: Legs, *, completes: bool) -> None:
    """Both legs end. Once it is delivered, the end of the prefill leg is no business of the decode leg."""
    prefill, decode = await legs.errors()
    if completes:
        assert decode is None, decode
    else:
        assert decode is not None or prefill is not None


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("end", ENDINGS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("reach", PHASES, ids=lambda reach: reach.__name__)
def test_a_request_that_is_ended_gives_back_its_blocks_and_disturbs_nobody(
    gqa: Path,
    transport: TransportName,
    reach: Callable[[Legs], Awaitable[None]],
    end: Callable[[Legs], Awaitable[None]],
) -> None:
    asyncio.run(end_in_phase(gqa, transport, reach, end))


@pytest.mark.parametrize("end", [close_both, abort_on_prefill], ids=lambda end: end.__name__)
def test_no_chunk_follows_the_one_in_which_a_request_was_ended_though_its_messages_are_still_under_way(
    gqa: Path, end: Callable[[Legs], Awaitable[None]]
) -> None:
    async def ended() -> None:
        options = PairOptions(faults=lambda header, index: Fault.DELAY, lease_s=1.5)
        async with running_pair(gqa, options) as pair:
            pair.prefill_executor.stop()
            legs = await Legs(pair, make_prompt(5 * CHUNK_TOKENS)).open()
            await until(pair.prefill_executor.stopped.is_set)
            pair.prefill_executor.step()
            await until(lambda: pair.prefill.num_iterations == 1 and pair.prefill_executor.stopped.is_set())
            assert pair.fabric.num_held > 0
            await end(legs)
            await until(lambda: legs.request.request_id in pair.prefill.scheduler and pair.prefill.scheduler.is_idle)
            pair.prefill_executor.go()
            await legs.errors()
            await pair.settled()
            assert pair.prefill.num_tokens == 2 * CHUNK_TOKENS

    asyncio.run(ended())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_routers_abort_ends_both_legs(gqa: Path, transport: TransportName) -> None:
    async def gone() -> None:
        async with running_pair(gqa, PairOptions(transport=transport)) as pair:
            dispatch = pair.dispatch(VICTIM, max_tokens=VICTIM_TOKENS)
            steps = aiter(dispatch)
            assert (await anext(steps)).position == 0
            assert (await anext(steps)).position == 1
            await dispatch.abort()
            await pair.settled()
            assert pair.decode.num_tokens < VICTIM_TOKENS - 1

    asyncio.run(gone())


@pytest.mark.parametrize("role", Role)
def test_a_leg_that_ends_takes_the_other_along_though_no_handoff_tells_it(gqa: Path, role: Role) -> None:
    """The victim waits behind more prompt tokens than tickets are asked ahead for: neither worker knows the other."""

    async def ended() -> None:
        async with running_pair(gqa) as pair:
            pair.prefill_executor.stop()
            first = asyncio.create_task(pair.run(make_prompt(5 * CHUNK_TOKENS)))
            await until(pair.prefill_executor.stopped.is_set)
            victim = make_live_request(make_prompt(6 * CHUNK_TOKENS))
            dispatch = LegDispatch(victim, Route(prefill=pair.prefill_view, decode=pair.decode_view), pair.tracker)
            dispatch.start()
            await until(lambda: victim.request_id in pair.prefill.scheduler)
            await pair.control_stub(role).Abort(worker_pb2.AbortRequest(request_id=victim.request_id))
            await until(lambda: victim.request_id not in pair.prefill.scheduler)
            with pytest.raises(RequestCancelled):
                await anext(aiter(dispatch))
            pair.prefill_executor.go()
            await first
            await asyncio.wait_for(pair.decode.wait_idle(), SETTLE_S)
            assert pair.prefill.num_tokens == 5 * CHUNK_TOKENS

    asyncio.run(ended())


def test_requests_that_come_and_go_in_numbers_leave_the_others_exact(gqa: Path) -> None:
    prompts = [make_prompt(20 + 9 * i, seed=i) for i in range(8)]

    async def storm() -> list[list[int]]:
        async with running_pair(gqa, PairOptions(transport="ucx", decode_blocks=48, prefill_blocks=32)) as pair:
            staying = [asyncio.create_task(pair.run(prompt, max_tokens=16)) for prompt in prompts]
            for count, prompt in enumerate(prompts * 3):
                dispatch = pair.dispatch(prompt, max_tokens=30)
                await asyncio.sleep(0.003 * (count % 5))
                await dispatch.abort()
            return await asyncio.gather(*staying)

    assert asyncio.run(storm()) == [monolithic(gqa, prompt, max_tokens=16) for prompt in prompts]


def test_an_abort_of_an_unknown_request_does_nothing(gqa: Path) -> None:
    async def unknown() -> None:
        async with running_pair(gqa) as pair:
            for role in Role:
                await pair.control_stub(role).Abort(worker_pb2.AbortRequest(request_id="nobody"))
            assert await pair.run(VICTIM) == monolithic(gqa, VICTIM)

    asyncio.run(unknown())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_request_that_ends_just_as_its_kv_is_there_is_never_decoded(
    gqa: Path, transport: TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message lands on the transport's thread while the event loop ends the leg."""
    arrive = DecodeWorker._on_delivered

    def end_first(worker: DecodeWorker, leg: DecodeLeg, record: Record) -> None:
        if threading.current_thread() is threading.main_thread():
            worker.fail(leg, RequestCancelled("just now"))
        else:
            worker._soon(worker.fail, leg, RequestCancelled("just now"))
            give_up = time.monotonic() + SETTLE_S
            while not leg.over:  # not for the rest: it may wait for the handoff, which waits for us
                assert time.monotonic() < give_up
                time.sleep(0.001)
        arrive(worker, leg, record)

    async def scenario() -> None:
        async with running_pair(gqa, PairOptions(transport=transport)) as pair:
            monkeypatch.setattr(DecodeWorker, "_on_delivered", end_first)
            legs = await Legs(pair, VICTIM, max_tokens=VICTIM_TOKENS).open()
            _, decode = await legs.errors()
            assert isinstance(decode, RequestCancelled)
            await pair.settled()
            assert pair.decode.num_iterations == 0

    asyncio.run(scenario())
