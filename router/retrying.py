"""A request from one attempt to the next: another route after a failure, or a wait for the worker that will take it.

Only while nothing of its output was sent. Whether trying again can help is `retry.py`'s, whether waiting can is
`view.py`'s, which pair it gets `policy.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from router.dispatch import Dispatch, DispatchResult, Step
from router.lifecycle import Leg
from router.naming import PromptNames
from router.policy import Route, no_pair, route
from router.prefix_hits import PrefixHits
from router.retry import RetryState
from router.tracker import WorkerTracker
from router.view import ClusterView
from tandem.errors import TandemError, WorkerUnavailable
from tandem.types import Request, RequestId

logger = logging.getLogger(__name__)

RESTART_S = 10.0
"""What a client is told to wait when a worker is still being started and this router's patience is over."""


class Attempt(Dispatch, Protocol):
    """A request on one route; `failed_leg` is set before the iterator raises."""

    route: Route
    failed_leg: Leg | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What the requests of one router share. `open` starts an attempt."""

    tracker: WorkerTracker
    open: Callable[[Request, Route], Attempt]
    hits: PrefixHits | None = None
    """Without it prompts are not named."""
    patience_s: float = 0.0
    """Longest wait of a request for a worker that is being started."""


class RetryingDispatch:
    """A `Dispatch`: attempts on one route after another until one gives output.

    Raises WorkerUnavailable when nobody can take the request and nobody is coming who could.
    """

    def __init__(self, request: Request, means: Means) -> None:
        self._request = request
        self._means = means
        self._retries = RetryState()
        self._patient_until_s = min(time.monotonic() + means.patience_s, request.deadline_s)
        self._names = PromptNames(request.prompt_token_ids, salt=request.cache_salt)
        self._ended = False
        self._attempt: Attempt | None = None
        view = means.tracker.view()
        if view.pairs():
            self._attempt = self._start(request, view)
        elif not self._may_wait(view):
            raise no_pair()

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Steps in order; raises TandemError."""
        has_output = False
        while True:
            attempt = self._attempt = self._attempt or await self._next_attempt(no_pair())
            try:
                async for step in attempt:
                    has_output = True
                    yield step
                return
            except TandemError as error:
                await attempt.abort()
                if self._ended or not self._retries.may_retry(error, has_output=has_output):
                    raise
                self._retries.note_failure(error, leg=attempt.failed_leg, on=attempt.route)
                self._attempt = await self._next_attempt(error)

    async def _next_attempt(self, error: TandemError) -> Attempt:
        """On another route, which may have to be waited for; raises `error`, or its like, when there will be none.

        Workers know each attempt by an id of its own.
        """
        view = await self._view_with_pairs(error)
        request = self._request
        if self._retries.num_attempts > 1:
            request = replace(request, request_id=RequestId(f"{request.request_id}#{self._retries.num_attempts}"))
            logger.info("request %s is tried again after: %s", self._request.request_id, error.message)
            self._means.tracker.metrics.retried(error)
        return self._start(request, view)

    async def _view_with_pairs(self, error: TandemError) -> ClusterView:
        view = self._view()
        if not view.pairs() and not view.may_recover() and self._attempt is not None:
            await self._check(self._attempt.route)
            view = self._view()
        told = False
        while not view.pairs():
            if not view.may_recover():
                raise error
            if not self._may_wait(view):
                raise WorkerUnavailable(f"{error.message}; its successor is not ready yet", retry_after_s=RESTART_S)
            if not told:
                told = True
                waited_for = " and ".join(sorted(view.coming))
                logger.info("request %s waits for a %s worker", self._request.request_id, waited_for)
            await self._news()
            view = self._view()
        return view

    def _view(self) -> ClusterView:
        return self._means.tracker.view().without(self._retries.bad_workers, self._retries.bad_pairs)

    def _may_wait(self, view: ClusterView) -> bool:
        return view.may_recover() and time.monotonic() < self._patient_until_s

    async def _check(self, to: Route) -> None:
        """A handoff may fail before it shows that one of the two has died: then its successor is waited for."""
        workers = [to.prefill] if to.decode is None else [to.prefill, to.decode]
        await asyncio.gather(*(self._means.tracker.check(worker.incarnation) for worker in workers))

    async def _news(self) -> None:
        try:
            async with asyncio.timeout(max(0.0, self._patient_until_s - time.monotonic())):
                await self._means.tracker.news()
        except TimeoutError:
            return

    def _start(self, request: Request, view: ClusterView) -> Attempt:
        hits = self._means.hits
        if hits is not None:
            view = replace(view, cached=hits.of(self._names, view.workers))
        to = route(view, request, time.monotonic())
        if hits is not None:
            request = replace(request, prefix=self._names.of(to.prefill.fingerprint, to.prefill.block_size))
        return self._means.open(request, to)

    def stop(self, choice: int) -> None:
        """No more of this choice is wanted."""
        if self._attempt is not None:
            self._attempt.stop(choice)

    async def finish(self) -> DispatchResult:
        """Waits briefly for the timings of a complete request, stops a request that is not, and reports."""
        self._ended = True
        assert self._attempt is not None, "a request that has no attempt yet has no last step"
        return await self._attempt.finish()

    async def abort(self) -> None:
        """Stops whatever runs. Idempotent."""
        self._ended = True
        if self._attempt is not None:
            await self._attempt.abort()
