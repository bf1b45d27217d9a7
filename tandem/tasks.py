"""Ending asyncio tasks for certain: some libraries swallow a cancellation that comes while they connect."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.2


def raise_if_cancelled() -> None:
    """Raises CancelledError when the current task was cancelled, even if a library has swallowed that."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks, again and again until each has ended; their results and errors are dropped."""
    pending = {task for task in tasks if task is not asyncio.current_task()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
