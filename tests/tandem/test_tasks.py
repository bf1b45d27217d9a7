"""Tasks end even when something in them swallows cancellations."""

from __future__ import annotations

import asyncio

from tandem.tasks import cancel_all


def test_a_task_that_swallows_its_first_cancellation_is_ended_too() -> None:
    async def stubborn(swallowed: list[int]) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed.append(1)

    async def body() -> list[int]:
        swallowed: list[int] = []
        task = asyncio.create_task(stubborn(swallowed))
        await asyncio.sleep(0)
        await cancel_all([task])
        assert task.cancelled()
        return swallowed

    assert asyncio.run(body()) == [1]
