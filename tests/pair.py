"""One prefill and one decode worker in this process, with real gRPC, a real transport and a small model.

The router's part is played by its own `LegDispatch` on a route made by hand, or by `Legs`, which a test can close one
by one. Whoever leaves the pair has shown that every block of both pools is free again.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from decode_pool.service import DecodeService
from decode_pool.worker import DecodeWorker
from kv_transfer.segments import HOST
from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from prefill_pool.job import PrefillLimits
from prefill_pool.service import PrefillService
from prefill_pool.worker import PrefillWorker
from router.dispatcher import LegDispatch
from router.policy import Route
from router.tracker import WorkerTracker
from router.view import WorkerView
from tandem.config import ModelConfig, TransportName
from tandem.kv.layout import Dtype
from tandem.kv.tiering import WritePolicy
from tandem.model.executor import Executor
from tandem.model.torch_executor import TorchExecutor, load_executor
from tandem.prefix_store.client import Locate, StoreClient
from tandem.prefix_store.client_session import ClientIdentity
from tandem.registry import Registry
from tandem.rpc.authentication import CallGuard
from tandem.rpc.server import RpcServer, start_server
from tandem.rpc.tandem.v1 import worker_pb2_grpc
from tandem.secret import ClusterKey
from tandem.types import Epoch, Request, RequestId, Role, SamplingParams, TokenStep, WorkerId
from tandem.worker.build import worker_facts
from tandem.worker.host import WorkerFacts
from tandem.worker.prefix_tiers import NO_TIERS, PrefixTiers
from tests.engine_driver import EngineDriver
from tests.factories import CLUSTER_KEY, make_prefix, make_sampling
from tests.fakes import FaultPolicy, FaultyTransport
from tests.stepped_executor import SteppedExecutor

BLOCK_SIZE = 8
CHUNK_TOKENS = 32
SETTLE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PairOptions:
    """What a test may want different."""

    transport: TransportName = "shm"
    faults: FaultPolicy | None = None
    """With it, the prefill worker's transport is a `FaultyTransport`."""
    dtype: Dtype = "float32"
    devices: tuple[torch.device, torch.device] = (HOST, HOST)
    """Of prefill and decode."""
    prefill_blocks: int = 64
    decode_blocks: int = 64
    swap_blocks: int = 64
    growth_tokens: int = 256
    max_batch_sequences: int = 16
    chunk_tokens: int = CHUNK_TOKENS
    max_iteration_s: float = 0.0
    lease_s: float = 10.0
    """Short only where a test waits for its end: a busy machine can hold up a renewal for a second."""
    max_resends: int = 1
    layers_per_message: int = 1
    """Fixed, so that tests know their messages; 0 as measured."""
    digest_every: int = 0
    min_gbps: float = 0.0
    strict: bool = False
    make_executor: Callable[..., Executor] | None = None
    """Takes `num_blocks` and `allocate`; without one, the model is loaded."""
    decode_fingerprint: str = ""
    """Instead of the true one."""
    store: Locate | None = None
    """Where their node's prefix store is."""
    write_policy: WritePolicy = "through"
    router_key: ClusterKey = CLUSTER_KEY
    prefill_key: ClusterKey = CLUSTER_KEY


