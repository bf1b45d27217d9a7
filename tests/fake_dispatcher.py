"""A scripted Dispatcher: given tokens for each request, with the pools' finish rules; stalls and fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from router.dispatch import DispatchResult, ServedModel
from tandem.errors import TandemError
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2
from tandem.types import Request, TokenStep, WorkerId

TEST_MODEL = ServedModel(name="test-model", max_context_tokens=100_000, block_size=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One request's tokens, over again when `repeat`; then `error`. The request's own finish rules end it earlier.

    Stalls before output position `stall_at` until released.
    """

    token_ids: Sequence[int] = ()
    repeat: bool = False
    error: TandemError | None = None
    stall_at: int | None = None


class FakeDispatch:
    """One running request."""

    def __init__(self, request: Request, script: Script) -> None:
        self.request = request
        self.script = script
        self.release = asyncio.Event()
        self.stalled = asyncio.Event()
        self.aborted = asyncio.Event()
        self.finished = asyncio.Event()
        self.num_steps = 0
        self.running = set(range(request.num_choices))

    async def __aiter__(self) -> AsyncIterator[TokenStep]:
        position = 0
        while self.running:
            for token_id in self.script.token_ids:
                if self.script.stall_at == position:
                    self.stalled.set()
                    await self.release.wait()
                reason = self.request.sampling.finish_reason(token_id, position)
                self.num_steps += 1
                for choice in sorted(self.running):
                    yield TokenStep(position=position, token_id=token_id, finish_reason=reason, choice=choice)
                if reason is not None:
                    return
                position += 1
            if not self.script.repeat:
                break
        if self.script.stall_at == position:
            self.stalled.set()
            await self.release.wait()
        if self.script.error is not None:
            raise self.script.error

    def stop(self, choice: int) -> None:
        self.running.discard(choice)

    async def finish(self) -> DispatchResult:
        self.finished.set()
        return DispatchResult(
            prefill_worker=WorkerId("prefill-0"),
            decode_worker=WorkerId("decode-0"),
            prefill=common_pb2.PrefillTimings(num_cached_tokens=3, num_chunks=1),
            decode=common_pb2.DecodeTimings(num_iterations=self.num_steps),
        )

    async def abort(self) -> None:
        self.aborted.set()


@dataclass
class FakeDispatcher:
    """Gives each request the script that `script` returns for it; keeps every dispatch in order."""

    script: Callable[[Request], Script]
    served: ServedModel | None = TEST_MODEL
    is_ready: bool = True
    refuse: TandemError | None = None
    dispatches: list[FakeDispatch] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def dispatch(self, request: Request) -> FakeDispatch:
        if self.refuse is not None:
            raise self.refuse
        dispatch = FakeDispatch(request, self.script(request))
        self.dispatches.append(dispatch)
        self.arrived.set()
        return dispatch

    def model(self) -> ServedModel | None:
        return self.served

    def ready(self) -> bool:
        return self.is_ready

    async def status(self) -> inference_pb2.ClusterStatus:
        worker = inference_pb2.WorkerStatus(worker_id="prefill-0", role="prefill", state="ready")
        return inference_pb2.ClusterStatus(workers=[worker], model="test-model")
