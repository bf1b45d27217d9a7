"""A prefill worker: jobs, the engine over `scheduler.PrefillScheduler`, and a handoff for each job that needs one.

Owns jobs and their life; which tokens to compute is the scheduler's, how KV moves is `kv_transfer`'s.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from kv_transfer.digest import DigestPolicy
from kv_transfer.link_status import link_status
from kv_transfer.links import LinkTable
from kv_transfer.offer import Offer
from kv_transfer.sender import HandoffCallbacks, OutgoingHandoff
from kv_transfer.shipments import Shipments
from kv_transfer.source import SourceHandoff
from kv_transfer.source_ranks import SourceRanks
from kv_transfer.source_side import SourceSide
from kv_transfer.ticket import Claims
from kv_transfer.transport import Transport
from prefill_pool.batch import scores_event, slice_of
from prefill_pool.job import Job, PrefillLimits, Target
from prefill_pool.pace import Pace
from prefill_pool.scheduler import FirstOutput, PrefillPlan, PrefillScheduler
from prefill_pool.shipping import KvShare, blocks_after, sized_chunk
from prefill_pool.store_side import StoreSide
from prefill_pool.timings import prefill_timings
from tandem.errors import ContextLengthExceeded, DeadlineExceeded, DuplicateRequest, TandemError, WorkerUnavailable
from tandem.kv.block_copies import BlockCopies
from tandem.kv.prefix_pool import PrefixPool
from tandem.model.choice import check_token_ids, dead_end, make_choices
from tandem.model.executor import Executor, SliceOutput
from tandem.model.grammar import CompiledGrammar
from tandem.observability.worker_metrics import PrefillMetrics
from tandem.rpc.channels import Channels
from tandem.rpc.convert import check_prefix, first_token_to_proto
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.secret import ClusterKey
from tandem.types import Epoch, Request, RequestId, SampledToken, TokenLogprobs, WorkerId
from tandem.worker.engine import Engine
from tandem.worker.prefix_tiers import NO_TIERS, PrefixTiers
from tandem.worker.write_back import WriteBack


class PrefillWorker:
    """All methods but the engine's hooks are for the event loop that made it."""

    def __init__(
        self,
        executor: Executor,
        *,
        worker_id: WorkerId,
        epoch: Epoch,
        fingerprint: str,
        key: ClusterKey,
        transport: Transport,
        limits: PrefillLimits,
        on_crash: Callable[[BaseException], None],
        tiers: PrefixTiers = NO_TIERS,
        ranks: SourceRanks | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.executor = executor
        self.num_tokens = 0
        self.metrics = PrefillMetrics()
        self.transport = transport
        self.links = LinkTable(transport, min_gbps=limits.min_gbps, strict=limits.strict)
        self._side = SourceSide(
            cache=executor.cache, links=self.links, digests=DigestPolicy(limits.digest_every), ranks=ranks
        )
        self.is_draining = False
        self._fingerprint = fingerprint
        self._key = key
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[RequestId, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._channels = Channels(key)
        layout = executor.cache.layout
        self._block_size = layout.block_size
        self._share = KvShare(
            num_layers=len(executor.cache.shard.layers),
            block_size=layout.block_size,
            block_layer_bytes=layout.block_layer_bytes,
        )
        self._elapsed_s = 0.0
        self._pace = Pace(
            max_iteration_s=limits.max_iteration_s,
            block_size=self._block_size,
            max_batch_tokens=limits.max_batch_tokens,
        )
        self.scheduler = PrefillScheduler(
            PrefixPool(executor.cache.num_blocks),
            block_size=self._block_size,
            max_batch_tokens=limits.max_batch_tokens,
            max_batch_sequences=limits.max_batch_sequences,
            ticket_lookahead_tokens=limits.ticket_lookahead_tokens,
            ageing_tokens_per_s=limits.ageing_tokens_per_s,
        )
        self._engine: Engine[PrefillPlan, list[tuple[SampledToken, ...]]] = Engine(
            "prefill-engine", schedule=self._schedule, execute=self._execute, commit=self._commit, on_crash=on_crash
        )
        self.store = StoreSide(
            self.scheduler,
            lock=self._engine.lock,
            copies=BlockCopies(executor.cache),
            tiers=tiers,
            fail=lambda job, error: self._soon(self.fail, job, error),
        )
        self._engine.start()

    @property
    def write_back(self) -> WriteBack:
        """What tells of this worker's blocks and copies them to the store."""
        return self.store.write_back

    @property
    def lock(self) -> threading.Condition:
        """Hold it to look at the scheduler: the engine's thread changes it."""
        return self._engine.lock

    @property
    def num_iterations(self) -> int:
        """Iterations since start."""
        return self._engine.num_iterations

    def link_statuses(self) -> list[inference_pb2.LinkStatus]:
        """Every open link, of all ranks; other ranks' as they were when their last handoff ended."""
        others = [] if self._side.ranks is None else self._side.ranks.links()
        return [*map(link_status, self.links.links()), *others]

    @property
    def num_handoffs(self) -> int:
        """Handoffs that have not ended."""
        return len(self._tasks)

    def submit(self, request: Request, target: Target | None, grammar: CompiledGrammar | None = None) -> Job:
        """Takes a request; `grammar` is its own, compiled.

        Raises WorkerUnavailable, DuplicateRequest, InvalidRequest or ContextLengthExceeded.
        """
        if self.is_draining:
            raise WorkerUnavailable(f"{self.worker_id} is draining")
        if request.request_id in self._jobs or request.request_id in self.scheduler:
            raise DuplicateRequest(f"request {request.request_id} is already on {self.worker_id}", param="request_id")
        self.executor.spec.check_prompt(request.prompt_token_ids)
        capacity = self.scheduler.pool.num_blocks * self._block_size
        if len(request.prompt_token_ids) > capacity:
            raise ContextLengthExceeded(f"the prompt has {len(request.prompt_token_ids)} tokens, {capacity} fit here")
        check_token_ids(request.sampling, self.executor.spec.vocab_size)
        check_prefix(request, self._block_size)
        job = Job(request=request, target=target, choices=make_choices(request, grammar))
        self._jobs[request.request_id] = job
        self._idle.clear()
        with self._engine.lock:
            self.scheduler.add(request, destination=None if target is None else target.worker_id)
        job.timer = self._loop.call_later(max(0.0, request.deadline_s - time.monotonic()), self._expire, job)
        self.store.fetch(job, compute_s_per_token=self._pace.token_s)
        self._advance()
        return job

    def abort(self, request_id: RequestId, error: TandemError) -> None:
        """Ends a request in any phase. Unknown ids are fine."""
        job = self._jobs.get(request_id)
        if job is not None:
            self.fail(job, error)

    def start_draining(self) -> None:
        """Refuses new requests."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Returns when no job and no handoff is left."""
        await self._idle.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def end_requests(self) -> None:
        """Ends what has not ended: the worker shuts down."""
        for job in list(self._jobs.values()):
            self.fail(job, WorkerUnavailable(f"{self.worker_id} is stopping: it shut down before the request ended"))

    async def close(self) -> None:
        """Aborts what is left, ends threads and links, frees the cache."""
        self.end_requests()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._limits.lease_s)
        await self.store.end_fetches()
        await asyncio.to_thread(self._engine.stop)
        await self.store.close()
        self.links.close()
        await self._channels.close()
        if self._side.ranks is not None:
            await asyncio.to_thread(self._side.ranks.close)
        self.executor.grammars.close()
        self.transport.close()

    # --- event loop

    def _advance(self) -> None:
        """Asks for the tickets that are wanted now, and wakes the engine."""
        with self._engine.lock:
            wanted = self.scheduler.wanted_tickets()
            self._engine.lock.notify()
        for request_id in wanted:
            job = self._jobs.get(request_id)
            if job is not None and not job.failed:
                self._open_handoff(job)

    def _open_handoff(self, job: Job) -> None:
        assert job.target is not None
        request = job.request
        limits = self._limits
        job.handoff = OutgoingHandoff(
            self._offer(request, job.target),
            side=self._side,
            machine=SourceHandoff(lease_s=limits.lease_s, max_resends=limits.max_resends, now=time.monotonic()),
            callbacks=HandoffCallbacks(
                ticket=lambda: self._on_ticket(request.request_id),
                failed=lambda error: self._soon(self.fail, job, error),
                ended=lambda: self._soon(self._end, job),
            ),
        )
        stub = worker_pb2_grpc.DecodeWorkerStub(self._channels.get(job.target.address))
        task = asyncio.create_task(job.handoff.run(stub))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _offer(self, request: Request, target: Target) -> Offer:
        claims = Claims(
            handoff_id=target.handoff_id,
            request_id=request.request_id,
            source=self.worker_id,
            source_epoch=self.epoch,
            destination=target.worker_id,
            destination_epoch=target.epoch,
            expires_s=time.time() + request.deadline_s - time.monotonic(),
            source_tp=self.executor.cache.sharding.tp,
            source_pp=self.executor.cache.sharding.pp,
        )
        return Offer(
            key=self._key,
            claims=claims,
            num_prompt_tokens=len(request.prompt_token_ids),
            fingerprint=self._fingerprint,
        )

    def _on_ticket(self, request_id: RequestId) -> None:
        with self._engine.lock:
            self.scheduler.ticket(request_id)
            self._engine.lock.notify()

    def _expire(self, job: Job) -> None:
        if not job.over:
            self.fail(job, DeadlineExceeded("the request's time ran out in the prefill pool"))

    def fail(self, job: Job, error: TandemError) -> None:
        """Ends a job early: no more compute, blocks back when the handoff lets go of them."""
        if job.failed or job.over:
            return
        job.failed = True
        job.events.put_nowait(error)
        self.metrics.failed(error, moving=job.handoff is not None)
        with self._engine.lock:
            self.scheduler.abort(job.request.request_id)
        if job.handoff is None:
            self._end(job)
        else:
            job.handoff.abort(error)

    def _end(self, job: Job) -> None:
        """The job's blocks are ours again and nothing of it is left."""
        if job.over:
            return
        job.over = True
        job.loan.release()
        if job.timer is not None:
            job.timer.cancel()
        with self._engine.lock:
            self.scheduler.release(job.request.request_id)
        del self._jobs[job.request.request_id]
        if job.handoff is not None:
            self.metrics.transfer_bytes.inc(sum(message.num_bytes for message in job.handoff.messages))
        if not job.failed:
            timings = self._timings(job)
            self.metrics.completed(timings)
            done = worker_pb2.PrefillDone(timings=timings)
            job.events.put_nowait(worker_pb2.PrefillEvent(done=done))
        if not self._jobs:
            self._idle.set()
        self._advance()

    def _timings(self, job: Job) -> common_pb2.PrefillTimings:
        timings = prefill_timings(
            arrival_s=job.request.arrival_s,
            started_s=job.started_s,
            last_kv_s=job.last_kv_s,
            ended_s=job.ended_s,
            num_chunks=job.num_chunks,
            handoff=job.handoff,
        )
        timings.num_companions = job.num_companions
        timings.num_cached_tokens = job.num_cached_tokens
        return timings

    def _on_first(self, outputs: tuple[FirstOutput, ...]) -> None:
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None or job.failed:
                continue
            job.num_cached_tokens = output.num_cached
            self.metrics.prefilled(
                len(job.request.prompt_token_ids), num_cached=output.num_cached, num_loaded=job.num_loaded_tokens
            )
            for step in output.steps:
                job.events.put_nowait(worker_pb2.PrefillEvent(first_token=first_token_to_proto(step)))
            if job.handoff is None:
                self._end(job)
            else:
                job.handoff.computed(output.steps, num_cached_tokens=job.num_cached_tokens)
        self._advance()

    def _on_scores(self, job: Job, scores: tuple[TokenLogprobs, ...]) -> None:
        if not job.failed:
            job.events.put_nowait(scores_event(scores))

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    # --- engine thread

    def _schedule(self) -> PrefillPlan | None:
        plan = self.scheduler.schedule(most_tokens=self._pace.budget)
        return plan if plan.chunks else None

    def _execute(self, plan: PrefillPlan) -> list[tuple[SampledToken, ...]]:
        now = time.monotonic()
        jobs = [self._jobs.get(chunk.request.request_id) for chunk in plan.chunks]
        batch = [
            slice_of(chunk, () if job is None else job.choices) for job, chunk in zip(jobs, plan.chunks, strict=True)
        ]
        layers, token_s = self.executor.cache.shard.layers, self._pace.token_s
        shipments = Shipments(layers=layers, layers_per_message=self._limits.layers_per_message)
        layer_s = token_s / self.executor.spec.num_layers * plan.num_tokens
        for job, chunk in zip(jobs, plan.chunks, strict=True):
            if job is None:
                continue
            job.started_s = job.started_s or now
            job.num_chunks += 1
            job.num_companions = max(job.num_companions, len(plan.chunks) - 1)
            first, job.num_blocks_computed = job.num_blocks_computed, blocks_after(chunk, self._block_size)
            if job.handoff is not None and job.num_blocks_computed > first:
                num_blocks = job.num_blocks_computed - first
                sized = sized_chunk(chunk, self._share, num_blocks=num_blocks, token_s=token_s, layer_s=layer_s)
                shipments.add(job.handoff, sized, first_block=first, num_blocks=num_blocks, block_ids=chunk.block_ids)

        def on_layer(layer: int) -> None:
            shipments.written(layer)
            if layer == layers.stop - 1:
                written_s = time.monotonic()
                for job in jobs:
                    if job is not None:
                        job.last_kv_s = written_s

        loads = self.store.begin_loads(plan, jobs)
        outputs = self.executor.execute(batch, on_layer, loads.wait if loads is not None else None)
        ended_s = time.monotonic()
        if loads is not None:
            self.store.end_loads(plan, jobs, loads)
            self.metrics.load_wait_seconds.observe(loads.waited_s)
        waited_s = 0.0 if loads is None else loads.waited_s
        self._elapsed_s = ended_s - now
        self._pace.observe(plan.num_tokens, self._elapsed_s - waited_s)
        self.metrics.iteration(self._elapsed_s, num_sequences=len(plan.chunks), num_tokens=plan.num_tokens)
        for job, output in zip(jobs, outputs, strict=True):
            if job is not None:
                job.ended_s = ended_s
                self._look_at(job, output)
        return [output.tokens for output in outputs]

    def _look_at(self, job: Job, output: SliceOutput) -> None:
        """What an iteration's output means before it is booked."""
        if output.scores:
            self._soon(self._on_scores, job, output.scores)
        for choice, token in zip(job.choices, output.tokens, strict=False):
            if not choice.append(token.token_id):
                self._soon(self.fail, job, dead_end())

    def _commit(self, plan: PrefillPlan, tokens: list[tuple[SampledToken, ...]]) -> Callable[[], None]:
        outputs = self.scheduler.commit(plan, tokens, elapsed_s=self._elapsed_s)
        self.num_tokens += plan.num_tokens
        self.store.write_back.changed()
        return lambda: self._soon(self._on_first, outputs)
