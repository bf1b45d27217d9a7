"""One prefill and one decode worker over UCX, as `make up` starts them: what users and their clients see."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tandem.observability.document import SETS
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.e2e.live import (
    Answer,
    LiveCluster,
    cluster_status,
    generate,
    is_idle,
    live_cluster,
    request_of,
    run,
    status_of,
    stub_of,
    until,
    workers_of,
)
from tests.golden_answers import MAX_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with live_cluster(tmp_path_factory.mktemp("one-pair"), {}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def every_block_comes_back(cluster: LiveCluster) -> Iterator[None]:
    """After each test here, both pools are empty again."""
    yield
    run(until(cluster, is_idle))


# --- the same answer


def test_prompts_alone_give_the_tokens_of_transformers(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    assert len(prompts) >= 24
    assert run(answers_of(cluster, prompts, at_a_time=1)) == golden


def test_prompts_eight_at_a_time_give_the_tokens_of_transformers(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    assert run(answers_of(cluster, prompts, at_a_time=8)) == golden


async def answers_of(
    cluster: LiveCluster, prompts: dict[str, list[int]], *, at_a_time: int
) -> dict[str, tuple[int, ...]]:
    """Every prompt's greedy tokens, with this many requests open."""
    places = asyncio.Semaphore(at_a_time)
    async with stub_of(cluster) as stub:

        async def one(ids: list[int]) -> tuple[int, ...]:
            async with places:
                return tuple((await generate(stub, ids, max_tokens=MAX_TOKENS, ignore_eos=True)).tokens)

        answers = await asyncio.gather(*(one(ids) for ids in prompts.values()))
    return dict(zip(prompts, answers, strict=True))


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(cluster: LiveCluster) -> None:
    async def drawn() -> tuple[Answer, list[Answer], Answer]:
        async with stub_of(cluster) as stub:
            sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}
            alone = await generate(stub, "The old lighthouse", **sampling)
            batch = await asyncio.gather(*(generate(stub, "The old lighthouse", **sampling) for _ in range(4)))
            other = await generate(stub, "The old lighthouse", **{**sampling, "seed": 8})
            return alone, batch, other

    alone, batch, other = run(drawn())
    assert all(answer.tokens == alone.tokens for answer in batch)
    assert other.tokens != alone.tokens


# --- ends and errors


def test_the_first_token_can_be_the_last(cluster: LiveCluster) -> None:
    async def ends() -> list[Answer]:
        async with stub_of(cluster) as stub:
            first = await generate(stub, "The capital of France is", max_tokens=1)
            stop_token = await generate(
                stub, "The capital of France is", max_tokens=9, stop_token_ids=[first.tokens[0]]
            )
            stop_string = await generate(stub, "The capital of France is", max_tokens=9, stop=[first.text])
            return [first, stop_token, stop_string]

    first, stop_token, stop_string = run(ends())
    assert (len(first.tokens), first.finish_reason) == (1, common_pb2.FINISH_REASON_LENGTH)
    assert (stop_token.tokens, stop_token.finish_reason) == (first.tokens, common_pb2.FINISH_REASON_STOP)
    assert (stop_string.text, stop_string.finish_reason) == ("", common_pb2.FINISH_REASON_STOP)


