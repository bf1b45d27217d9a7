"""The gRPC API over a real server: streams, errors, cancel, health, reflection."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tandem.errors import BY_CODE, WIRE_STATUS, WorkerUnavailable
from tandem.rpc.client import open_channel
from tandem.rpc.status import from_rpc_error
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.router_harness import EOS, running, runs_async, saying, scripted, tokenizer

STOP = common_pb2.FINISH_REASON_STOP


def generate(**fields: object) -> inference_pb2.GenerateRequest:
    if "text" not in fields and "token_ids" not in fields:
        fields["text"] = "a"
    return inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


async def failure(stub, request) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request):
            pass
    return caught.value


async def read_to_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@runs_async
async def test_generate_streams_text_and_ends_with_usage_and_timings():
    async with running(saying("Hello 🎉")) as router, open_channel(router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(text="Say", request_id="r1"))
        steps = [step async for step in call]
    assert "".join(step.text for step in steps) == "Hello 🎉"
    assert [t for step in steps for t in step.token_ids] == [*tokenizer().encode("Hello 🎉"), EOS]
    assert {step.request_id for step in steps} == {"r1"}
    last = steps[-1]
    assert (last.finish_reason, last.usage.prompt_tokens, last.usage.cached_tokens) == (STOP, 1, 3)
    assert (last.timings.prefill_worker, last.timings.decode_worker) == ("prefill-0", "decode-0")
    assert last.timings.HasField("prefill")


@runs_async
async def test_token_ids_are_used_as_they_are_and_sampling_arrives():
    dispatcher = saying("ok")
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        sampling = common_pb2.SamplingParams(temperature=0, seed=9, top_k=4, max_tokens=5, stop_token_ids=[7])
        request = generate(token_ids=inference_pb2.TokenIds(ids=[5, 6]), sampling=sampling)
        [_ async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    seen = dispatcher.dispatches[0].request
    assert seen.prompt_token_ids == (5, 6)
    assert (seen.sampling.temperature, seen.sampling.seed, seen.sampling.top_k) == (0, 9, 4)
    assert (seen.sampling.max_tokens, seen.sampling.stop_token_ids) == (5, (2, 7))


@runs_async
async def test_chat_applies_the_template():
    dispatcher = saying("ok")
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="Hi")])
        [_ async for _ in inference_pb2_grpc.InferenceStub(channel).Chat(request)]
    expected = tokenizer().encode_chat([{"role": "user", "content": "Hi"}])
    assert list(dispatcher.dispatches[0].request.prompt_token_ids) == expected


@runs_async
async def test_cancelling_the_call_stops_the_workers():
    dispatcher = scripted([5], stall_at=1)
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate())
        await call.read()
        call.cancel()
        await dispatcher.dispatches[0].aborted.wait()


@runs_async
async def test_a_channel_that_closes_stops_the_workers():
    dispatcher = scripted([5], stall_at=1)
    async with running(dispatcher) as router:
        channel = open_channel(router.grpc_address)
        await inference_pb2_grpc.InferenceStub(channel).Generate(generate()).read()
        await channel.close()
        await dispatcher.dispatches[0].aborted.wait()


@runs_async
async def test_a_client_that_stops_reading_is_ended_as_overloaded():
    dispatcher = scripted([5], repeat=True)
    async with running(dispatcher, output_buffer_tokens=64) as router, open_channel(router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(sampling={"ignore_eos": True}))
        await call.read()
        await dispatcher.dispatches[0].aborted.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@runs_async
async def test_the_cancel_rpc_ends_a_request_from_another_connection():
    dispatcher = scripted([5], stall_at=1)
    async with (
        running(dispatcher) as router,
        open_channel(router.grpc_address) as one,
        open_channel(router.grpc_address) as other,
    ):
        call = inference_pb2_grpc.InferenceStub(one).Generate(generate(request_id="r1"))
        await call.read()
        await inference_pb2_grpc.InferenceStub(other).Cancel(inference_pb2.CancelRequest(request_id="r1"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert dispatcher.dispatches[0].aborted.is_set()
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await inference_pb2_grpc.InferenceStub(other).Cancel(inference_pb2.CancelRequest(request_id="r1"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


@runs_async
async def test_a_timeout_in_the_request_and_a_deadline_of_the_call_both_hold():
    dispatcher = scripted([5], stall_at=0)
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert (await failure(stub, generate(timeout_s=0.05))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(generate(), timeout=0.3):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await dispatcher.dispatches[1].aborted.wait()


@pytest.mark.parametrize("cls", list(WIRE_STATUS))
def test_every_error_of_a_dispatch_has_its_status(cls):
    @runs_async
    async def run():
        dispatcher = scripted([5], error=cls("went wrong", param="p", retry_after_s=2))
        async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
            error = await failure(inference_pb2_grpc.InferenceStub(channel), generate())
        assert error.code() is grpc.StatusCode[WIRE_STATUS[cls].grpc]
        back = from_rpc_error(error)
        assert (back.code, back.message, back.param, back.retry_after_s) == (cls.code, "went wrong", "p", 2)

    run()


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"text": ""}, "invalid_request", "prompt"),
        ({"token_ids": {"ids": []}}, "invalid_request", "prompt"),
        ({"token_ids": {"ids": [-1]}}, "invalid_request", "prompt"),
        ({"token_ids": {"ids": [49152]}}, "invalid_request", "prompt"),
        ({"model": "gpt"}, "model_not_found", "model"),
        ({"sampling": {"max_tokens": -1}}, "invalid_request", "max_tokens"),
        ({"sampling": {"max_tokens": 200_000}}, "context_length_exceeded", "max_tokens"),
        ({"sampling": {"temperature": float("nan")}}, "invalid_request", "temperature"),
        ({"sampling": {"top_p": 0}}, "invalid_request", "top_p"),
        ({"sampling": {"stop": [""]}}, "invalid_request", "stop"),
        ({"timeout_s": -1.0}, "invalid_request", "timeout_s"),
        ({"request_id": "a b"}, "invalid_request", "request_id"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields, code, param):
    @runs_async
    async def run():
        async with running(saying("ok")) as router, open_channel(router.grpc_address) as channel:
            error = from_rpc_error(await failure(inference_pb2_grpc.InferenceStub(channel), generate(**fields)))
        assert (error.code, error.param) == (code, param)

    run()


@runs_async
async def test_a_request_without_a_prompt_is_refused():
    async with running(saying("ok")) as router, open_channel(router.grpc_address) as channel:
        error = await failure(inference_pb2_grpc.InferenceStub(channel), inference_pb2.GenerateRequest())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@runs_async
async def test_what_is_refused_before_a_request_begins_is_counted_once():
    async with running(saying("ok")) as router, open_channel(router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await failure(stub, generate(model="other"))
        await failure(stub, inference_pb2.GenerateRequest())
        counted = {code: router.frontend.metrics.requests.labels(code=code)._value.get() for code in BY_CODE}
    assert {code: count for code, count in counted.items() if count} == {"model_not_found": 1, "invalid_request": 1}


@runs_async
async def test_models_and_cluster_status():
    dispatcher = saying("ok")
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        admin = inference_pb2_grpc.AdminStub(channel)
        status = await admin.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        dispatcher.served = None
        assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.max_context_tokens) == ("test-model", 100_000)
    assert status.workers[0].worker_id == "prefill-0"


@runs_async
async def test_health_follows_the_workers():
    dispatcher = saying("ok")
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="tandem.v1.Inference"))
        seen = [(await watch.read()).status]
        while seen[-1] != health_pb2.HealthCheckResponse.SERVING:
            seen.append((await watch.read()).status)
        dispatcher.is_ready = False
        seen.append((await watch.read()).status)
        watch.cancel()
    assert seen[-1] == health_pb2.HealthCheckResponse.NOT_SERVING


@runs_async
async def test_reflection_lists_and_describes_the_services():
    async with running(saying("ok")) as router:
        services, methods, fields = await asyncio.to_thread(describe, router.grpc_address)
    assert {"tandem.v1.Inference", "tandem.v1.Admin", "grpc.health.v1.Health"} <= set(services)
    assert {"Generate", "Chat", "Cancel", "ListModels"} == methods
    assert "prompt_tokens" in fields


def describe(address: str) -> tuple[list[str], set[str], set[str]]:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("tandem.v1.Inference")
        usage = pool.FindMessageTypeByName("tandem.v1.Usage")
        return list(database.get_services()), set(service.methods_by_name), set(usage.fields_by_name)


@runs_async
async def test_stopping_the_router_ends_streams_with_unavailable():
    dispatcher = scripted([5], stall_at=1)
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate())
        await call.read()
        stopping = asyncio.create_task(router.stop(0.05))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        await stopping
    assert type(from_rpc_error(caught.value)) is WorkerUnavailable
    assert dispatcher.dispatches[0].aborted.is_set()


@runs_async
async def test_every_field_of_a_request_arrives_and_each_choice_answers_under_its_number():
    dispatcher = saying("ok")
    sampling = common_pb2.SamplingParams(
        temperature=0.5,
        min_p=0.25,
        min_tokens=1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={7: 1.5, 3: -2.0},
        logprobs=2,
        prompt_logprobs=0,
        n=2,
        priority=-7,
    )
    async with running(dispatcher) as router, open_channel(router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(sampling=sampling))
        steps = [step async for step in call]
    for choice in (0, 1):
        mine = [step for step in steps if step.choice == choice]
        assert "".join(step.text for step in mine) == "ok"
        assert [step.finish_reason for step in mine][-1] == STOP
    assert [step.HasField("usage") for step in steps][-1]
    request = dispatcher.dispatches[0].request
    resolved = request.sampling
    assert (request.num_choices, resolved.min_p, resolved.min_tokens) == (2, 0.25, 1)
    assert request.priority == -7
    penalties = (resolved.presence_penalty, resolved.frequency_penalty, resolved.repetition_penalty)
    assert penalties == (0.5, -0.5, 1.5)
    assert resolved.logit_bias == ((3, -2.0), (7, 1.5))
    assert (resolved.num_logprobs, resolved.num_prompt_logprobs) == (2, 0)


@pytest.mark.parametrize(
    ("grammar", "param"),
    [
        ({}, "grammar"),
        ({"regex": "(["}, "grammar"),
        ({"json_schema": "{"}, "grammar.json_schema"),
        ({"choice": {}}, "grammar.choice"),
        ({"ebnf": ""}, "grammar.ebnf"),
    ],
)
def test_a_grammar_that_cannot_be_is_named(grammar, param):
    @runs_async
    async def run():
        async with running(saying("ok")) as router, open_channel(router.grpc_address) as channel:
            request = generate(sampling={"grammar": grammar})
            error = from_rpc_error(await failure(inference_pb2_grpc.InferenceStub(channel), request))
        assert (error.code, error.param) == ("invalid_request", param)

    run()


@runs_async
async def test_a_chat_with_tools_streams_its_calls():
    text = '<tool_call>[{"name": "add", "arguments": {"x": 1}}]</tool_call>'
    request = inference_pb2.ChatRequest(
        messages=[
            {"role": "user", "content": "Go."},
            {"role": "assistant", "tool_calls": [{"id": "a", "name": "add", "arguments": '{"x": 0}'}]},
            {"role": "tool", "content": "0", "tool_call_id": "a"},
        ],
        tools=[{"name": "add", "parameters": '{"type": "object"}'}],
    )
    async with running(saying(text)) as router, open_channel(router.grpc_address) as channel:
        steps = [step async for step in inference_pb2_grpc.InferenceStub(channel).Chat(request)]
    calls = [call for step in steps for call in step.tool_calls]
    assert [call.name for call in calls if call.name] == ["add"]
    assert "".join(call.arguments for call in calls) == '{"x": 1}'
    assert steps[-1].finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert "".join(step.text for step in steps) == ""
