"""Workers cut in any way hand over to workers cut in any other: the tokens are those of one engine on one rank."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import prefill_pool.actor
from kv_transfer import rank_process
from kv_transfer.transport import MessageHeader
from kv_transfer.transports import make_transport
from router.tracker import WorkerTracker
from tandem.config import TransportName
from tandem.errors import ConfigError, TandemError, TransportError
from tandem.types import Role, TokenLogprobs, TokenStep, WorkerId
from tests.fakes import Fault, FaultPolicy, FaultyLink, FaultyTransport
from tests.pair import driver_of, make_live_request, make_prompt, monolithic, until
from tests.ranked import RankedWorker, Shape, a_tracker, dispatched, ranked_worker, run_on
from tests.same_answer import assert_close

NUM_CHAOTIC = 40
WARM = {"temperature": 0.8, "seed": 3}
PREFILL_SHAPES = [Shape(), Shape(tp=2), Shape(tp=4), Shape(pp=2), Shape(tp=2, pp=2)]
DECODE_SHAPES = [Shape(), Shape(tp=2), Shape(tp=4)]
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 9}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (make_prompt(71), {"max_tokens": 9}),
    (make_prompt(20), SEEDED),
]

Use = Callable[[RankedWorker, RankedWorker, WorkerTracker], Awaitable[None]]


@pytest.mark.parametrize("model_name", ["gqa", "mha"])
def test_every_pair_of_shapes_gives_the_tokens_of_one_engine(request: pytest.FixtureRequest, model_name: str) -> None:
    model: Path = request.getfixturevalue(model_name)

    async def run() -> dict[str, list[list[int]]]:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            prefills = [await enter(ranked_worker(model, Role.PREFILL, shape)) for shape in PREFILL_SHAPES]
            decodes = [await enter(ranked_worker(model, Role.DECODE, shape)) for shape in DECODE_SHAPES]
            tracker = await enter(a_tracker())
            return {
                f"{prefill.shape} to {decode.shape}": await asyncio.gather(
                    *(run_on(prefill, decode, tracker, prompt, **sampling) for prompt, sampling in REQUESTS)
                )
                for prefill, decode in itertools.product(prefills, decodes)
            }

    expected = [monolithic(model, prompt, **sampling) for prompt, sampling in REQUESTS]
    outputs = asyncio.run(run())
    assert len(outputs) == len(PREFILL_SHAPES) * len(DECODE_SHAPES)
    assert {pair: tokens for pair, tokens in outputs.items() if tokens != expected} == {}


def on_pair(model: Path, prefill: Shape, decode: Shape, use: Use, **changes: Any) -> None:
    """`use` on two workers; nothing must be left of any request afterwards, and no rank may have failed."""

    async def run() -> None:
        async with (
            ranked_worker(model, Role.PREFILL, prefill, **changes) as source,
            ranked_worker(model, Role.DECODE, decode, **changes) as destination,
            a_tracker() as tracker,
        ):
            await use(source, destination, tracker)

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["ucx", "collective", "auto"])
def test_ranks_hand_over_by_every_transport(gqa: Path, transport: TransportName) -> None:
    prompt = make_prompt(45)

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        assert await run_on(prefill, decode, tracker, prompt, max_tokens=9) == monolithic(gqa, prompt, max_tokens=9)

    on_pair(gqa, Shape(tp=2), Shape(tp=2, pp=2), use, transport=transport)


def test_choices_share_blocks_on_every_rank_and_scores_come_from_all_of_the_vocabulary(mha: Path) -> None:
    request = make_live_request(make_prompt(37), num_choices=3, num_prompt_logprobs=2, max_tokens=6, **WARM)
    [expected] = [driver_of(mha).answer([request])[0]]

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        tokens: dict[int, list[int]] = {}
        scores: list[TokenLogprobs] = []
        wanted = {"num_choices": 3, "num_prompt_logprobs": 2, "max_tokens": 6, **WARM}
        async with dispatched(prefill, decode, tracker, make_prompt(37), **wanted) as dispatch:
            async for step in dispatch:
                if isinstance(step, TokenStep):
                    tokens.setdefault(step.choice, []).append(step.token_id)
                else:
                    scores += step.logprobs
        assert tokens == {choice: answer.token_ids for choice, answer in enumerate(expected)}
        assert_close(scores, expected[0].prompt_scores)

    on_pair(mha, Shape(tp=2, pp=2), Shape(tp=2), use)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(Shape(tp=4), Shape(tp=2)), (Shape(tp=2, pp=2), Shape(tp=2)), (Shape(tp=2), Shape(pp=2))],
)
def test_what_a_destination_holds_already_is_sent_to_none_of_its_ranks(
    mha: Path, prefill: Shape, decode: Shape
) -> None:
    first, longer = make_prompt(64), [*make_prompt(64), *make_prompt(20, seed=1)]

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        assert await run_on(prefill, decode, tracker, first, salt="") == monolithic(mha, first)
        async with dispatched(prefill, decode, tracker, longer, salt="") as dispatch:
            tokens = [step.token_id async for step in dispatch if isinstance(step, TokenStep)]
            result = await dispatch.finish()
        assert tokens == monolithic(mha, longer)
        executor = decode.service.worker.executor
        layout = executor.spec.kv_layout(block_size=executor.cache.layout.block_size, dtype="float32")
        block_bytes = layout.num_layers * layout.block_layer_bytes  # all ranks' together
        num_new = layout.num_blocks_for(len(longer)) - len(first) // layout.block_size
        assert result.prefill.num_cached_tokens == len(first)
        sent = num_new * block_bytes
        assert result.prefill.transfer.num_bytes == sent
        whole = layout.num_blocks_for(len(first)) * block_bytes
        assert decode.service.worker.receiver.arrived.num_bytes == whole + sent
        [link] = prefill.service.status().links
        assert (link.peer_worker_id, link.num_bytes) == (decode.view.worker_id, whole + sent)

    on_pair(mha, prefill, decode, use)


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.CORRUPT])
def test_a_message_that_another_rank_lost_or_damaged_is_sent_again_by_that_rank(
    mha: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    faulty: list[str] = []

    def once(header: MessageHeader, _: int) -> Fault:
        if faulty or header.layer != 1:
            return Fault.NONE
        faulty.append(f"{header.source_rank} to {header.destination_rank}")
        return fault

    monkeypatch.setattr(rank_process, "make_transport", faulty_maker(once))
    prompt = make_prompt(50)

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        assert await run_on(prefill, decode, tracker, prompt, max_tokens=9) == monolithic(mha, prompt, max_tokens=9)
        assert faulty == ["1 to 1"]

    on_pair(mha, Shape(tp=2), Shape(tp=2), use, lease_s=2.0)


def test_a_cancelled_handoff_ends_on_all_ranks_though_messages_of_some_are_held_up(
    mha: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FaultyTransport] = []
    monkeypatch.setattr(rank_process, "make_transport", faulty_maker(lambda header, _: Fault.DELAY, made))

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        async with dispatched(prefill, decode, tracker, make_prompt(50), max_tokens=9) as dispatch:
            await until(lambda: sum(transport.num_held for transport in made) >= 3)
            await dispatch.abort()

        def is_over() -> bool:
            for transport in made:  # again: what was being posted when the word came is held up too
                transport.release()
            return prefill.is_empty and decode.is_empty

        await until(is_over)
        assert prefill.service.worker.scheduler.pool.num_free == decode.service.worker.scheduler.pool.num_free == 64

    on_pair(mha, Shape(tp=2), Shape(pp=2), use)


def test_a_message_that_is_never_taken_is_fenced_on_the_rank_that_sends_it(
    mha: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FaultyTransport] = []
    monkeypatch.setattr(rank_process, "make_transport", faulty_maker(lambda header, _: Fault.DELAY, made))

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        async with dispatched(prefill, decode, tracker, make_prompt(50), max_tokens=9) as dispatch:
            await until(lambda: sum(transport.num_held for transport in made) >= 3)
            await dispatch.abort()
        await until(lambda: prefill.is_empty and decode.is_empty)
        assert sum(transport.num_held for transport in made) == 0

    on_pair(mha, Shape(tp=2), Shape(), use, lease_s=0.5)


class Unlinked(FaultyTransport):
    """Reaches nobody."""

    def connect(self, address: bytes) -> FaultyLink:
        raise TransportError("no way there")


def test_a_rank_without_a_link_fails_the_handoff_with_what_it_says(mha: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: TransportName, *, worker_id: WorkerId, host: str, device: torch.device) -> FaultyTransport:
        inner = make_transport(name, worker_id=worker_id, host=host, device=device)
        return Unlinked(inner, lambda header, _: Fault.NONE)

    monkeypatch.setattr(rank_process, "make_transport", make)

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        with pytest.raises(TransportError, match="rank 1: no link to the decode worker: no way there"):
            await run_on(prefill, decode, tracker, make_prompt(50))

    on_pair(mha, Shape(tp=2), Shape(tp=2), use)


def test_whatever_the_fabric_does_to_any_rank_no_token_is_wrong_and_no_block_is_lost(
    mha: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, made, outcomes = random.Random(5), list[FaultyTransport](), Counter[str]()
    kinds = [Fault.CORRUPT, Fault.DROP, Fault.DUPLICATE, Fault.DELAY, Fault.NONE]
    maker = faulty_maker(lambda header, _: drawn.choices(kinds, weights=[3, 1, 6, 6, 84])[0], made)
    for module in (rank_process, prefill_pool.actor):
        monkeypatch.setattr(module, "make_transport", maker)

    async def use(prefill: RankedWorker, decode: RankedWorker, tracker: WorkerTracker) -> None:
        async def one(index: int) -> None:
            prompt = make_prompt(8 + 7 * (index % 7), seed=index % 5)
            try:
                tokens = await run_on(prefill, decode, tracker, prompt, max_tokens=3, timeout_s=20.0)
            except TandemError as exc:
                outcomes[type(exc).__name__] += 1
            else:
                outcomes["right" if tokens == monolithic(mha, prompt, max_tokens=3) else "wrong"] += 1

        async def release() -> None:
            while True:
                await asyncio.sleep(0.02)
                for transport in made:
                    transport.release(drawn)

        releasing = asyncio.create_task(release())
        await asyncio.gather(*(one(index) for index in range(NUM_CHAOTIC)))
        await until(lambda: prefill.is_empty and decode.is_empty)
        releasing.cancel()

    on_pair(mha, Shape(tp=2), Shape(tp=2), use, lease_s=2.0, max_resends=1)
    assert outcomes["right"] > NUM_CHAOTIC / 2
    assert outcomes.keys() <= {"right", "HandoffFailed"}


def faulty_maker(policy: FaultPolicy, made: list[FaultyTransport] | None = None) -> Callable[..., FaultyTransport]:
    """Transports for ranks other than 0."""

    def make(name: TransportName, *, worker_id: WorkerId, host: str, device: torch.device) -> FaultyTransport:
        transport = FaultyTransport(make_transport(name, worker_id=worker_id, host=host, device=device), policy)
        if made is not None:
            made.append(transport)
        return transport

    return make


@pytest.mark.parametrize(("shape", "named"), [(Shape(tp=3), "attention heads"), (Shape(pp=4), "layers")])
def test_a_worker_that_cannot_be_cut_so_does_not_start_and_says_why(mha: Path, shape: Shape, named: str) -> None:
    async def start() -> None:
        async with ranked_worker(mha, Role.DECODE, shape):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=named):
        asyncio.run(start())