def test_end_of_sequence_ends_a_chat_by_itself(cluster: LiveCluster) -> None:
    async def chat() -> list[inference_pb2.GenerateResponse]:
        message = inference_pb2.ChatMessage(role="user", content="What is the capital of France?")
        request = inference_pb2.ChatRequest(
            messages=[message], sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=200)
        )
        async with stub_of(cluster) as stub:
            return [step async for step in stub.Chat(request)]

    steps = run(chat())
    assert "Paris" in "".join(step.text for step in steps)
    assert steps[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert steps[-1].usage.completion_tokens == sum(len(step.token_ids) for step in steps) < 200


BAD_REQUESTS = {
    "empty prompt": (request_of(""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "no token ids": (request_of([]), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "no prompt": (inference_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "prompt too long": (request_of([1] * 9000), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "unknown model": (request_of("Hi", model="gpt-7"), grpc.StatusCode.NOT_FOUND, "model"),
    "max_tokens too large": (request_of("Hi", max_tokens=9000), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    "max_tokens negative": (request_of("Hi", max_tokens=-1), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    "temperature negative": (request_of("Hi", temperature=-1.0), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    "temperature not a number": (
        request_of("Hi", temperature=float("nan")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "temperature",
    ),
    "token id not in vocabulary": (request_of([49152]), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "too many stop strings": (request_of("Hi", stop=["x"] * 17), grpc.StatusCode.INVALID_ARGUMENT, "stop"),
}


def test_bad_requests_get_typed_errors_and_disturb_nobody(
    cluster: LiveCluster, prompts: dict[str, list[int]], golden: dict[str, tuple[int, ...]]
) -> None:
    async def both() -> tuple[Answer, dict[str, tuple[grpc.StatusCode, str, str]]]:
        async with stub_of(cluster) as stub:
            bystander = asyncio.create_task(
                generate(stub, prompts["length_513"], max_tokens=MAX_TOKENS, ignore_eos=True)
            )
            seen = {}
            for name, (request, _, _) in BAD_REQUESTS.items():
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await anext(aiter(stub.Generate(request)))
                assert refused.value.details()
                seen[name] = status_of(refused.value)
            return await bystander, seen

    bystander, seen = run(both())
    for name, (_, status, param) in BAD_REQUESTS.items():
        assert seen[name][0] is status, name
        assert seen[name][2].startswith(param), (name, seen[name])
    assert tuple(bystander.tokens) == golden["length_513"]


def test_bad_http_bodies_get_openai_errors(cluster: LiveCluster) -> None:
    bodies = [
        (b"{", 400),
        (b'{"model": "\xff"}', 400),
        (json.dumps({"model": "gpt-7", "prompt": "Hi"}).encode(), 404),
        (json.dumps({"prompt": "Hi", "max_tokens": "many"}).encode(), 400),
        (json.dumps({"prompt": "Hi", "max_tokens": -3}).encode(), 400),
        (json.dumps({"prompt": "Hi", "n": 0}).encode(), 400),
        (json.dumps({"prompt": "Hi", "guided_regex": "(["}).encode(), 400),
        (json.dumps({"prompt": "", "max_tokens": 3}).encode(), 400),
        (json.dumps({"prompt": 5}).encode(), 400),
    ]
    with httpx.Client(base_url=cluster.http) as client:
        for body, status in bodies:
            reply = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert reply.status_code == status, (body, reply.text)
            assert reply.json()["error"]["message"], body


# --- cancel


async def cancelled_in_phase(cluster: LiveCluster, phase: str, prompts: dict[str, list[int]]) -> None:
    """Starts requests, cancels one of them when the status shows it in `phase`, lets the others finish."""
    long, first, short = prompts["length_2050"], prompts["length_1025"], prompts["length_33"]
    async with stub_of(cluster) as stub:
        queued = phase == "queued"
        ahead = asyncio.create_task(generate(stub, first, max_tokens=4, cache_salt="ahead")) if queued else None
        if ahead is not None:
            await until(cluster, lambda s: workers_of(s, "prefill")[0].num_running == 1)
        prompt = short if phase == "decoding" else long
        fields = {"max_tokens": 2000, "ignore_eos": True, "request_id": "victim", "cache_salt": phase}
        call = stub.Generate(request_of(prompt, **fields))
        reader = asyncio.create_task(anext(aiter(call)))
        seen = {
            "queued": lambda s: s.num_running_requests == 2,
            "prefilling": lambda s: workers_of(s, "prefill")[0].num_running == 1,
            "transferring": lambda s: workers_of(s, "decode")[0].num_handoffs == 1,
            "decoding": lambda s: workers_of(s, "decode")[0].num_running == 1,
        }[phase]
        before = await until(cluster, seen)
        if phase == "prefilling":
            await stub.Cancel(inference_pb2.CancelRequest(request_id="victim"))
        else:
            call.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        if ahead is not None:
            await ahead
        after = await until(cluster, is_idle)
    for role, most in (("prefill", 2 * 512 + (len(first) if queued else 0)), ("decode", 4 + 64)):
        done = workers_of(after, role)[0].num_tokens - workers_of(before, role)[0].num_tokens
        assert done <= most, f"{phase}: {done} tokens on {role} after the cancel"


@pytest.mark.parametrize("phase", ["queued", "prefilling", "transferring", "decoding"])
def test_a_cancel_stops_the_work_and_frees_every_block(
    cluster: LiveCluster, phase: str, prompts: dict[str, list[int]]
) -> None:
    run(cancelled_in_phase(cluster, phase, prompts))


def test_a_cancelled_prefill_stops_within_a_chunk(cluster: LiveCluster, prompts: dict[str, list[int]]) -> None:
    async def cancel() -> int:
        async with stub_of(cluster) as stub:
            call = stub.Generate(request_of(prompts["length_2050"] * 3, max_tokens=4, request_id="long"))
            reader = asyncio.create_task(anext(aiter(call)))
            start = workers_of(await cluster_status(cluster), "prefill")[0].num_tokens
            running = await until(cluster, lambda s: workers_of(s, "prefill")[0].num_tokens >= start + 512)
            await stub.Cancel(inference_pb2.CancelRequest(request_id="long"))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await reader
            assert ended.value.code() is grpc.StatusCode.CANCELLED
            idle = await until(cluster, is_idle)
            return workers_of(idle, "prefill")[0].num_tokens - workers_of(running, "prefill")[0].num_tokens

    assert run(cancel()) <= 2 * 512, "one chunk may be running when the cancel comes, one more may have begun"


def test_a_http_client_that_hangs_up_frees_every_block(cluster: LiveCluster) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=cluster.http) as client, client.stream("POST", "/v1/completions", json=body) as reply:
        assert next(reply.iter_lines()).startswith("data:")
    status = run(until(cluster, is_idle))
    assert status.num_running_requests == 0


def test_a_deadline_ends_a_request_with_its_own_error(cluster: LiveCluster) -> None:
    async def late() -> tuple[grpc.StatusCode, str, str]:
        async with stub_of(cluster) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await generate(stub, "Once upon a time", max_tokens=4000, ignore_eos=True, timeout_s=1.0)
            return status_of(ended.value)

    assert run(late())[:2] == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")


# --- clients


def test_the_openai_client_works(cluster: LiveCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    plain = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0)
    streamed = client.completions.create(
        model=model,
        prompt="The capital of France is",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(streamed)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert chunks[-1].usage == plain.usage
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=20, temperature=0
    )
    assert chat.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-7", prompt="Hi")
    client.close()


LOOK_UP = {"type": "object", "properties": {"place": {"enum": ["Paris", "London"]}}, "required": ["place"]}


def test_form_choices_and_log_probabilities_are_held_across_processes(cluster: LiveCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    said = client.chat.completions.create(
        model=model,
        messages=question,
        n=3,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        extra_body={"guided_choice": ["It is Paris.", "It is London."], "repetition_penalty": 1.1},
    )
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    for choice in said.choices:
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert "".join(t.token for t in choice.logprobs.content or []).startswith(choice.message.content or "-")
    assert {choice.message.content for choice in said.choices} <= {"It is Paris.", "It is London."}
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": LOOK_UP}}
    called = client.chat.completions.create(
        model=model, messages=question, tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    [call] = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["place"] in ("Paris", "London")
    client.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_works(cluster: LiveCluster) -> None:
    body = json.dumps({"prompt": [504, 3575, 282], "max_tokens": 4, "temperature": 0, "return_token_ids": True})
    command = ["curl", "-sS", "--fail", f"{cluster.http}/v1/completions", "-H", "Content-Type: application/json"]
    reply = json.loads(subprocess.run([*command, "-d", body], check=True, capture_output=True).stdout)
    assert len(reply["choices"][0]["token_ids"]) == 4
    assert reply["usage"] == {**reply["usage"], "prompt_tokens": 3, "completion_tokens": 4}


def test_reflection_describes_the_api(cluster: LiveCluster) -> None:
    async def ask(**question: str) -> reflection_pb2.ServerReflectionResponse:
        async with open_channel(cluster.grpc) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**question)]))
            return await anext(aiter(call))

    listed = run(ask(list_services="")).list_services_response.service
    assert {"tandem.v1.Inference", "tandem.v1.Admin", "grpc.health.v1.Health"} <= {s.name for s in listed}
    found = run(ask(file_containing_symbol="tandem.v1.Inference")).file_descriptor_response.file_descriptor_proto
    files = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in found]
    assert any(service.name == "Inference" for file in files for service in file.service)


# --- what is measured


def test_the_kv_of_a_long_prompt_leaves_while_the_prompt_is_computed(
    cluster: LiveCluster, prompts: dict[str, list[int]]
) -> None:
    async def long_one() -> Answer:
        async with stub_of(cluster) as stub:
            return await generate(stub, prompts["length_1025"], max_tokens=4, ignore_eos=True, cache_salt="moved whole")

    timings = run(long_one()).timings
    assert timings is not None
    transfer = timings.prefill.transfer
    assert transfer.transport == "ucx"
    assert transfer.num_bytes == 65 * 30 * 24_576
    assert sum(m.num_blocks * m.num_layers for m in transfer.messages) == 65 * 30
    assert transfer.before_last_layer_bytes >= 0.9 * transfer.num_bytes
    assert transfer.hidden_bytes >= transfer.before_last_layer_bytes
    assert timings.ttft_s > 0
    assert timings.tbt_p50_s > 0


def test_the_status_shows_the_link_and_its_transport(cluster: LiveCluster) -> None:
    async def status() -> inference_pb2.ClusterStatus:
        async with stub_of(cluster) as stub:
            await generate(stub, "Hello", max_tokens=2)
        return await cluster_status(cluster)

    (prefill,) = workers_of(run(status()), "prefill")
    (link,) = prefill.links
    assert (link.peer_worker_id, link.transport) == ("decode-0", "ucx")
    assert link.detail
    assert link.num_bytes > 0
    assert link.bytes_per_s > 0


def test_models_and_health_answer(cluster: LiveCluster) -> None:
    async def models() -> list[str]:
        async with open_channel(cluster.grpc) as channel:
            listed = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
            return [model.name for model in listed.models]

    with httpx.Client(base_url=cluster.http) as client:
        assert client.get("/health").status_code == 200
        assert "tandem_router_requests_total" in client.get("/metrics").text
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == run(models())


# --- metrics


def test_every_process_serves_its_documented_metrics(cluster: LiveCluster, prompts: dict[str, list[int]]) -> None:
    async def one_request() -> Answer:
        async with stub_of(cluster) as stub:
            return await generate(stub, prompts["code_sql"], max_tokens=4)

    status = run(cluster_status(cluster))
    urls = {"router": f"{cluster.http}/metrics"} | {f"{w.role} worker": w.metrics_url for w in status.workers}
    before = {process: scrape(url) for process, url in urls.items()}
    run(one_request())
    after = {process: scrape(url) for process, url in urls.items()}
    assert set(urls) == {"router", "prefill worker", "decode worker"}
    for process, families in after.items():
        for spec in SETS[process][0]().specs:
            family = families[spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name]
            assert family.type == spec.kind, spec.name
            assert family.samples or spec.labels, spec.name
        counts = values_of(families)
        assert all(counts[key] >= old for key, old in values_of(before[process]).items())
        assert counts != values_of(before[process])


def scrape(url: str) -> dict[str, Metric]:
    """Families by name, as a Prometheus server parses them."""
    response = httpx.get(url, trust_env=False)
    assert response.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def values_of(families: dict[str, Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Everything of our own that may only grow."""
    growing = [f for f in families.values() if f.type in ("counter", "histogram") and f.name.startswith("tandem_")]
    return {(s.name, frozenset(s.labels.items())): s.value for family in growing for s in family.samples}
