"""`tandem test-connection`: does a cluster serve, and does its KV take the way that it should?

Three steps, each a line: health, one generation, and what the KV transfer of that generation used. It is the canary
for a fabric that was asked for and fell back to a slower one in silence.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence

from cluster.access import Access
from cluster.client import Client
from cluster.fabric import Way, ways_of
from cluster.patience import patiently
from tandem.errors import ClusterError
from tandem.rpc.tandem.v1 import common_pb2
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus, GenerateResponse, LinkStatus

NUM_TOKENS = 8
MOST_PROMPT_CHARS = 2000
_TEXT = "Once upon a time a cluster had two pools, and what the one had computed moved to the other. "


async def check_cluster(
    access: Access, *, required: Way | None, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Raises TandemError at the first step that fails."""
    async with Client(access) as client:
        await patiently(lambda: _check_health(client), say, patience_s=timeout_s)
        say("health: requests are served")
        before = await client.status()
        last = await _generate(client, say)
        _check_transfer(last, before=before, after=await client.status(), required=required, say=say)



async def _check_health(client: Client) -> None:
    found = await client.health("tandem.v1.Inference")
    if found != "SERVING":
        raise ClusterError(f"requests are not served yet: health is {found}")


async def _generate(client: Client, say: Callable[[str], None]) -> GenerateResponse:
    """The last response. The prompt is new each time, so that no cache has it."""
    model = (await client.models())[0]
    size = min(MOST_PROMPT_CHARS, max(1, model.max_context_tokens // 2 - NUM_TOKENS))
    prompt = f"{uuid.uuid4().hex} {_TEXT * (size // len(_TEXT) + 1)}"[:size]
    sampling = common_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    began_s = time.monotonic()
    responses = [response async for response in client.generate(prompt, sampling)]
    last = responses[-1]
    if last.usage.completion_tokens != NUM_TOKENS:
        raise ClusterError(f"{NUM_TOKENS} tokens were asked for, {last.usage.completion_tokens} came")
    took_s = time.monotonic() - began_s
    say(f"generation: {NUM_TOKENS} tokens of {model.name} after {last.usage.prompt_tokens} in {took_s:.2f} s")
    return last


def _check_transfer(
    last: GenerateResponse,
    *,
    before: ClusterStatus,
    after: ClusterStatus,
    required: Way | None,
    say: Callable[[str], None],
) -> None:
    source, destination = last.timings.prefill_worker, last.timings.decode_worker
    moved = last.timings.prefill.transfer.num_bytes
    link = _link(after, source, destination)
    if link is None or not moved or _bytes(after, source, destination) <= _bytes(before, source, destination):
        raise ClusterError(f"no KV moved from {source or 'a prefill worker'} to {destination or 'a decode worker'}")
    found = f"{link.transport} ({link.detail})"
    if required is not None and required not in ways_of(link.detail):
        raise ClusterError(f"KV moves from {source} to {destination} over {found}: not over {required}, as it should")
    say(f"transfer: {moved} bytes of KV from {source} to {destination} over {found}")


def _links(status: ClusterStatus, source: str) -> Sequence[LinkStatus]:
    return [link for worker in status.workers if worker.worker_id == source for link in worker.links]


def _link(status: ClusterStatus, source: str, destination: str) -> LinkStatus | None:
    return next((link for link in _links(status, source) if link.peer_worker_id == destination), None)


def _bytes(status: ClusterStatus, source: str, destination: str) -> int:
    link = _link(status, source, destination)
    return 0 if link is None else link.num_bytes


async def check_http(url: str, access: Access, *, say: Callable[[str], None]) -> None:
    """The same request over HTTP. Raises ClusterError when it is not answered."""
    from cluster.http_check import complete

    text = await asyncio.to_thread(complete, url, access, max_tokens=NUM_TOKENS)
    say(f"HTTP: {len(text)} characters from {url}")
