"""Requests through a router's dispatcher to two workers of each pool while everything goes wrong at once.

Workers are processes that are killed, and stopped for a while, again and again; inside them the fabric misbehaves
(`faulty_worker.py`). Clients go, or have little time. Whatever happens, what a request was given is right so far.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from router.dispatch import Dispatch, DispatchResult
from router.dispatcher import WorkerDispatcher
from tandem.config import TransportName
from tandem.errors import TandemError
from tandem.types import Request, Role, TokenStep
from tests import faulty_worker
from tests.chaos_cluster import LEASE_S, names, settings_of
from tests.hash_executor import expected
from tests.pair import make_live_request, make_prompt, until
from tests.worker_processes import WorkerProcess

NUM_REQUESTS = 2000
NUM_AT_ONCE = 48
NUM_KILLS = 5
NUM_STALLS = 3
"""At least so many of each happen, however fast the machine is."""
BETWEEN_TROUBLES = (30, 120)
"""Requests that end between two troubles of a pool's workers."""
GIVE_UP_S = 60.0
"""Longest that a request may take to end, one way or another."""
MUCH_TIME_S = 2 * GIVE_UP_S
"""A request with so much would end by its deadline only if nothing else ended it."""
COMPLETE = "complete"
CLIENT_GONE = "client gone"
KILL, KILL_STALLED, SHORT_STALL, LONG_STALL = "kill", "kill of a stalled one", "short stall", "long stall"
_TROUBLES = {KILL: 5, KILL_STALLED: 1, SHORT_STALL: 3, LONG_STALL: 2}
_PAUSES_S = {KILL_STALLED: 0.5, SHORT_STALL: 0.3 * LEASE_S, LONG_STALL: 1.6 * LEASE_S}