@dataclass(kw_only=True)
class Pair:
    """A running pair."""

    model: Path
    options: PairOptions
    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_executor: SteppedExecutor
    decode_executor: SteppedExecutor
    prefill_view: WorkerView
    decode_view: WorkerView
    tracker: WorkerTracker
    crashes: list[BaseException]
    loop_errors: list[str]
    """What was raised in callbacks of the event loop, and in tasks that nobody waited for."""

    @property
    def fabric(self) -> FaultyTransport:
        """The prefill worker's transport, when it is a faulty one."""
        assert isinstance(self.prefill.transport, FaultyTransport)
        return self.prefill.transport

    @property
    def prefill_stub(self) -> worker_pb2_grpc.PrefillWorkerAsyncStub:
        return worker_pb2_grpc.PrefillWorkerStub(self.tracker.channels.get(self.prefill_view.address))

    @property
    def decode_stub(self) -> worker_pb2_grpc.DecodeWorkerAsyncStub:
        return worker_pb2_grpc.DecodeWorkerStub(self.tracker.channels.get(self.decode_view.address))

    def control_stub(self, role: Role) -> worker_pb2_grpc.WorkerAsyncStub:
        view = self.prefill_view if role is Role.PREFILL else self.decode_view
        return worker_pb2_grpc.WorkerStub(self.tracker.channels.get(view.address))

    def dispatch(self, prompt: Sequence[int], *, timeout_s: float = 30.0, **sampling: Any) -> LegDispatch:
        """Starts a request as the router does."""
        request = make_live_request(prompt, timeout_s=timeout_s, **sampling)
        decode = self.decode_view if request.sampling.max_tokens > 1 else None
        dispatch = LegDispatch(request, Route(prefill=self.prefill_view, decode=decode), self.tracker)
        dispatch.start()
        return dispatch

    async def run(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        """A request from its start to its last token. Raises TandemError."""
        dispatch = self.dispatch(prompt, **fields)
        try:
            return [step.token_id async for step in dispatch if isinstance(step, TokenStep)]
        finally:
            await dispatch.finish()

    async def settled(self) -> None:
        """Waits until nothing of any request is left on either side, and every block is free."""
        await until(self.is_empty, what=self.describe)
        for worker in (self.prefill, self.decode):
            worker.scheduler.check_invariants()

    def is_empty(self) -> bool:
        """Whether both pools are whole and nobody waits, runs or moves."""
        return all(
            worker.scheduler.pool.num_free == worker.scheduler.pool.num_blocks and not len(worker.scheduler)
            and worker.write_back.is_idle
            for worker in (self.prefill, self.decode)
        ) and not (self.prefill.num_handoffs or len(self.decode.receiver) or self.num_swapped_blocks)

    @property
    def num_swapped_blocks(self) -> int:
        """Slots of the decode worker's host memory that are in use."""
        space = self.decode.scheduler.swap_space
        return space.num_slots - space.num_free

    def describe(self) -> str:
        """What is left, for failures."""
        pools = [(w.worker_id, w.scheduler.pool.num_free, len(w.scheduler)) for w in (self.prefill, self.decode)]
        return f"(worker, free blocks, sequences): {pools}; {self.prefill.num_handoffs} handoffs out"


@asynccontextmanager
async def running_pair(model: Path, options: PairOptions | None = None) -> AsyncIterator[Pair]:
    """A pair that has been settled and closed when the block is left without an error."""
    options = options or PairOptions()
    crashes: list[BaseException] = []
    loop_errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: loop_errors.append(str(context)))
    prefill, prefill_executor, prefill_facts = await _prefill_worker(model, options, crashes.append)
    decode, decode_executor, decode_facts = await _decode_worker(model, options, crashes.append)
    services = (PrefillService(prefill, prefill_facts), DecodeService(decode, decode_facts))
    servers = [
        await start_server("127.0.0.1", 0, service.register, service.service_names(), guard=CallGuard(CLUSTER_KEY))
        for service in services
    ]
    registry = Registry("redis://127.0.0.1:1/0", cluster="nobody", ttl_s=1.0)
    pair = Pair(
        model=model,
        options=options,
        prefill=prefill,
        decode=decode,
        prefill_executor=prefill_executor,
        decode_executor=decode_executor,
        prefill_view=_view(prefill.worker_id, prefill_facts, servers[0], epoch=prefill.epoch),
        decode_view=_view(decode.worker_id, decode_facts, servers[1], epoch=decode.epoch),
        tracker=WorkerTracker(registry, key=options.router_key, on_change=lambda: None),
        crashes=crashes,
        loop_errors=loop_errors,
    )
    try:
        yield pair
        if not crashes:
            await pair.settled()
    finally:
        prefill_executor.go()
        decode_executor.go()
        await pair.tracker.close()
        await registry.close()
        await asyncio.gather(*(server.stop(0.0) for server in servers))
        await asyncio.gather(*(service.close() for service in services))
        loop.set_exception_handler(None)
    assert not loop_errors, loop_errors


async def _tiers(options: PairOptions, worker_id: WorkerId, executor: Executor, fingerprint: str) -> PrefixTiers:
    if options.store is None:
        return NO_TIERS
    layout = executor.cache.layout
    identity = ClientIdentity(
        worker_id=worker_id,
        fingerprint=fingerprint,
        block_bytes=layout.num_layers * layout.block_layer_bytes,
        num_layers=layout.num_layers,
    )
    client = await StoreClient.attach(options.store, key=CLUSTER_KEY, identity=identity)
    return PrefixTiers(client=client, write_policy=options.write_policy)


async def _prefill_worker(
    model: Path, options: PairOptions, on_crash: Callable[[BaseException], None]
) -> tuple[PrefillWorker, SteppedExecutor, WorkerFacts]:
    transport: Transport = make_transport(options.transport, worker_id=WorkerId("prefill-0"), device=options.devices[0])
    if options.faults is not None:
        transport = FaultyTransport(transport, options.faults)
    executor, facts = _executor(model, options, Role.PREFILL, transport)
    worker = PrefillWorker(
        executor,
        worker_id=WorkerId("prefill-0"),
        epoch=Epoch(3),
        fingerprint=facts.fingerprint,
        key=options.prefill_key,
        transport=transport,
        limits=PrefillLimits(
            max_batch_tokens=options.chunk_tokens,
            max_iteration_s=options.max_iteration_s,
            max_batch_sequences=options.max_batch_sequences,
            ticket_lookahead_tokens=4 * CHUNK_TOKENS,
            ageing_tokens_per_s=50.0,
            lease_s=options.lease_s,
            max_resends=options.max_resends,
            layers_per_message=options.layers_per_message,
            digest_every=options.digest_every,
            min_gbps=options.min_gbps,
            strict=options.strict,
        ),
        on_crash=on_crash,
        tiers=await _tiers(options, WorkerId("prefill-0"), executor, facts.fingerprint),
    )
    return worker, executor, facts


