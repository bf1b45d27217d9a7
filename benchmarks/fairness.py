"""What short prompts wait beside a long one: first come, first served, and shortest remaining first.

    python -m benchmarks.fairness [--quick] [--json FILE]

A prefill worker with real weights in this process, one thread. Every round asks it for short prompts alone, for a long
one alone, and for short ones that come while a long one is computed, under each order in turn. First come, first
served is the same scheduler with another order in it. A ratio of 1 is a short prompt that waited for
one iteration of the long one; the long prompt's own ratio is what it pays for those that overtake it. What is promised
is said in tokens, which no load of the machine can change: those of others that are computed from a short prompt's
arrival to its first token, the whole iteration that runs when it comes among them, over one iteration's budget.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NoReturn

import torch

from benchmarks.report import finish
from kv_transfer.loopback import ShmTransport
from prefill_pool.job import PrefillLimits
from prefill_pool.order import PrefillOrder
from prefill_pool.sequence import PrefillSequence
from prefill_pool.worker import PrefillWorker
from tandem.config import PrefillConfig
from tandem.errors import TandemError
from tandem.kv.cache import KvCache
from tandem.model.executor import LayerHook, SequenceSlice, SliceOutput
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.torch_executor import TorchExecutor
from tandem.secret import ClusterKey
from tandem.types import Epoch, Request, RequestId, SamplingParams, WorkerId

BLOCK_SIZE = 16
NUM_BLOCKS = 320
LONG_TOKENS, SHORT_TOKENS = 4000, 64
ORDERS = ("first come", "shortest first")


class FirstCome(PrefillOrder):
    """What a scheduler would do that looks at nothing but arrival."""

    def standing(self, sequence: PrefillSequence) -> float:
        return sequence.request.order_s


class TimedExecutor(TorchExecutor):
    """Keeps how long each iteration took, in seconds."""

    seconds: list[float]
    batches: list[list[int]]
    """Tokens of each prompt in each iteration that has begun."""
    is_running: bool

    def execute(
        self,
        batch: Sequence[SequenceSlice],
        on_layer: LayerHook | None = None,
        before_layer: LayerHook | None = None,
    ) -> list[SliceOutput]:
        """As it is, with a clock."""
        self.is_running = True
        self.batches.append([len(piece.token_ids) for piece in batch])
        started_s = time.perf_counter()
        outputs = super().execute(batch, on_layer, before_layer)
        self.seconds.append(time.perf_counter() - started_s)
        self.is_running = False
        return outputs

    def others_since(self, first: int) -> int:
        """Tokens of others in iterations from `first` to the one that computed the next short prompt."""
        num_tokens = 0
        for batch in self.batches[first:]:
            num_tokens += sum(batch)
            if SHORT_TOKENS in batch:
                return num_tokens - SHORT_TOKENS
        raise AssertionError("no short prompt was computed")


def make_executor(slab: torch.Tensor) -> TimedExecutor:
    """The default model in fp32 over `slab`."""
    files = resolve_model(DEFAULT_MODEL)
    spec = load_spec(files)
    cache = KvCache(spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32"), NUM_BLOCKS, slab)
    executor = TimedExecutor(
        spec, load_weights(files, spec, "float32"), cache, tokenizer_file=files.tokenizer_dir / "tokenizer.json"
    )
    executor.seconds, executor.batches, executor.is_running = [], [], False
    return executor


def crashed(error: BaseException) -> NoReturn:
    """The engine cannot go on."""
    raise SystemExit(f"the engine failed: {error!r}")


@dataclass(kw_only=True, slots=True)
class Asker:
    """Asks one worker for first tokens."""

    worker: PrefillWorker
    drawn: random.Random

    async def ttft_s(self, num_tokens: int, timeout_s: float = 600.0) -> float:
        """Seconds from the call to the first token of a prompt that was never seen before."""
        started_s = time.monotonic()
        request = Request(
            request_id=RequestId(uuid.uuid4().hex),
            prompt_token_ids=tuple(self.drawn.randrange(1000, 40_000) for _ in range(num_tokens)),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            arrival_s=started_s,
            deadline_s=started_s + timeout_s,
        )
        job = self.worker.submit(request, None)
        first_s = 0.0
        while True:
            event = await job.events.get()
            if isinstance(event, TandemError):
                raise event
            if event.WhichOneof("event") == "first_token":
                first_s = time.monotonic() - started_s
            elif event.WhichOneof("event") == "done":
                return first_s


def make_worker(executor: TimedExecutor, transport: ShmTransport, order: str) -> PrefillWorker:
    """With the configuration's defaults, but for the order."""
    defaults = PrefillConfig()
    limits = PrefillLimits(
        max_batch_tokens=defaults.max_batch_tokens,
        max_batch_sequences=defaults.max_batch_sequences,
        ticket_lookahead_tokens=defaults.ticket_lookahead_tokens,
        ageing_tokens_per_s=defaults.ageing_tokens_per_s,
        lease_s=10.0,
        max_resends=1,
    )
    worker = PrefillWorker(
        executor,
        worker_id=WorkerId("prefill-0"),
        epoch=Epoch(1),
        fingerprint="benchmark",
        key=ClusterKey(bytes(32)),
        transport=transport,
        limits=limits,
        on_crash=crashed,
    )
    if order == "first come":
        worker.scheduler.order = FirstCome(ageing_tokens_per_s=defaults.ageing_tokens_per_s)
    return worker


