"""How well the simulator foretells: the same requests through a real pair of workers and through a simulated one.

The device is described by three measurements of the real workers, taken before (a prompt alone gives its FLOP/s, an
output alone its bytes/s, several outputs how much of both it does side by side), the link by its own probe. Then
requests arrive at random, and what they met is compared with what was foretold; a ratio is foretold over met.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.live_pair import live_pair, pair_config
from benchmarks.report import finish
from cluster.simulator.cost_model import DeviceSpec, ModelCost, Work, iteration_cost
from cluster.simulator.plant import Plant
from cluster.simulator.sources import describe_model
from cluster.simulator.summary import figures_of, percentile
from cluster.simulator.workload import Arrival, Lengths, poisson
from cluster.simulator.world import World
from kv_transfer.sizing import LinkSpeed
from router.dispatcher import WorkerDispatcher
from tandem.kv.layout import DTYPE_BYTES
from tandem.model.sources import DEFAULT_MODEL
from tandem.types import Request, RequestId, SamplingParams

NUM_CALIBRATION_TOKENS = 512
BATCH = 8
LOAD = 0.6
"""Of the prefill worker's time."""


@dataclass(kw_only=True, slots=True)
class Met:
    """What one real request met, in seconds."""

    ttft_s: float = 0.0
    whole_s: float = 0.0
    prefill_s: float = 0.0
    exposed_s: float = 0.0
    num_messages: int = 0
    gaps_s: list[float] = field(default_factory=list)


async def send(dispatcher: WorkerDispatcher, *, prompt: int, output: int) -> Met:
    """One request of tokens that nobody has sent before."""
    met, now = Met(), time.monotonic()
    request = Request(
        request_id=RequestId(uuid.uuid4().hex),
        prompt_token_ids=tuple(random.Random(uuid.uuid4().int).choices(range(1000, 40_000), k=prompt)),
        sampling=SamplingParams(max_tokens=output, temperature=0.0),
        arrival_s=now,
        deadline_s=now + 600.0,
    )
    dispatch = dispatcher.dispatch(request)
    newest_s = 0.0
    async for _ in dispatch:
        came_s = time.monotonic()
        if newest_s:
            met.gaps_s.append(came_s - newest_s)
        else:
            met.ttft_s = came_s - now
        newest_s = came_s
    met.whole_s = newest_s - now
    timings = (await dispatch.finish()).prefill
    assert timings is not None
    met.prefill_s, met.exposed_s = timings.prefill_s, timings.transfer.exposed_s
    met.num_messages = timings.transfer.num_messages
    return met


async def calibrate(dispatcher: WorkerDispatcher, model: ModelCost) -> tuple[DeviceSpec, float]:
    """The device as these workers are, and the seconds of a token of prefill."""
    await send(dispatcher, prompt=NUM_CALIBRATION_TOKENS, output=2)  # opens the link, warms up
    alone = [await send(dispatcher, prompt=NUM_CALIBRATION_TOKENS, output=24) for _ in range(3)]
    prefill_s = median(met.prefill_s for met in alone)
    single_s = median(gap for met in alone for gap in met.gaps_s)
    many = await asyncio.gather(*(send(dispatcher, prompt=64, output=48) for _ in range(BATCH)))
    batch_s = median(gap for met in many for gap in met.gaps_s[20:])
    print(f"prefill {prefill_s * 1e3:.0f} ms, a token {single_s * 1e3:.1f} ms, {BATCH} tokens {batch_s * 1e3:.1f} ms")
    return device_of(model, prefill_s=prefill_s, single_s=single_s, batch_s=batch_s), prefill_s / NUM_CALIBRATION_TOKENS