class Chaos:
    """One run. What is drawn follows from the seed; what meets what, from the machine."""

    def __init__(self, seed: int, *, transport: TransportName, redis_url: str) -> None:
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_retries = 0.0
        self.num_found_tokens = 0
        """Of prompts, that were not computed anew."""
        self.pools = {
            role: [
                WorkerProcess(
                    role, settings_of(name, transport=transport, redis_url=redis_url, seed=seed), faulty_worker.run
                )
                for name in names(role)
            ]
            for role in Role
        }

    @property
    def workers(self) -> list[WorkerProcess]:
        """All four."""
        return [worker for pool in self.pools.values() for worker in pool]

    @property
    def num_kills(self) -> int:
        """Of processes."""
        return self.troubles[KILL] + self.troubles[KILL_STALLED]

    @property
    def num_stalls(self) -> int:
        """Of processes that went on afterwards."""
        return self.troubles[SHORT_STALL] + self.troubles[LONG_STALL]

    @property
    def is_enough(self) -> bool:
        """Whether all that was to happen has happened."""
        enough = self.outcomes.total() >= NUM_REQUESTS
        return enough and self.num_kills >= NUM_KILLS and self.num_stalls >= NUM_STALLS

    def faults(self) -> Counter[str]:
        """What went wrong in all workers that have ended."""
        faults: Counter[str] = Counter()
        for report in (said for worker in self.workers for said in worker.said):
            faults.update(report.faults)
        return faults

    async def start(self) -> None:
        """All workers, side by side."""
        for worker in self.workers:
            worker.start()
        await asyncio.gather(*(asyncio.to_thread(worker.ready) for worker in self.workers))

    async def run(self, dispatcher: WorkerDispatcher) -> None:
        """Until it is enough and every request has ended."""
        async with asyncio.TaskGroup() as group:
            for pool in self.pools.values():
                group.create_task(self._trouble(pool))
            for _ in range(NUM_AT_ONCE):
                group.create_task(self._client(dispatcher))
        [retries] = dispatcher.tracker.metrics.retries.collect()
        self.num_retries = sum(sample.value for sample in retries.samples if sample.name.endswith("_total"))

    # --- workers

    async def _trouble(self, pool: list[WorkerProcess]) -> None:
        """One worker of a pool after another, while the other one serves; a pace in requests suits any machine."""
        while not self.is_enough:
            await self._pass(self.random.randint(*BETWEEN_TROUBLES))
            [what] = self.random.choices(list(_TROUBLES), weights=list(_TROUBLES.values()))
            await self._strike(self.random.choice(pool), what)
            for worker in pool:
                worker.hear()
            self.troubles[what] += 1

    async def _pass(self, num_requests: int) -> None:
        """Until so many more have ended, or it is enough."""
        total = self.outcomes.total() + num_requests
        await until(lambda: self.is_enough or self.outcomes.total() >= total, timeout_s=GIVE_UP_S)

    async def _strike(self, worker: WorkerProcess, what: str) -> None:
        if what != KILL:
            worker.stand_still()
            await asyncio.sleep(_PAUSES_S[what])
        if what in (SHORT_STALL, LONG_STALL):
            worker.go_on()
            return
        await asyncio.to_thread(worker.kill)
        worker.start()
        await asyncio.to_thread(worker.ready)

    # --- clients

    async def _client(self, dispatcher: WorkerDispatcher) -> None:
        while not self.is_enough:
            await self._request(dispatcher)

    async def _request(self, dispatcher: WorkerDispatcher) -> None:
        """One request, maybe abandoned; its outcome is counted."""
        drawn = self.random.random()
        timeout_s = self.random.uniform(0.001, 0.3) if drawn < 0.05 else MUCH_TIME_S
        leaves_after_s = self.random.uniform(0.0, 0.4) if drawn > 0.85 else MUCH_TIME_S
        request = self._draw(timeout_s)
        given: list[list[int]] = [[] for _ in range(request.num_choices)]
        started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(leaves_after_s):
                result = await _answer(dispatcher.dispatch(request), given)
            outcome = COMPLETE
            self.num_found_tokens += result.prefill.num_cached_tokens if result.prefill else 0
        except TandemError as error:
            outcome = error.code
        except TimeoutError:
            outcome = CLIENT_GONE
        self.outcomes[outcome] += 1
        self._check(request, given, outcome)
        if asyncio.get_running_loop().time() > started_s + GIVE_UP_S:
            self.wrong.append(f"{request.request_id} took too long to end: {outcome}")

    def _draw(self, timeout_s: float) -> Request:
        """Half of the prompts begin like others, so that parts of them are found where they were computed before."""
        prompt = make_prompt(self.random.randint(1, 70), seed=self.random.randrange(10**6))
        if self.random.random() < 0.5:
            common = make_prompt(64, seed=self.random.randrange(4))
            prompt = [*common[: self.random.randint(1, 64)], *prompt[: self.random.randint(1, 16)]]
        return make_live_request(
            prompt,
            timeout_s=timeout_s,
            num_choices=self.random.choice([1, 1, 1, 2]),
            priority=self.random.choice([-1, 0, 0, 1]),
            salt=None,
            max_tokens=self.random.randint(1, 12),
        )

    def _check(self, request: Request, given: list[list[int]], outcome: str) -> None:
        """Whether it ended well or badly, what it gave must be the beginning of what is right."""
        right = expected(request.prompt_token_ids, request.sampling.max_tokens)
        if any(tokens != right[: len(tokens)] or (outcome == COMPLETE and tokens != right) for tokens in given):
            self.wrong.append(f"{request.request_id}, {outcome}: {given} for {right}")


async def _answer(dispatch: Dispatch, given: list[list[int]]) -> DispatchResult:
    """Reads a request to its end, as a router's front does."""
    try:
        async for step in dispatch:
            assert isinstance(step, TokenStep)
            given[step.choice].append(step.token_id)
    except BaseException:
        await dispatch.abort()
        raise
    return await dispatch.finish()
