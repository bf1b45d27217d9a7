"""One router's front over two ways to compute: a pair of workers with a real handoff, and one engine alone.

Everything that a client could see is compared; only what is drawn anew for each answer (ids of calls) is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from router.dispatch import DispatchResult, ServedModel, Step
from router.dispatcher import LegDispatch
from router.frontend import Frontend
from router.output import OutputDelta, merged
from router.policy import Route
from router.prompt import Prompt
from router.tokenizer import ChatTokenizer
from router.validation import SamplingOptions
from tandem.config import RouterConfig
from tandem.observability.metrics import RouterMetrics
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2
from tandem.types import PromptScores, Request, TokenLogprobs, WorkerId
from tests.engine_driver import Answer, EngineDriver
from tests.pair import BLOCK_SIZE, Pair, PairOptions, driver_of, running_pair

TOLERANCE = 1e-4
"""Of log-probabilities: rounding differs with the batch."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request."""

    prompt: Prompt
    options: SamplingOptions


@dataclass(kw_only=True)
class Seen:
    """What a client sees of one request."""

    choices: list[OutputDelta] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    usage: tuple[int, int, int] = (0, 0, 0)


class EngineDispatch:
    """A `Dispatch` that was answered at once; tokens of all choices come position by position."""

    def __init__(self, request: Request, answers: Sequence[Answer]) -> None:
        self._request = request
        self._answers = answers
        self._stopped: set[int] = set()

    async def __aiter__(self) -> AsyncIterator[Step]:
        if self._request.sampling.num_prompt_logprobs is not None:
            yield PromptScores(logprobs=tuple(self._answers[0].prompt_scores))
        for position in range(max(len(answer.steps) for answer in self._answers)):
            for choice, answer in enumerate(self._answers):
                if position < len(answer.steps) and choice not in self._stopped:
                    yield answer.steps[position]

    def stop(self, choice: int) -> None:
        self._stopped.add(choice)

    async def finish(self) -> DispatchResult:
        return DispatchResult(
            prefill_worker=WorkerId("engine"), decode_worker=None, prefill=common_pb2.PrefillTimings(), decode=None
        )

    async def abort(self) -> None:
        return None


class EngineDispatcher:
    """A `Dispatcher` over one engine."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver

    def dispatch(self, request: Request) -> EngineDispatch:
        return EngineDispatch(request, self._driver.answer([request])[0])

    def model(self) -> ServedModel:
        return ServedModel(name="tiny", max_context_tokens=1200, block_size=BLOCK_SIZE)

    def ready(self) -> bool:
        return True

    async def status(self) -> inference_pb2.ClusterStatus:
        return inference_pb2.ClusterStatus()


class PairDispatcher(EngineDispatcher):
    """A `Dispatcher` over a pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def dispatch(self, request: Request) -> LegDispatch:  # type: ignore[override]
        decode = self._pair.decode_view if request.sampling.max_tokens > 1 else None
        dispatch = LegDispatch(request, Route(prefill=self._pair.prefill_view, decode=decode), self._pair.tracker)
        dispatch.start()
        return dispatch


async def seen(frontend: Frontend, asked: Asked) -> Seen:
    """Runs one request to its end. Raises TandemError."""
    by_choice: dict[int, OutputDelta] = {}
    async with await frontend.open(asked.prompt, asked.options) as stream:
        async for delta in stream:
            known = by_choice.get(delta.choice)
            by_choice[delta.choice] = delta if known is None else merged([known, delta])
        usage = stream.usage
        assert usage is not None
        return Seen(
            choices=[by_choice[choice] for choice in sorted(by_choice)],
            prompt_logprobs=stream.prompt_logprobs,
            usage=(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        )


def make_frontend(dispatcher: EngineDispatcher, tokenizer: ChatTokenizer) -> Frontend:
    """A router's front."""
    return Frontend(dispatcher=dispatcher, tokenizer=tokenizer, config=RouterConfig(), metrics=RouterMetrics())


def on_both(model: Path, asked: Sequence[Asked], options: PairOptions | None = None) -> tuple[list[Seen], list[Seen]]:
    """All requests at once on a pair, and one by one on one engine."""
    tokenizer = ChatTokenizer.load(model)

    async def run() -> tuple[list[Seen], list[Seen]]:
        async with running_pair(model, options) as pair:
            disaggregated = make_frontend(PairDispatcher(pair), tokenizer)
            on_pair = await asyncio.gather(*(seen(disaggregated, each) for each in asked))
        monolithic = make_frontend(EngineDispatcher(driver_of(model)), tokenizer)
        return list(on_pair), [await seen(monolithic, each) for each in asked]

    return asyncio.run(run())


def assert_same(pair: Seen, engine: Seen) -> None:
    """Raises AssertionError for the first thing that a client could tell apart."""
    assert len(pair.choices) == len(engine.choices)
    for ours, alone in zip(pair.choices, engine.choices, strict=True):
        assert ours.token_ids == alone.token_ids
        assert ours.text == alone.text
        assert ours.finish_reason == alone.finish_reason
        assert [(c.index, c.name) for c in ours.tool_calls if c.name] == [
            (c.index, c.name) for c in alone.tool_calls if c.name
        ]
        assert "".join(c.arguments for c in ours.tool_calls) == "".join(c.arguments for c in alone.tool_calls)
        assert_close(ours.logprobs, alone.logprobs)
    assert (pair.prompt_logprobs is None) == (engine.prompt_logprobs is None)
    assert_close(pair.prompt_logprobs or (), engine.prompt_logprobs or ())
    assert pair.usage == engine.usage


def assert_close(ours: Sequence[TokenLogprobs], alone: Sequence[TokenLogprobs]) -> None:
    """Equal ids, and values within the tolerance."""
    assert [entry.top_ids for entry in ours] == [entry.top_ids for entry in alone]
    assert numbers(ours) == pytest.approx(numbers(alone), abs=TOLERANCE)


def numbers(entries: Sequence[TokenLogprobs]) -> list[float]:
    return [value for entry in entries for value in (entry.logprob, *entry.top_logprobs)]


def asking(prompt: Prompt, **options: Any) -> Asked:
    """Greedy and twelve tokens, unless said otherwise."""
    return Asked(prompt=prompt, options=SamplingOptions(**{"temperature": 0.0, "max_tokens": 12, **options}))
