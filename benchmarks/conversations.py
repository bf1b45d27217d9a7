"""Conversations over two prefill and two decode workers: whether hits follow them, and whether no worker melts.

    python -m benchmarks.conversations [--quick] [--json FILE]

A whole cluster as `tandem up` starts it, real weights, a store on the node. Eight conversations of ten turns run at
once; each turn is all that was said before and some new tokens. The same conversations run again in a cluster that
keeps no prefixes, one after the other in one run. Answers must be the same ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.cluster_up import cluster_up
from benchmarks.report import finish
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import common_pb2, inference_pb2, inference_pb2_grpc

NUM_TURNS = 10
NUM_CONVERSATIONS = 8
FIRST_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 160, 48, 16
CONFIG = {
    "transfer": {"transport": "shm"},
    "model": {"max_context_tokens": 1024},
    "prefill": {"num_workers": 2, "num_blocks": 256},
    "decode": {"num_workers": 2, "num_blocks": 512},
}
STORE = {"host_bytes": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request and its answer."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    prefill_worker: str
    decode_worker: str
    answer: tuple[int, ...]


async def say(stub: inference_pb2_grpc.InferenceAsyncStub, text: Sequence[int]) -> Turn:
    """One turn."""
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=text), sampling=sampling)
    started_s = time.perf_counter()
    answer: list[int] = []
    ttft_s, step = 0.0, inference_pb2.GenerateResponse()
    async for step in stub.Generate(request):
        if step.token_ids and not answer:
            ttft_s = time.perf_counter() - started_s
        answer += step.token_ids
    return Turn(
        prompt_tokens=len(text),
        cached_tokens=step.usage.cached_tokens,
        ttft_s=ttft_s,
        prefill_worker=step.timings.prefill_worker,
        decode_worker=step.timings.decode_worker,
        answer=tuple(answer),
    )


async def converse(stub: inference_pb2_grpc.InferenceAsyncStub, seed: int, num_turns: int) -> list[Turn]:
    """A conversation, turn after turn."""
    drawn = random.Random(seed)
    text = [drawn.randrange(1000, 40_000) for _ in range(FIRST_TOKENS)]
    turns = []
    for _ in range(num_turns):
        turns.append(await say(stub, text))
        text += [*turns[-1].answer, *(drawn.randrange(1000, 40_000) for _ in range(TURN_TOKENS))]
    return turns


async def all_at_once(endpoint: str, *, num_conversations: int, num_turns: int) -> list[list[Turn]]:
    """All conversations."""
    async with open_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return list(await asyncio.gather(*(converse(stub, seed, num_turns) for seed in range(num_conversations))))


def run(*, enabled: bool, num_conversations: int, num_turns: int) -> list[list[Turn]]:
    """In a cluster of its own."""
    store = STORE if enabled else {"enabled": False}
    config = {**CONFIG, "prefix_store": store}
    with tempfile.TemporaryDirectory() as directory, cluster_up(Path(directory), config) as up:
        return asyncio.run(all_at_once(up["grpc"], num_conversations=num_conversations, num_turns=num_turns))


def largest_share(workers: Sequence[str]) -> float:
    """Of requests, at the worker that had most."""
    return max(Counter(workers).values()) / len(workers)


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversations", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four conversations of five turns")
    parser.add_argument("--json", type=Path, default=None, help="where to write figures and ratios")
    options = parser.parse_args(arguments)
    size = {
        "num_conversations": 4 if options.quick else NUM_CONVERSATIONS,
        "num_turns": 5 if options.quick else NUM_TURNS,
    }
    without, with_store = (run(enabled=enabled, **size) for enabled in (False, True))
    kept, lost = [turn for one in with_store for turn in one], [turn for one in without for turn in one]
    follow_ups = [turn for one in with_store for turn in one[1:]]
    num_changed = sum(a.answer != b.answer for a, b in zip(kept, lost, strict=True))
    figures = {
        "requests": float(len(kept)),
        "answers that changed": float(num_changed),
        "prompt tokens not computed (%)": 100 * sum(t.cached_tokens for t in kept) / sum(t.prompt_tokens for t in kept),
        "turns after the first with a hit (%)": 100 * sum(t.cached_tokens > 0 for t in follow_ups) / len(follow_ups),
        "largest share of a prefill worker (%)": 100 * largest_share([t.prefill_worker for t in kept]),
        "largest share of a decode worker (%)": 100 * largest_share([t.decode_worker for t in kept]),
        "ttft with prefixes (ms)": 1000 * median(t.ttft_s for t in follow_ups),
        "ttft without (ms)": 1000 * median(turn.ttft_s for one in without for turn in one[1:]),
    }
    ratios = {
        "conversation_ttft_over_no_prefixes": figures["ttft with prefixes (ms)"] / figures["ttft without (ms)"]
    }
    finish(figures, ratios, options.json, "Conversations over two and two workers")
    return 1 if num_changed else 0


if __name__ == "__main__":
    sys.exit(main())
