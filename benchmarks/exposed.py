"""How much of a handoff is left when the prefill is over: a real prefill and a real decode worker process.

A prompt of 1,024 tokens through the default model, one worker of each pool on cores of their own, no router between.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from statistics import median

from benchmarks.live_pair import live_pair, pair_config
from router.dispatcher import WorkerDispatcher
from tandem.config import TransportName
from tandem.types import Request, RequestId, SamplingParams

NUM_TOKENS = 1024


async def _one(dispatcher: WorkerDispatcher, number: int) -> tuple[float, float]:
    """(exposed seconds, prefill seconds) of one prompt."""
    drawn = random.Random(number)
    now = time.monotonic()
    request = Request(
        request_id=RequestId(uuid.uuid4().hex),
        prompt_token_ids=tuple(drawn.randrange(1000, 40_000) for _ in range(NUM_TOKENS)),
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
        arrival_s=now,
        deadline_s=now + 300.0,
    )
    dispatch = dispatcher.dispatch(request)
    async for _ in dispatch:
        pass
    result = await dispatch.finish()
    assert result.prefill is not None
    return result.prefill.transfer.exposed_s, result.prefill.prefill_s


def run(*, transport: TransportName, num_rounds: int) -> dict[str, float]:
    """Medians over the rounds: `exposed_s`, `prefill_s`, and `ratio`, the median of each round's own."""
    return asyncio.run(_run(transport, num_rounds))


async def _run(transport: TransportName, num_rounds: int) -> dict[str, float]:
    config = pair_config(
        transfer={"transport": transport},
        model={"max_context_tokens": 2048},
        prefill={"num_blocks": 256},
        decode={"num_blocks": 256},
    )
    async with live_pair(config) as dispatcher:
        await _one(dispatcher, 0)  # opens the link
        rounds = [await _one(dispatcher, number) for number in range(1, num_rounds + 1)]
    return {
        "exposed_s": median(exposed for exposed, _ in rounds),
        "prefill_s": median(prefill for _, prefill in rounds),
        "ratio": median(exposed / prefill for exposed, prefill in rounds),
    }
