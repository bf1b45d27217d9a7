"""The prompts of one HTTP request: how many are under way at once, what waits, and what a client that goes ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from router.app import RunningRouter
from router.validation import SamplingOptions
from tandem.errors import Overloaded, RequestCancelled
from tandem.types import Request
from tests.fake_dispatcher import FakeDispatch, FakeDispatcher, Script
from tests.router_harness import EOS, make_frontend, running, runs_async

STALLED = Script(token_ids=[5, EOS], stall_at=0)


def client(router: RunningRouter) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{router.http_address}", trust_env=False, verify=False, timeout=30)


def under_way(dispatcher: FakeDispatcher) -> list[FakeDispatch]:
    return [d for d in dispatcher.dispatches if not d.finished.is_set() and not d.aborted.is_set()]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it looks at announces nothing
        await asyncio.sleep(0.005)


async def settled(router: RunningRouter) -> None:
    """Everything that a loop does by itself has been done: several answers have gone the whole way since."""
    async with client(router) as http:
        for _ in range(5):
            await http.get("/health")


@pytest.mark.parametrize(("n", "at_once"), [(1, 4), (2, 2), (4, 1), (7, 1)])
@pytest.mark.parametrize("stream", [False, True])
def test_no_more_outputs_of_one_request_are_under_way_than_the_limit_but_for_one_prompt(n, at_once, stream):
    @runs_async
    async def run():
        dispatcher = FakeDispatcher(lambda request: STALLED)
        async with running(dispatcher, max_outputs_at_once=4) as router, client(router) as http:
            body = {"prompt": [[5 + i] for i in range(6)], "n": n, "stream": stream, "return_token_ids": True}
            answer = asyncio.create_task(http.post("/v1/completions", json=body))
            for num_ended in range(6):
                expected = min(6, num_ended + at_once)
                await until(lambda expected=expected: len(dispatcher.dispatches) >= expected)
                await settled(router)
                assert len(dispatcher.dispatches) == expected
                dispatcher.dispatches[num_ended].release.set()
            response = await answer
        assert response.status_code == 200
        if stream:
            choices = [c for line in response.text.split("\n\n")[:-2] for c in json.loads(line[6:])["choices"]]
            ended = [choice["index"] for choice in choices if choice["finish_reason"]]
            assert sorted(ended) == list(range(6 * n))
        else:
            assert [choice["index"] for choice in response.json()["choices"]] == list(range(6 * n))
            assert [c["prompt_token_ids"] for c in response.json()["choices"]] == [[5 + i // n] for i in range(6 * n)]
            assert response.json()["usage"]["completion_tokens"] == 2 * 6 * n

    run()


@runs_async
async def test_another_request_gets_in_between_the_prompts_of_a_large_one():
    dispatcher = FakeDispatcher(lambda r: STALLED if len(r.prompt_token_ids) == 2 else Script(token_ids=[5, EOS]))
    async with running(dispatcher, max_outputs_at_once=8) as router, client(router) as http:
        large = asyncio.create_task(http.post("/v1/completions", json={"prompt": [[5, 6]] * 32, "n": 8}))
        await dispatcher.arrived.wait()
        assert (await http.post("/v1/completions", json={"prompt": [7]})).status_code == 200
        assert [len(d.request.prompt_token_ids) for d in dispatcher.dispatches] == [2, 1]
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_all_that_runs_and_nothing_more_is_started(stream):
    @runs_async
    async def run():
        dispatcher = FakeDispatcher(lambda request: Script(token_ids=[5], repeat=True, stall_at=1))
        async with running(dispatcher, max_outputs_at_once=4) as router:
            async with client(router) as http:
                body = {"prompt": [[5]] * 40, "stream": stream, "max_tokens": 3}
                large = asyncio.create_task(http.post("/v1/completions", json=body))
                await until(lambda: len(dispatcher.dispatches) == 4)
                await asyncio.gather(*(d.stalled.wait() for d in dispatcher.dispatches))
                assert router.frontend.num_running == 40
                large.cancel()
                await asyncio.gather(large, return_exceptions=True)
            await until(lambda: router.frontend.num_running == 0)
            assert under_way(dispatcher) == []
            assert len(dispatcher.dispatches) == 4
            counted = router.frontend.metrics.requests.labels(code="cancelled")
            assert counted._value.get() == 40

    run()


class SlowToAbort(FakeDispatch):
    """Ends only when all that were started are being ended."""

    def __init__(self, request: Request, script: Script, aborting: list[int], all_of: int) -> None:
        super().__init__(request, script)
        self._aborting, self._all_of = aborting, all_of

    async def abort(self) -> None:
        self._aborting.append(1)
        await until(lambda: len(self._aborting) >= self._all_of)
        await super().abort()


@runs_async
async def test_what_runs_is_ended_side_by_side():
    aborting: list[int] = []

    class Dispatcher(FakeDispatcher):
        def dispatch(self, request: Request) -> FakeDispatch:
            self.dispatches.append(SlowToAbort(request, STALLED, aborting, 4))
            return self.dispatches[-1]

    dispatcher = Dispatcher(lambda request: STALLED)
    async with running(dispatcher, max_outputs_at_once=4) as router:
        async with client(router) as http:
            large = asyncio.create_task(http.post("/v1/completions", json={"prompt": [[5]] * 9}))
            await until(lambda: len(dispatcher.dispatches) == 4)
            large.cancel()
            await asyncio.gather(large, return_exceptions=True)
        await until(lambda: router.frontend.num_running == 0)
    assert under_way(dispatcher) == []


@runs_async
async def test_a_wrong_last_prompt_is_refused_before_the_first_one_runs():
    dispatcher = FakeDispatcher(lambda request: STALLED)
    async with running(dispatcher) as router, client(router) as http:
        response = await http.post("/v1/completions", json={"prompt": [[5], [6], [49152]]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        assert dispatcher.dispatches == []
        assert router.frontend.num_running == 0


@runs_async
async def test_a_failing_prompt_ends_those_that_run_and_those_that_wait():
    def script(request: Request) -> Script:
        return Script(error=Overloaded("full")) if request.prompt_token_ids == (6,) else STALLED

    dispatcher = FakeDispatcher(script)
    async with running(dispatcher, max_outputs_at_once=2) as router, client(router) as http:
        response = await http.post("/v1/completions", json={"prompt": [[5], [6], [7], [8]]})
        assert response.status_code == 429
        assert len(dispatcher.dispatches) == 2
        assert under_way(dispatcher) == []
        assert router.frontend.num_running == 0


@runs_async
async def test_more_outputs_than_one_request_may_have_are_refused_with_the_most_that_fit():
    dispatcher = FakeDispatcher(lambda request: Script(token_ids=[EOS]))
    async with running(dispatcher) as router, client(router) as http:
        response = await http.post("/v1/completions", json={"prompt": ["x"] * 256, "n": 17})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "n")
        assert "at most 16 with 256 prompts" in error["message"]
        assert dispatcher.dispatches == []
        assert (await http.post("/v1/completions", json={"prompt": ["x"] * 4, "n": 17})).status_code == 200


@runs_async
async def test_a_prompt_that_waits_can_be_cancelled_by_its_id():
    frontend = make_frontend(FakeDispatcher(lambda request: STALLED))
    prepared = await frontend.prepare([5], SamplingOptions(), request_id="r-1")
    frontend.cancel("r-1")
    with pytest.raises(RequestCancelled, match="was cancelled"):
        prepared.start()
    assert frontend.num_running == 0
