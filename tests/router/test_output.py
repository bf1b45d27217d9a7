"""The buffer between tokens and a slow client: steps of one choice are joined, the last step stays last."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from router.output import OutputBuffer, OutputDelta, merged
from router.tool_parser import ToolCallDelta
from tandem.errors import Overloaded
from tandem.rpc.tandem.v1 import inference_pb2
from tandem.types import FinishReason


async def read_all(buffer: OutputBuffer) -> list[OutputDelta]:
    deltas = []
    while (delta := await buffer.get()) is not None:
        deltas.append(delta)
    return deltas


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20), st.integers(0, 2))
def test_each_choice_is_read_whole_and_in_order_and_usage_comes_last(
    steps: list[tuple[int, bool]], last: int
) -> None:
    async def run() -> None:
        buffer = OutputBuffer(max_tokens=100)
        read: list[OutputDelta] = []
        for token_id, (choice, reads) in enumerate(steps):
            buffer.put(OutputDelta(choice=choice, text=f"{token_id};", token_ids=(token_id,)))
            if reads:
                delta = await buffer.get()
                assert delta is not None
                read.append(delta)
        buffer.put(OutputDelta(choice=last, finish_reason=FinishReason.STOP, usage=inference_pb2.Usage()))
        read += await read_all(buffer)
        for choice in range(3):
            expected = [token_id for token_id, (of, _) in enumerate(steps) if of == choice]
            assert [t for d in read if d.choice == choice for t in d.token_ids] == expected
            assert "".join(d.text for d in read if d.choice == choice) == "".join(f"{t};" for t in expected)
        assert [delta.usage is not None for delta in read] == [False] * (len(read) - 1) + [True]

    asyncio.run(run())


def test_tokens_that_were_read_make_room_for_others() -> None:
    async def run() -> None:
        buffer = OutputBuffer(max_tokens=2)
        buffer.put(OutputDelta(choice=0, token_ids=(1,)))
        buffer.put(OutputDelta(choice=1, token_ids=(2,)))
        await buffer.get()
        buffer.put(OutputDelta(choice=0, token_ids=(3,)))
        with pytest.raises(Overloaded):
            buffer.put(OutputDelta(choice=0, token_ids=(4,)))

    asyncio.run(run())


def test_steps_that_are_joined_have_one_entry_for_each_call() -> None:
    first = OutputDelta(tool_calls=(ToolCallDelta(index=0, call_id="c", name="add", arguments="{"),))
    second = OutputDelta(tool_calls=(ToolCallDelta(index=0, arguments="}"), ToolCallDelta(index=1, name="look")))
    assert merged([first, second]).tool_calls == (
        ToolCallDelta(index=0, call_id="c", name="add", arguments="{}"),
        ToolCallDelta(index=1, name="look"),
    )
