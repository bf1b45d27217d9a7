"""API keys: what is refused and how, what stays open, and keys that come and go while requests are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.access import Access, read_key
from cluster.client import Client, make_sampling
from router.api_keys import ApiKeys
from router.app import RunningRouter
from tandem.errors import ConfigError, Unauthenticated
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.router_harness import running, runs_async, saying

KEY, OTHER = "sk-first", "sk-second"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# for the tests\n{KEY}\n\n  {OTHER}  \n")
    return path


@asynccontextmanager
async def locked(keys_file: Path) -> AsyncIterator[RunningRouter]:
    async with running(saying("Hello"), api_keys_file=str(keys_file)) as router:
        yield router


async def answer(router: RunningRouter, key: str) -> str:
    async with Client(Access(endpoint=router.grpc_address, api_key=key)) as client:
        return "".join([response.text async for response in client.generate("Hi", make_sampling())])


@runs_async
async def test_a_known_key_opens_both_doors(keys_file: Path) -> None:
    async with locked(keys_file) as router:
        assert await answer(router, KEY) == await answer(router, OTHER) == "Hello"
        async with openai.AsyncOpenAI(
            base_url=f"{router.http_url}/v1", api_key=KEY, http_client=httpx.AsyncClient(trust_env=False, verify=False)
        ) as client:
            reply = await client.completions.create(model="test-model", prompt="Hi")
        assert reply.choices[0].text == "Hello"


@pytest.mark.parametrize("key", ["", "sk-unknown", KEY + "x", KEY[:-1], "# for the tests"])
@runs_async
async def test_grpc_calls_without_a_known_key_end_as_unauthenticated(keys_file: Path, key: str) -> None:
    async with locked(keys_file) as router:
        with pytest.raises(Unauthenticated, match="give --api-key or "):
            await answer(router, key)
        async with open_channel(router.grpc_address) as channel:
            metadata = (("authorization", f"Bearer {key}"),) if key else None
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await inference_pb2_grpc.AdminStub(channel).GetClusterStatus(
                    inference_pb2.GetClusterStatusRequest(), metadata=metadata
                )
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert dict(failure.value.trailing_metadata() or ())["tandem-code"] == "invalid_api_key"
        assert router.frontend.num_running == 0


@pytest.mark.parametrize("header", [None, "Bearer sk-unknown", f"Basic {KEY}", KEY, "Bearer", "Bearer \u00e9"])
@runs_async
async def test_http_requests_without_a_known_key_get_openais_error(keys_file: Path, header: str | None) -> None:
    async with locked(keys_file) as router, httpx.AsyncClient(trust_env=False, verify=False) as http:
        headers = {"authorization": header.encode()} if header else {}
        reply = await http.post(f"{router.http_url}/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)


@runs_async
async def test_openais_client_raises_its_authentication_error(keys_file: Path) -> None:
    async with locked(keys_file) as router, openai.AsyncOpenAI(
        base_url=f"{router.http_url}/v1", api_key="none", http_client=httpx.AsyncClient(trust_env=False, verify=False)
    ) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@runs_async
async def test_health_metrics_and_reflection_need_no_key(keys_file: Path) -> None:
    async with locked(keys_file) as router:
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            for path in ("/health", "/metrics"):
                assert (await http.get(router.http_url + path)).status_code == 200
        async with open_channel(router.grpc_address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            replies = [reply async for reply in stub.ServerReflectionInfo(asked)]
            assert replies[0].list_services_response.service


@runs_async
async def test_a_file_that_changes_lets_new_keys_in_and_old_ones_no_more(keys_file: Path) -> None:
    async with locked(keys_file) as router:
        await asyncio.to_thread(keys_file.write_text, "sk-third\n")
        assert await answer(router, "sk-third") == "Hello"
        with pytest.raises(Unauthenticated):
            await answer(router, KEY)


def test_a_file_that_is_emptied_lets_nobody_in_and_one_that_is_gone_changes_nothing(keys_file: Path) -> None:
    keys = ApiKeys(keys_file)
    keys_file.unlink()
    keys.check(f"Bearer {KEY}")
    keys_file.write_text("\n")
    with pytest.raises(Unauthenticated):
        keys.check(f"Bearer {KEY}")


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(path)
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys(path)
    with pytest.raises(ConfigError, match="holds no API key"):
        read_key(path)


def test_a_client_takes_the_first_key_of_a_file(keys_file: Path) -> None:
    assert read_key(keys_file) == KEY
    assert Access(endpoint="a:1", api_key=KEY).metadata() == (("authorization", f"Bearer {KEY}"),)