def device_of(model: ModelCost, *, prefill_s: float, single_s: float, batch_s: float) -> DeviceSpec:
    """A device on which these take so long; a single token is taken to be bound by memory alone."""
    whole = iteration_cost(model, [Work(num_before=0, num_tokens=NUM_CALIBRATION_TOKENS)])
    one = iteration_cost(model, [Work(num_before=NUM_CALIBRATION_TOKENS)])
    many = iteration_cost(model, [Work(num_before=64 + 34)] * BATCH)
    flops_per_s, bytes_per_s = whole.flops / prefill_s, one.num_bytes / single_s
    parts = many.flops / flops_per_s, many.num_bytes / bytes_per_s
    return DeviceSpec(
        name="one core",
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        memory_bytes=8e9,
        host_bytes_per_s=3e9,
        peer_bytes_per_s=1e9,
        overlap=min(1.0, max(0.0, (sum(parts) - batch_s) / min(parts))),
    )


async def link_of(dispatcher: WorkerDispatcher) -> LinkSpeed:
    """As the prefill worker has probed it."""
    [link] = [link for status in await dispatcher.tracker.statuses() for link in status.links]
    return LinkSpeed(bytes_per_s=link.probed_bytes_per_s, latency_s=link.latency_s)


async def replay(dispatcher: WorkerDispatcher, arrivals: Sequence[Arrival]) -> list[Met]:
    """At their times."""
    start_s = time.monotonic()

    async def one(arrival: Arrival) -> Met:
        await asyncio.sleep(start_s + arrival.at_s - time.monotonic())
        return await send(dispatcher, prompt=arrival.num_prompt_tokens, output=arrival.num_output_tokens)

    return list(await asyncio.gather(*map(one, arrivals)))


def of_met(mets: Sequence[Met]) -> dict[str, float]:
    """The same figures as a simulation's."""
    ttft, whole = sorted(met.ttft_s for met in mets), sorted(met.whole_s for met in mets)
    gaps = sorted(gap for met in mets for gap in met.gaps_s)
    return {
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p90_s": percentile(ttft, 0.9),
        "tbt_p50_s": percentile(gaps, 0.5),
        "prefill_p50_s": percentile(sorted(met.prefill_s for met in mets), 0.5),
        "whole_p50_s": percentile(whole, 0.5),
        "messages_per_handoff": sum(met.num_messages for met in mets) / len(mets),
        "exposed_p90_s": percentile(sorted(met.exposed_s for met in mets), 0.9),
    }


async def compare(num_requests: int) -> tuple[dict[str, float], dict[str, float]]:
    """Figures of both, and foretold over met."""
    config = pair_config(
        transfer={"transport": "shm"},
        model={"max_context_tokens": 2048},
        prefill={"num_blocks": 512},
        decode={"num_blocks": 512},
        prefix_store={"enabled": False},
    )
    model = describe_model(DEFAULT_MODEL, value_bytes=DTYPE_BYTES["float32"])
    async with live_pair(config) as dispatcher:
        device, token_s = await calibrate(dispatcher, model)
        prompt = Lengths(mean=300, spread=0.6)
        arrivals = poisson(
            random.Random(4),
            rate_per_s=LOAD / (prompt.mean * token_s),
            num_requests=num_requests,
            prompt=prompt,
            output=Lengths(mean=24, spread=0.5),
        )
        plant = Plant(model=model, device=device, link=await link_of(dispatcher), config=config)
        mets = await replay(dispatcher, arrivals)
    outcome = World(plant).run(arrivals)
    foretold = figures_of(outcome)
    foretold["whole_p50_s"] = percentile(sorted(life.ended_s - life.request.arrival_s for life in outcome.lives), 0.5)
    met = of_met(mets)
    figures = {f"met_{name}": value for name, value in met.items()}
    figures |= {f"foretold_{name}": foretold[name] for name in met}
    figures |= {"device_gflops": device.flops_per_s / 1e9, "device_gbps": device.bytes_per_s / 1e9}
    figures["device_overlap"] = device.overlap
    ratios = {f"{name.removesuffix('_s')}_foretold": foretold[name] / met[name] for name in met if met[name]}
    return figures, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 requests instead of 60")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write figures and ratios there")
    arguments = parser.parse_args()
    figures, ratios = asyncio.run(compare(20 if arguments.quick else 60))
    finish(figures, ratios, arguments.json, "A real pair of workers and a simulated one")


if __name__ == "__main__":
    main()
