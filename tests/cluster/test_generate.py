"""`tandem generate` and `chat` against a real router whose workers are scripted."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.client import make_sampling
from cluster.generate import result_data, run_generate
from tandem.rpc.tandem.v1.common_pb2 import MessageTiming, PrefillTimings, TransferTimings
from tandem.rpc.tandem.v1.inference_pb2 import GenerateResponse, RequestTimings
from tests.proxy import Proxy
from tests.router_harness import running, runs_async, saying, scripted, tokenizer

ROOT = Path(__file__).parents[2]
LONG = 200


def make_response() -> GenerateResponse:
    messages = [MessageTiming(layer=0), MessageTiming(layer=1)]
    transfer = TransferTimings(transport="shm", num_messages=2, messages=messages)
    return GenerateResponse(text="x", timings=RequestTimings(prefill=PrefillTimings(transfer=transfer)))


@pytest.mark.parametrize("with_messages", [False, True])
def test_timings_of_each_message_come_on_demand(with_messages: bool) -> None:
    result: Any = result_data([make_response()], with_messages=with_messages)
    transfer = result["timings"]["prefill"]["transfer"]
    assert transfer["num_messages"] == 2
    assert ("messages" in transfer) == with_messages


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with running(saying("Hello.")) as router:
            await run_generate(router.grpc_address, "Hi", make_sampling(), as_json=True)

    asyncio.run(scenario())
    assert json.loads(capsys.readouterr().out)["text"] == "Hello."


async def started(endpoint: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cluster.cli",
        *arguments,
        "--endpoint",
        endpoint,
        cwd=ROOT,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@runs_async
async def test_an_answer_whose_router_goes_away_says_so_on_a_line_of_its_own() -> None:
    stalling = scripted(tokenizer().encode("word " * LONG), stall_at=5)
    async with running(stalling) as router:
        async with Proxy.to(router.grpc_address) as proxy:
            process = await started(proxy.address, "generate", "Hi")
            assert process.stdout is not None
            assert await process.stdout.read(1)
        out, errors = await process.communicate()
    assert (process.returncode, out[-1:]) == (1, b"\n")
    assert errors.decode() == f"tandem: the router at {proxy.address} went away before the answer was whole\n"


@runs_async
async def test_an_interrupted_answer_ends_its_line_and_exits_like_a_killed_program() -> None:
    stalling = scripted(tokenizer().encode("word " * LONG), stall_at=5)
    async with running(stalling) as router:
        process = await started(router.grpc_address, "generate", "Hi")
        assert process.stdout is not None
        assert await process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert (process.returncode, errors.decode()) == (128 + signal.SIGINT, "\ntandem: stopped\n")


@runs_async
async def test_the_priority_reaches_the_pools() -> None:
    dispatcher = saying("Hello.")
    async with running(dispatcher) as router:
        process = await started(router.grpc_address, "generate", "Hi", "--priority", "-3")
        out, _ = await process.communicate()
        assert (process.returncode, out.decode()) == (0, "Hello.\n")
        assert [dispatch.request.priority for dispatch in dispatcher.dispatches] == [-3]


@runs_async
async def test_a_chat_says_when_an_answer_was_cut() -> None:
    async with running(scripted(tokenizer().encode("word " * LONG))) as router:
        process = await started(router.grpc_address, "chat", "--max-tokens", "3", stdin=subprocess.PIPE)
        out, errors = await process.communicate(b"Hi\n")
        assert (process.returncode, errors.decode()) == (0, "(cut after 3 tokens: see --max-tokens)\n")
        assert out.decode().count("\n") == 1