@dataclass(kw_only=True, slots=True)
class Round:
    """Seconds under one order."""

    alone_s: float
    long_alone_s: float
    iteration_s: float
    """The longest of the long prompt's when it is alone."""
    beside_s: list[float] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    """Tokens of the long prompt that each short one waited for."""
    long_beside_s: list[float] = field(default_factory=list)

    @property
    def over_bound(self) -> list[float]:
        """Each short prompt's TTFT over what it takes alone plus one iteration."""
        return [ttft_s / (self.alone_s + self.iteration_s) for ttft_s in self.beside_s]


async def one_round(executor: TimedExecutor, order: str, *, seed: int, num_shorts: int) -> Round:
    """Short alone, long alone, then both: a short prompt each time that the one before has its answer.

    As many long ones as it takes for `num_shorts`.
    """
    layout = executor.cache.layout
    transport = ShmTransport(worker_id=WorkerId("prefill-0"))
    worker = make_worker(executor, transport, order)
    asker = Asker(worker=worker, drawn=random.Random(seed))
    assert layout.num_blocks_for(LONG_TOKENS) < NUM_BLOCKS
    try:
        await asker.ttft_s(SHORT_TOKENS)
        alone = [await asker.ttft_s(SHORT_TOKENS) for _ in range(3)]
        executor.seconds.clear()
        long_alone_s = await asker.ttft_s(LONG_TOKENS)
        times = Round(alone_s=median(alone), long_alone_s=long_alone_s, iteration_s=max(executor.seconds))
        while len(times.beside_s) < num_shorts:
            await both(asker, times)
    finally:
        await worker.close()
    return times


async def both(asker: Asker, times: Round) -> None:
    """A long prompt, and short ones one after another until it has its first token."""
    executor = asker.worker.executor
    assert isinstance(executor, TimedExecutor)
    long = asyncio.create_task(asker.ttft_s(LONG_TOKENS))
    while not long.done():
        await asyncio.sleep(asker.drawn.uniform(0.2, 1.0) * times.iteration_s)
        if not long.done():
            first = len(executor.batches) - executor.is_running
            times.beside_s.append(await asker.ttft_s(SHORT_TOKENS))
            times.others.append(executor.others_since(first))
    times.long_beside_s.append(await long)


def figures_of(name: str, rounds: list[Round]) -> tuple[dict[str, float], dict[str, float]]:
    """Figures and ratios of one order; a ratio is over all short prompts of all rounds."""
    over = [ratio for times in rounds for ratio in times.over_bound]
    tail = name.replace(" ", "_")
    figures = {
        f"short ttft alone, {name} (ms)": 1000 * median(t.alone_s for t in rounds),
        f"short ttft beside long, {name} (ms)": 1000 * median(s for t in rounds for s in t.beside_s),
        f"iteration, {name} (ms)": 1000 * median(t.iteration_s for t in rounds),
        f"long ttft alone, {name} (ms)": 1000 * median(t.long_alone_s for t in rounds),
        f"short prompts, {name}": float(len(over)),
        f"computed, {name} (tokens/s)": median(LONG_TOKENS / t.long_alone_s for t in rounds),
    }
    ratios = {
        f"short_ttft_beside_long_over_alone_plus_iteration_{tail}": median(over),
        f"worst_{tail}": max(over),
        f"worst_tokens_over_budget_{tail}": max(n for t in rounds for n in t.others) / PrefillConfig().max_batch_tokens,
        f"long_ttft_beside_short_over_alone_{tail}": median(
            beside_s / t.long_alone_s for t in rounds for beside_s in t.long_beside_s
        ),
    }
    return figures, ratios


def measure(num_rounds: int, num_shorts: int) -> tuple[dict[str, float], dict[str, float]]:
    """Both orders in turn, round by round."""
    torch.set_num_threads(1)
    spec = load_spec(resolve_model(DEFAULT_MODEL))
    slab = torch.zeros(spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32").slab_bytes(NUM_BLOCKS), dtype=torch.uint8)
    executor = make_executor(slab)
    rounds: dict[str, list[Round]] = {name: [] for name in ORDERS}
    for seed in range(num_rounds):
        for name in ORDERS:
            enough = 1 if name == "first come" else num_shorts
            rounds[name].append(asyncio.run(one_round(executor, name, seed=seed, num_shorts=enough)))
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name, times in rounds.items():
        more_figures, more_ratios = figures_of(name, times)
        figures |= more_figures
        ratios |= more_ratios
    return figures, ratios


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, default=None, help="where to write figures and ratios")
    options = parser.parse_args(arguments)
    figures, ratios = measure(*((1, 12) if options.quick else (3, 20)))
    finish(figures, ratios, options.json, "Short prompts beside a long one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
