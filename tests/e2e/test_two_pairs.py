"""Two workers in each pool over shared memory: the same answers, and failures that stay small."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import grpc
import pytest

from tests.e2e.live import Answer, LiveCluster, generate, is_idle, live_cluster, run, status_of, stub_of, until
from tests.e2e.test_one_pair import answers_of
from tests.golden_answers import MAX_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the cluster

LEASE_S = 2.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    config = {"transfer": {"transport": "shm", "lease_s": LEASE_S}}
    with live_cluster(tmp_path_factory.mktemp("two-pairs"), config, "--prefill", "2", "--decode", "2") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def every_block_comes_back(cluster: LiveCluster) -> Iterator[None]:
    """After each test here, all four workers are there and empty."""
    yield
    run(until(cluster, lambda status: len(status.workers) == 4 and is_idle(status), timeout_s=120))


@pytest.mark.parametrize("at_a_time", [1, 8])
def test_prompts_give_the_tokens_of_transformers(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]], at_a_time: int
) -> None:
    assert run(answers_of(cluster, prompts, at_a_time=at_a_time)) == golden


def test_a_seed_gives_the_same_tokens_on_every_worker(cluster: LiveCluster) -> None:
    async def drawn() -> list[Answer]:
        async with stub_of(cluster) as stub:
            sampling = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "seed": 11, "ignore_eos": True}
            salts = map(str, range(8))
            return await asyncio.gather(
                *(generate(stub, "The old lighthouse", cache_salt=salt, **sampling) for salt in salts)
            )

    answers = run(drawn())
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert {a.timings.prefill_worker for a in answers if a.timings} == {"prefill-0", "prefill-1"}
    assert {a.timings.decode_worker for a in answers if a.timings} == {"decode-0", "decode-1"}


async def killed(cluster: LiveCluster, role: str, prompts: dict[str, list[int]]) -> tuple[list[object], float]:
    """Eight requests over all workers; kill -9 to one worker of `role` in mid-request. How each ended, and when."""
    victim = f"{role}-0"
    prompt = prompts["length_513"] if role == "prefill" else prompts["chat_list"]
    status = await until(cluster, lambda s: len(s.workers) == 4)
    pids = {worker.worker_id: worker.pid for worker in status.workers}
    decoding = asyncio.Event()
    late: set[int] = set(range(8))

    def on_token(request: int, num_tokens: int) -> None:
        if num_tokens >= 2:
            late.discard(request)
        if not late:
            decoding.set()

    async with stub_of(cluster) as stub:
        tasks = [
            asyncio.create_task(
                generate(
                    stub,
                    prompt,
                    on_token=partial(on_token, i),
                    max_tokens=MAX_TOKENS * 4,
                    ignore_eos=True,
                    cache_salt=f"{role} {i}",
                )
            )
            for i in range(8)
        ]
        if role == "decode":
            await decoding.wait()
        else:
            await until(cluster, lambda s: all(w.num_running > 0 for w in s.workers if w.role == role), pause_s=0.005)
        os.kill(pids[victim], signal.SIGKILL)
        killed_s = time.monotonic()
        first_failure_s = float("inf")
        for done in asyncio.as_completed(tasks):
            try:
                await done
            except grpc.aio.AioRpcError:
                first_failure_s = min(first_failure_s, time.monotonic() - killed_s)
        return [task.exception() or task.result() for task in tasks], first_failure_s


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_disturbs_its_own_requests_only_and_comes_back(
    cluster: LiveCluster, role: str, prompts: dict[str, list[int]]
) -> None:
    """A prompt is prefilled again elsewhere; an output that has begun ends as UNAVAILABLE."""
    outcomes, first_failure_s = run(killed(cluster, role, prompts))
    failures = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    assert bool(failures) == (role == "decode")
    assert answers
    assert not failures or first_failure_s < 5.0
    assert {status_of(failure)[0] for failure in failures} <= {grpc.StatusCode.UNAVAILABLE}
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert len(answers[0].tokens) == MAX_TOKENS * 4

    async def afterwards() -> list[Answer]:
        pids = {worker.worker_id: worker.pid for worker in (await until(cluster, is_back, timeout_s=120)).workers}
        assert len(pids) == 4
        async with stub_of(cluster) as stub:
            return await asyncio.gather(*(generate(stub, "Hello", max_tokens=3) for _ in range(8)))

    assert {a.timings.decode_worker for a in run(afterwards()) if a.timings} == {"decode-0", "decode-1"}


def is_back(status: object) -> bool:
    workers = status.workers  # type: ignore[attr-defined]
    return len(workers) == 4 and all(worker.state == "ready" for worker in workers)


def test_a_worker_that_stands_still_pins_no_blocks_on_its_peer(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    """SIGSTOP to both prefill workers in mid-transfer: the decode side frees by its own clock; no answer is wrong."""

    async def stopped() -> list[Answer | BaseException]:
        status = await until(cluster, is_back)
        prefill_pids = [w.pid for w in status.workers if w.role == "prefill"]
        async with stub_of(cluster) as stub:
            tasks = [
                asyncio.create_task(
                    generate(stub, prompts["length_1025"], max_tokens=4, timeout_s=60.0, cache_salt=f"still {i}")
                )
                for i in range(2)
            ]
            await until(
                cluster, lambda s: all(w.num_handoffs == 1 for w in s.workers if w.role == "decode"), pause_s=0.005
            )
            for pid in prefill_pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                await until(cluster, decode_is_free, timeout_s=LEASE_S + 20)
            finally:
                for pid in prefill_pids:
                    os.kill(pid, signal.SIGCONT)
            return await asyncio.gather(*tasks, return_exceptions=True)

    for outcome in run(stopped()):
        if isinstance(outcome, Answer):
            assert tuple(outcome.tokens) == golden["length_1025"][:4]
        else:
            assert isinstance(outcome, grpc.aio.AioRpcError)
            assert outcome.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def decode_is_free(status: object) -> bool:
    decode = [w for w in status.workers if w.role == "decode"]  # type: ignore[attr-defined]
    return len(decode) == 2 and all(w.num_free_blocks == w.num_blocks and not w.num_handoffs for w in decode)
