"""Constant load on a cluster: clients that each send one greedy request after another, and what became of every one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tandem.tasks import cancel_all


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One request. Times in seconds on the monotonic clock; `error` is empty when it ended as it should."""

    prompt: str
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = ()
    prefill_worker: str = ""
    decode_worker: str = ""
    error: str = ""


@dataclass(kw_only=True, slots=True)
class Load:
    """What has happened so far, and how many tokens each request asks for. `prompts` are token ids by name."""

    prompts: Mapping[str, Sequence[int]]
    max_tokens: int
    outcomes: list[Outcome] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False

    @property
    def errors(self) -> list[str]:
        """Of every request that failed."""
        return [f"{outcome.prompt}: {outcome.error}" for outcome in self.outcomes if outcome.error]

    def tokens_of(self, prompt: str) -> set[tuple[int, ...]]:
        """All answers that a prompt got."""
        return {outcome.tokens for outcome in self.outcomes if outcome.prompt == prompt and not outcome.error}

    async def wait_for(self, num_outcomes: int) -> None:
        """Returns when so many more requests have ended."""
        wanted = len(self.outcomes) + num_outcomes
        while len(self.outcomes) < wanted:
            self.done.clear()
            await self.done.wait()

    async def client(self, endpoint: str, first: int) -> None:
        """Sends prompts in turn, beginning with number `first`, until stopped; then the last request ends."""
        names = sorted(self.prompts)
        async with open_channel(endpoint) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while not self.stopping:
                self.outcomes.append(await self.send(stub, names[first % len(names)]))
                self.done.set()
                first += 1

    async def send(self, stub: inference_pb2_grpc.InferenceAsyncStub, name: str) -> Outcome:
        """One request to its end, whatever that is. Each is computed whole, as if no one had said it before."""
        sampling = common_pb2.SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True, cache_salt=uuid.uuid4().hex
        )
        ids = inference_pb2.TokenIds(ids=self.prompts[name])
        tokens: list[int] = []
        start_s = time.monotonic()
        step = inference_pb2.GenerateResponse()
        try:
            async for step in stub.Generate(inference_pb2.GenerateRequest(token_ids=ids, sampling=sampling)):
                tokens += step.token_ids
        except grpc.aio.AioRpcError as exc:
            error = f"{exc.code().name} after {len(tokens)} tokens: {exc.details()}"
            return Outcome(prompt=name, start_s=start_s, end_s=time.monotonic(), error=error)
        return Outcome(
            prompt=name,
            start_s=start_s,
            end_s=time.monotonic(),
            tokens=tuple(tokens),
            prefill_worker=step.timings.prefill_worker,
            decode_worker=step.timings.decode_worker,
        )


@asynccontextmanager
async def constant_load(
    endpoint: str, prompts: Mapping[str, Sequence[int]], *, num_clients: int, max_tokens: int
) -> AsyncGenerator[Load, None]:
    """Load from `num_clients` clients inside the block; at its end running requests end, and no more are sent."""
    load = Load(prompts=prompts, max_tokens=max_tokens)
    clients = [asyncio.create_task(load.client(endpoint, first)) for first in range(num_clients)]
    try:
        yield load
        load.stopping = True
        await asyncio.gather(*clients)
    finally:
        await cancel_all(clients)
