"""One request at the router, without a protocol: text, ends, limits, cancel, and that workers are always told."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.output import OutputDelta, merged
from router.prompt import Conversation
from router.stream import OutputStream
from router.validation import SamplingOptions
from tandem.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestCancelled,
    RequestNotFound,
    TandemError,
    WorkerUnavailable,
)
from tandem.types import FinishReason
from tests.fake_dispatcher import FakeDispatcher, Script
from tests.router_harness import EOS, make_frontend, runs_async, saying, scripted, tokenizer

PLAIN = SamplingOptions()


async def read(stream: OutputStream) -> OutputDelta:
    """The whole output as one step."""
    output = OutputDelta()
    async with stream:
        async for delta in stream:
            output = merged([output, delta])
    return output


def value(frontend, name: str, **labels: str) -> float:
    return frontend.metrics.registry.get_sample_value(name, labels) or 0.0


@runs_async
async def test_an_output_has_text_tokens_usage_and_timings():
    dispatcher = saying("Hello there")
    frontend = make_frontend(dispatcher)
    output = await read(await frontend.open("Say hello", PLAIN, request_id="r1"))
    assert output.text == "Hello there"
    assert output.token_ids == (*tokenizer().encode("Hello there"), EOS)
    assert output.finish_reason is FinishReason.STOP
    assert output.usage is not None
    assert output.timings is not None
    num_prompt = len(tokenizer().encode("Say hello"))
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (num_prompt, len(output.token_ids))
    assert output.usage.cached_tokens == 3
    assert output.timings.prefill_worker == "prefill-0"
    assert 0 <= output.timings.tokenize_s <= output.timings.ttft_s <= output.timings.total_s
    assert not dispatcher.dispatches[0].aborted.is_set()
    assert frontend.num_running == 0


@runs_async
async def test_the_request_that_workers_see_is_resolved():
    dispatcher = saying("ok")
    arrival_s = time.monotonic()
    await read(await make_frontend(dispatcher, default_timeout_s=7).open([5, 6], PLAIN, arrival_s=arrival_s))
    request = dispatcher.dispatches[0].request
    assert request.prompt_token_ids == (5, 6)
    assert request.sampling.max_tokens == 100_000 - 2
    assert request.sampling.stop_token_ids == (EOS,)
    assert (request.arrival_s, request.deadline_s) == (arrival_s, arrival_s + 7)


@runs_async
async def test_absent_seeds_differ_and_a_given_one_is_kept():
    dispatcher = saying("ok")
    frontend = make_frontend(dispatcher)
    for options in (PLAIN, PLAIN, SamplingOptions(seed=0)):
        await read(await frontend.open("a", options))
    first, second, third = (dispatch.request.sampling.seed for dispatch in dispatcher.dispatches)
    assert first != second
    assert third == 0


@runs_async
async def test_a_long_prompt_has_the_tokens_of_the_whole_text():
    text = "many words " * 2_000
    dispatcher = saying("ok")
    await read(await make_frontend(dispatcher).open(text, PLAIN))
    assert list(dispatcher.dispatches[0].request.prompt_token_ids) == tokenizer().encode(text)


@runs_async
async def test_a_conversation_goes_through_the_chat_template():
    dispatcher = saying("ok")
    messages = ({"role": "user", "content": "Hi"},)
    await read(await make_frontend(dispatcher).open(Conversation(messages=messages), PLAIN))
    prompt = tokenizer()._backend.decode(dispatcher.dispatches[0].request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_max_tokens_ends_with_length(max_tokens):
    @runs_async
    async def run():
        output = await read(
            await make_frontend(saying("one two three")).open("a", SamplingOptions(max_tokens=max_tokens))
        )
        assert (len(output.token_ids), output.finish_reason) == (max_tokens, FinishReason.LENGTH)

    run()


@runs_async
async def test_end_of_sequence_as_the_first_token_gives_no_text():
    output = await read(await make_frontend(scripted([EOS])).open("a", PLAIN))
    assert (output.text, output.token_ids, output.finish_reason) == ("", (EOS,), FinishReason.STOP)


@runs_async
async def test_ignore_eos_goes_on():
    dispatcher = scripted([EOS, *tokenizer().encode("more")], repeat=True)
    output = await read(await make_frontend(dispatcher).open("a", SamplingOptions(ignore_eos=True, max_tokens=5)))
    assert len(output.token_ids) == 5
    assert output.finish_reason is FinishReason.LENGTH


@runs_async
async def test_a_stop_string_across_tokens_ends_the_request_early_and_is_not_returned():
    dispatcher = scripted(tokenizer().encode("one two END three four"), repeat=True)
    output = await read(await make_frontend(dispatcher).open("a", SamplingOptions(stop=("o END t",))))
    assert (output.text, output.finish_reason) == ("one tw", FinishReason.STOP)
    dispatch = dispatcher.dispatches[0]
    assert dispatch.finished.is_set()
    assert dispatch.num_steps == output.usage.completion_tokens < len(tokenizer().encode("one two END three four"))


@runs_async
async def test_a_stop_string_in_the_first_token_gives_no_text():
    output = await read(await make_frontend(saying("Hello there")).open("a", SamplingOptions(stop=("He",))))
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("", FinishReason.STOP, 1)


@runs_async
async def test_text_held_back_for_a_stop_string_comes_at_the_end():
    output = await read(await make_frontend(saying("one EN")).open("a", SamplingOptions(stop=("END",))))
    assert output.text == "one EN"


@runs_async
async def test_no_step_holds_a_part_of_an_emoji():
    stream = await make_frontend(saying("a🎉b👩‍👧")).open("a", PLAIN)
    async with stream:
        texts = [delta.text async for delta in stream]
    assert "".join(texts) == "a🎉b👩‍👧"
    assert not any("\ufffd" in text for text in texts)


@runs_async
async def test_the_first_token_comes_while_later_ones_are_not_there():
    dispatcher = scripted([*tokenizer().encode("Hello there"), EOS], stall_at=1)
    stream = await make_frontend(dispatcher).open("a", PLAIN)
    async with stream:
        assert (await anext(stream)).text == "Hello"
        dispatcher.dispatches[0].release.set()
        rest = [delta async for delta in stream]
    assert rest[-1].finish_reason is FinishReason.STOP


@runs_async
async def test_an_error_of_a_worker_reaches_the_client_after_what_came_before():
    dispatcher = scripted(tokenizer().encode("one two"), error=WorkerUnavailable("worker d0 died"), stall_at=2)
    frontend = make_frontend(dispatcher)
    stream = await frontend.open("a", PLAIN)
    async with stream:
        await anext(stream)
        dispatcher.dispatches[0].release.set()
        with pytest.raises(WorkerUnavailable, match="d0 died"):
            async for _ in stream:
                pass
    assert dispatcher.dispatches[0].aborted.is_set()
    assert value(frontend, "tandem_router_requests_total", code="worker_unavailable") == 1


@runs_async
async def test_a_stream_that_stops_without_a_reason_is_an_internal_error():
    with pytest.raises(TandemError, match="without a finish reason"):
        await read(await make_frontend(scripted([5])).open("a", PLAIN))


@runs_async
async def test_the_deadline_ends_a_request_and_stops_its_workers():
    dispatcher = scripted([5], stall_at=0)
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.05 s"):
        await read(await make_frontend(dispatcher).open("a", PLAIN, timeout_s=0.05))
    assert dispatcher.dispatches[0].aborted.is_set()


@runs_async
async def test_cancel_ends_a_request_by_its_id():
    dispatcher = scripted([5], stall_at=0)
    frontend = make_frontend(dispatcher)
    stream = await frontend.open("a", PLAIN, request_id="r1")
    reading = asyncio.create_task(read(stream))
    await dispatcher.dispatches[0].stalled.wait()
    frontend.cancel("r1")
    with pytest.raises(RequestCancelled):
        await reading
    assert dispatcher.dispatches[0].aborted.is_set()
    with pytest.raises(RequestNotFound):
        frontend.cancel("r1")


@runs_async
async def test_cancel_reaches_a_request_whose_client_does_not_read():
    dispatcher = scripted([5], stall_at=0)
    frontend = make_frontend(dispatcher)
    stream = await frontend.open("a", PLAIN, request_id="r1")
    frontend.cancel("r1")
    await dispatcher.dispatches[0].aborted.wait()
    await stream.aclose()
    assert frontend.num_running == 0


@runs_async
async def test_cancel_while_a_prompt_is_tokenized_dispatches_nothing():
    dispatcher = saying("ok")
    frontend = make_frontend(dispatcher)
    opening = asyncio.create_task(frontend.open("word " * 20_000, PLAIN, request_id="r1"))
    await asyncio.sleep(0)  # one turn: the request is admitted, and its prompt is with a thread
    assert frontend.num_running == 1
    frontend.cancel("r1")
    with pytest.raises(RequestCancelled):
        await opening
    assert dispatcher.dispatches == []
    assert frontend.num_running == 0


@runs_async
async def test_a_consumer_that_is_cancelled_stops_the_workers():
    dispatcher = scripted([5], stall_at=0)
    frontend = make_frontend(dispatcher)
    reading = asyncio.create_task(read(await frontend.open("a", PLAIN)))
    await dispatcher.dispatches[0].stalled.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert dispatcher.dispatches[0].aborted.is_set()
    assert frontend.num_running == 0
    assert value(frontend, "tandem_router_requests_total", code="cancelled") == 1


@runs_async
async def test_a_generator_that_is_closed_early_stops_the_workers():
    dispatcher = scripted([5], repeat=True)
    output = make_frontend(dispatcher).generate("a", PLAIN)
    await anext(output)
    await output.aclose()
    assert dispatcher.dispatches[0].aborted.is_set()


@runs_async
async def test_a_stream_that_is_closed_before_it_began_stops_the_workers():
    dispatcher = scripted([5], repeat=True)
    frontend = make_frontend(dispatcher)
    await (await frontend.open("a", PLAIN)).aclose()
    assert dispatcher.dispatches[0].aborted.is_set()
    assert frontend.num_running == 0


@runs_async
async def test_a_client_that_reads_too_slowly_is_ended_and_others_are_not():
    dispatcher = FakeDispatcher(lambda request: Script(token_ids=[5], repeat=True))
    frontend = make_frontend(dispatcher, output_buffer_tokens=8)
    slow = await frontend.open("a", PLAIN)
    await anext(slow)
    await dispatcher.dispatches[0].aborted.wait()
    with pytest.raises(Overloaded, match="client reads too slowly"):
        await anext(slow)
    await slow.aclose()
    output = await read(await frontend.open("a", SamplingOptions(max_tokens=50)))
    assert len(output.token_ids) == 50


@runs_async
async def test_an_id_in_use_is_refused_and_free_again_afterwards():
    dispatcher = scripted([5, EOS], stall_at=0)
    frontend = make_frontend(dispatcher)
    stream = await frontend.open("a", PLAIN, request_id="r1")
    with pytest.raises(DuplicateRequest):
        await frontend.open("a", PLAIN, request_id="r1")
    await stream.aclose()
    await (await frontend.open("a", PLAIN, request_id="r1")).aclose()


@runs_async
async def test_more_requests_than_the_limit_are_refused():
    frontend = make_frontend(scripted([5], stall_at=0), max_running_requests=1)
    async with await frontend.open("a", PLAIN):
        with pytest.raises(Overloaded) as caught:
            await frontend.open("a", PLAIN)
    assert caught.value.retry_after_s is not None


@runs_async
async def test_a_refused_dispatch_frees_its_place():
    dispatcher = saying("ok")
    dispatcher.refuse = Overloaded("all queues are full", retry_after_s=3)
    frontend = make_frontend(dispatcher)
    with pytest.raises(Overloaded, match="queues"):
        await frontend.open("a", PLAIN)
    assert frontend.num_running == 0
    assert value(frontend, "tandem_router_running_requests") == 0


@runs_async
async def test_models_are_known_by_name_and_absent_before_workers_are():
    dispatcher = saying("ok")
    frontend = make_frontend(dispatcher)
    assert frontend.served_model().name == frontend.served_model("test-model").name == "test-model"
    with pytest.raises(ModelNotFound, match=r"'gpt'.*'test-model'"):
        frontend.served_model("gpt")
    dispatcher.served = None
    with pytest.raises(WorkerUnavailable):
        frontend.served_model("gpt")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", InvalidRequest),
        ([], InvalidRequest),
        ([-1], InvalidRequest),
        ([49_152], InvalidRequest),
        ("\ud800", InvalidRequest),
        (Conversation(messages=()), InvalidRequest),
        (Conversation(messages=({"role": "robot", "content": "x"},)), InvalidRequest),
        ([5] * 100_000, ContextLengthExceeded),
    ],
)
def test_a_wrong_prompt_is_refused_before_dispatch(prompt, error):
    @runs_async
    async def run():
        dispatcher = saying("ok")
        frontend = make_frontend(dispatcher)
        with pytest.raises(error):
            await frontend.open(prompt, PLAIN)
        assert dispatcher.dispatches == []
        assert frontend.num_running == 0
        assert value(frontend, "tandem_router_requests_total", code=error.code) == 1

    run()


@runs_async
async def test_draining_lets_running_requests_end_and_refuses_new_ones():
    dispatcher = scripted([5, EOS], stall_at=1)
    frontend = make_frontend(dispatcher)
    reading = asyncio.create_task(read(await frontend.open("a", PLAIN)))
    draining = asyncio.create_task(frontend.drain(30))
    await dispatcher.dispatches[0].stalled.wait()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await frontend.open("a", PLAIN)
    dispatcher.dispatches[0].release.set()
    assert (await reading).finish_reason is FinishReason.STOP
    await draining


@runs_async
async def test_draining_ends_what_outlives_the_grace():
    dispatcher = scripted([5], stall_at=0)
    frontend = make_frontend(dispatcher)
    reading = asyncio.create_task(read(await frontend.open("a", PLAIN)))
    await frontend.drain(0.05)
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await reading
    assert dispatcher.dispatches[0].aborted.is_set()


@runs_async
async def test_metrics_count_tokens_and_times():
    frontend = make_frontend(saying("one two three"))
    output = await read(await frontend.open("a b", PLAIN))
    num_tokens = len(output.token_ids)
    assert value(frontend, "tandem_router_requests_total", code="ok") == 1
    assert value(frontend, "tandem_router_completion_tokens_total") == num_tokens
    assert value(frontend, "tandem_router_prompt_tokens_total") == output.usage.prompt_tokens
    assert value(frontend, "tandem_router_time_to_first_token_seconds_count") == 1
    assert value(frontend, "tandem_router_time_between_tokens_seconds_count") == num_tokens - 1