async def _decode_worker(
    model: Path, options: PairOptions, on_crash: Callable[[BaseException], None]
) -> tuple[DecodeWorker, SteppedExecutor, WorkerFacts]:
    transport = make_transport(options.transport, worker_id=WorkerId("decode-0"), device=options.devices[1])
    executor, facts = _executor(model, options, Role.DECODE, transport)
    worker = DecodeWorker(
        executor,
        worker_id=WorkerId("decode-0"),
        epoch=Epoch(4),
        fingerprint=options.decode_fingerprint or facts.fingerprint,
        key=CLUSTER_KEY,
        transport=transport,
        max_batch_sequences=options.max_batch_sequences,
        growth_tokens=options.growth_tokens,
        swap_blocks=options.swap_blocks,
        lease_s=options.lease_s,
        on_crash=on_crash,
        tiers=await _tiers(options, WorkerId("decode-0"), executor, facts.fingerprint),
    )
    return worker, executor, facts


def _executor(
    model: Path, options: PairOptions, role: Role, transport: Transport
) -> tuple[SteppedExecutor, WorkerFacts]:
    num_blocks = options.prefill_blocks if role is Role.PREFILL else options.decode_blocks
    executor: Executor
    if options.make_executor is not None:
        executor = options.make_executor(num_blocks=num_blocks, allocate=transport.allocate)
    else:
        executor = load(model, num_blocks, options.dtype, transport.allocate)
    executor.cache.slab.fill_(0xFF)  # NaN: nothing may be read before it is written
    config = ModelConfig(source=str(model), block_size=BLOCK_SIZE, dtype=options.dtype)
    return SteppedExecutor(executor), worker_facts(role, config, executor, transport=transport.name)


def load(model: Path, num_blocks: int, dtype: Dtype, allocate: Callable[[int], torch.Tensor]) -> TorchExecutor:
    """The small model with a cache of its own."""
    return load_executor(
        str(model), dtype=dtype, block_size=BLOCK_SIZE, num_blocks=num_blocks, allocate=allocate, num_threads=1
    )


def _view(worker_id: WorkerId, facts: WorkerFacts, server: RpcServer, *, epoch: Epoch) -> WorkerView:
    return WorkerView(
        worker_id=worker_id,
        role=facts.role,
        address=server.address,
        epoch=epoch,
        fingerprint=facts.fingerprint,
        node="here",
        transport=facts.transport,
        model=facts.model,
        max_context_tokens=facts.max_context_tokens,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        num_waiting_tokens=0,
        num_used_blocks=0,
        num_requests=0,
    )


# --- requests


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that differ from prompt to prompt."""
    drawn = random.Random(1000 * seed + num_tokens)
    return [drawn.randrange(256) for _ in range(num_tokens)]


def make_live_request(
    prompt: Sequence[int],
    *,
    timeout_s: float = 30.0,
    num_choices: int = 1,
    salt: str | None = "",
    priority: int = 0,
    **sampling: Any,
) -> Request:
    """Greedy, four tokens, on this process's clock. Without a salt nothing of the prompt is found or kept."""
    now = time.monotonic()
    return Request(
        request_id=RequestId(uuid.uuid4().hex),
        prompt_token_ids=tuple(prompt),
        sampling=make_sampling(**sampling),
        arrival_s=now,
        deadline_s=now + timeout_s,
        num_choices=num_choices,
        priority=priority,
        prefix=None if salt is None else make_prefix(prompt, block_size=BLOCK_SIZE, salt=salt),
    )


@cache
def driver_of(model: Path, dtype: Dtype = "float32") -> EngineDriver:
    """One engine that prefills and decodes, alone."""
    executor = load(model, 256, dtype, lambda num_bytes: torch.full((num_bytes,), 0xFF, dtype=torch.uint8))
    return EngineDriver(executor, max_sequences=1, chunk_tokens=CHUNK_TOKENS)


def monolithic(model: Path, prompt: Sequence[int], *, dtype: Dtype = "float32", **sampling: Any) -> list[int]:
    """What one engine that prefills and decodes gives for a request alone."""
    params: SamplingParams = make_sampling(**sampling)
    return driver_of(model, dtype).run([prompt], params)[0]


async def until(
    condition: Callable[[], bool], *, timeout_s: float = SETTLE_S, what: Callable[[], str] = lambda: ""
) -> None:
    """Looks until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not fulfilled within {timeout_s:g} s. {what()}"
        await asyncio.sleep(0.002)


# --- legs
