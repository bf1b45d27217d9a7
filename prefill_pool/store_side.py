"""A prefill worker and its node's store: fetches before a prompt's turn, loads while it computes, write-back after it.

Without a store nothing is fetched; blocks are announced all the same. The worker owns jobs and the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence

from prefill_pool.fetching import PrefixFetcher
from prefill_pool.job import Job
from prefill_pool.scheduler import PrefillPlan, PrefillScheduler
from tandem.errors import TandemError, WorkerUnavailable
from tandem.kv.block_copies import BlockCopies
from tandem.prefix_store.holdings import Loan
from tandem.tasks import cancel_all
from tandem.worker.layer_loads import LayerLoads, Load
from tandem.worker.prefix_tiers import PrefixTiers
from tandem.worker.write_back import WriteBack, WriteBackSettings


class StoreSide:
    """Event loop only, but for `begin_loads` and `end_loads`, which are the engine's. `lock` guards the scheduler."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        *,
        lock: threading.Condition,
        copies: BlockCopies,
        tiers: PrefixTiers,
        fail: Callable[[Job, TandemError], None],
    ) -> None:
        """`fail` ends a job and may be called from any thread."""
        self._scheduler = scheduler
        self._lock = lock
        self._copies = copies
        self._tiers = tiers
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._fetches: set[asyncio.Task[None]] = set()
        self._fetcher: PrefixFetcher | None = None
        if tiers.client is not None:
            self._fetcher = PrefixFetcher(
                tiers.client, block_bytes=copies.block_bytes, block_size=scheduler.block_size
            )
        self.write_back = WriteBack(
            pool=scheduler.pool,
            lock=lock,
            copies=copies,
            on_released=self._wake,
            client=tiers.client,
            announcer=tiers.announcer,
            settings=WriteBackSettings(policy=tiers.write_policy),
        )
        self.write_back.start()

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify()

    def fetch(self, job: Job, *, compute_s_per_token: float) -> None:
        """Has the store make ready what it has of the prompt, if it may have more than is here."""
        request = job.request
        with self._lock:
            names = self._scheduler.usable_names(request)
            num_here = self._scheduler.pool.match(names)
            if self._fetcher is None or request.prefix is None or num_here == len(names):
                return
            self._scheduler.fetching(request.request_id)
        fetching = self._fetcher.fetch(
            names,
            num_here=num_here,
            compute_s_per_token=compute_s_per_token,
            tenant=request.prefix.tenant,
            left_s=request.deadline_s - time.monotonic(),
        )
        task = asyncio.create_task(self._fetched(job, fetching))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def _fetched(self, job: Job, fetching: Coroutine[None, None, Loan]) -> None:
        try:
            job.loan = await fetching
        finally:
            if job.over:
                job.loan.release()
            with self._lock:
                self._scheduler.fetched(job.request.request_id, range(len(job.loan.slots)))
                self._lock.notify()

    def begin_loads(self, plan: PrefillPlan, jobs: Sequence[Job | None]) -> LayerLoads | None:
        """Starts to bring in what the store lends; the executor waits for each layer of it."""
        loads = [
            Load(
                loan=job.loan,
                slots=job.loan.slots[chunk.loads.start : chunk.loads.stop],
                blocks=chunk.block_ids[chunk.loads.start : chunk.loads.stop],
            )
            for job, chunk in zip(jobs, plan.chunks, strict=True)
            if job is not None and chunk.loads
        ]
        return LayerLoads(self._copies, loads) if loads else None

    def end_loads(self, plan: PrefillPlan, jobs: Sequence[Job | None], loads: LayerLoads) -> None:
        """Gives loans back. What was lent to somebody else meanwhile is no KV of this prompt: the job ends."""
        num_blocks = 0
        for job, chunk in zip(jobs, plan.chunks, strict=True):
            if job is None or not chunk.loads:
                continue
            num_blocks += len(chunk.loads)
            job.num_loaded_tokens = len(chunk.loads) * self._scheduler.block_size
            if not job.loan.intact():
                with self._lock:
                    self._scheduler.abort(chunk.request.request_id)
                self._fail(job, WorkerUnavailable("the store took back what it had lent"))
            job.loan.release()
        if self._fetcher is not None:
            self._loop.call_soon_threadsafe(self._fetcher.copied, num_blocks, loads.seconds)

    async def end_fetches(self) -> None:
        """Nothing more is asked of the store."""
        await cancel_all(self._fetches)

    async def close(self) -> None:
        """After the engine has stopped: ends the write-back, detaches from the store."""
        await self.write_back.close()
        await self._tiers.close()
