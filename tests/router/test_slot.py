"""A request is ended wherever it is: also while its prompt is being read."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from router.validation import SamplingOptions
from tandem.errors import RequestCancelled, WorkerUnavailable
from tests.router_harness import make_frontend, runs_async, saying

PLAIN = SamplingOptions()


@runs_async
async def test_draining_and_cancelling_end_requests_whose_prompt_is_still_being_read():
    frontend = make_frontend(saying("ok"))
    async with contextlib.AsyncExitStack() as others:
        for _ in range(4):  # as many as are tokenized at once
            await others.enter_async_context(frontend._tokenizing)
        opening = [asyncio.create_task(frontend.open("a", PLAIN, request_id=name)) for name in ("r1", "r2")]
        while frontend.num_running < 2:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
        frontend.cancel("r1")
        with pytest.raises(RequestCancelled, match="was cancelled"):
            await opening[0]
        await frontend.drain(0.01)
        with pytest.raises(WorkerUnavailable, match="shutting down"):
            await opening[1]
    assert frontend.metrics.requests.labels(code="worker_unavailable")._value.get() == 1
