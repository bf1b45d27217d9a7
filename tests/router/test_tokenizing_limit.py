"""Long prompts are tokenized a few at a time, and waiting for one's turn counts against the deadline."""

from __future__ import annotations

import asyncio
import threading

import pytest

from router.frontend import _MAX_TOKENIZING, Frontend
from router.tokenizer import ChatTokenizer
from router.validation import SamplingOptions
from tandem.config import RouterConfig
from tandem.errors import DeadlineExceeded
from tandem.observability.metrics import RouterMetrics
from tests.router_harness import runs_async, saying, tokenizer

LONG = "many words " * 500
ONE_TOKEN = SamplingOptions(max_tokens=1)


class HeldTokenizer:
    """The default model's tokenizer, which encodes long texts only when the test lets it."""

    def __init__(self, real: ChatTokenizer) -> None:
        self._real = real
        self._lock = threading.Lock()
        self.num_inside = self.most_inside = 0
        self.may_encode = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def encode(self, text: str) -> list[int]:
        if len(text) < len(LONG):
            return self._real.encode(text)
        with self._lock:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        self.may_encode.wait(30)
        with self._lock:
            self.num_inside -= 1
        return self._real.encode(text)


def make_frontend(held: HeldTokenizer) -> Frontend:
    return Frontend(dispatcher=saying("ok"), tokenizer=held, config=RouterConfig(), metrics=RouterMetrics())


async def full(held: HeldTokenizer) -> None:
    """Until as many texts are being tokenized as may be."""
    async with asyncio.timeout(30):
        while held.num_inside < _MAX_TOKENIZING:  # noqa: ASYNC110  threads count it
            await asyncio.sleep(0.01)


@runs_async
async def test_no_more_than_a_few_texts_are_tokenized_at_once_and_all_are_answered() -> None:
    held = HeldTokenizer(tokenizer())
    frontend = make_frontend(held)
    opening = [asyncio.create_task(frontend.open(LONG, ONE_TOKEN)) for _ in range(3 * _MAX_TOKENIZING)]
    await full(held)
    held.may_encode.set()
    for stream in await asyncio.gather(*opening):
        async with stream:
            assert [delta.finish_reason is not None async for delta in stream][-1]
    assert held.most_inside == _MAX_TOKENIZING
    assert frontend.num_running == 0


@runs_async
async def test_a_request_whose_time_runs_out_before_its_turn_is_told_so_and_leaves_nothing() -> None:
    held = HeldTokenizer(tokenizer())
    frontend = make_frontend(held)
    opening = [asyncio.create_task(frontend.open(LONG, ONE_TOKEN)) for _ in range(_MAX_TOKENIZING)]
    await full(held)
    with pytest.raises(DeadlineExceeded, match="before its prompt was tokenized"):
        await frontend.open(LONG, ONE_TOKEN, timeout_s=0.2)
    assert frontend.num_running == _MAX_TOKENIZING
    held.may_encode.set()
    for stream in await asyncio.gather(*opening):
        await stream.aclose()
    assert frontend.num_running == 0
