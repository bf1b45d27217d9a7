"""Metrics of real workers, scraped over HTTP before and after requests: all that is documented, parsed, and growing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tandem.errors import TandemError
from tandem.observability.document import SETS
from tandem.observability.server import serve_metrics
from tests.fakes import Fault
from tests.legs import Legs
from tests.pair import Pair, PairOptions, make_prompt, running_pair, until

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(registry: CollectorRegistry) -> tuple[dict[str, str], Samples]:
    """(type of each family, samples by name and labels) as a Prometheus server sees them."""
    server = await serve_metrics(registry, "127.0.0.1")
    try:
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            response = await http.get(server.url)
    finally:
        await server.stop()
    assert response.status_code == 200
    families = list(text_string_to_metric_families(response.text))
    samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    return {family.name: family.type for family in families}, samples


async def scrape_both(pair: Pair) -> dict[str, Samples]:
    """Of each worker, after a look at whether everything documented is there."""
    found = {}
    for process, worker in (("prefill worker", pair.prefill), ("decode worker", pair.decode)):
        types, samples = await scrape(worker.metrics.registry)
        for spec in SETS[process][0]().specs:
            family = spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name
            assert types.get(family) == spec.kind, spec.name
        found[process] = samples
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def with_pair(model: Path, options: PairOptions, body: Callable[[Pair], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        async with running_pair(model, options) as pair:
            await body(pair)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("transport", ["shm", "ucx"])
def test_a_request_shows_in_every_count_of_both_workers(gqa: Path, transport: str) -> None:
    async def body(pair: Pair) -> None:
        before = await scrape_both(pair)
        await pair.run(make_prompt(70), max_tokens=5)
        await pair.settled()
        after = await scrape_both(pair)
        prefill, decode = after["prefill worker"], after["decode worker"]
        assert value(prefill, "tandem_prefill_prompt_tokens_total") == 70
        assert value(prefill, "tandem_prefill_batch_tokens_sum") == 70
        assert value(prefill, "tandem_prefill_iteration_seconds_count") == 3
        assert value(prefill, "tandem_prefill_handoffs_total", outcome="delivered") == 1
        assert value(prefill, "tandem_prefill_requests_total", code="ok") == 1
        assert value(prefill, "tandem_prefill_ticket_wait_seconds_count") == 1
        assert value(decode, "tandem_decode_output_tokens_total") == 4
        assert value(decode, "tandem_decode_iteration_seconds_count") == 4
        assert value(decode, "tandem_decode_handoffs_total", outcome="delivered") == 1
        assert value(decode, "tandem_decode_requests_total", code="ok") == 1
        sent = value(prefill, "tandem_prefill_transfer_bytes_total")
        assert sent == value(decode, "tandem_decode_received_bytes_total") > 0
        assert sent == value(prefill, "tandem_kv_link_bytes_total", peer="decode-0")
        assert value(prefill, "tandem_kv_link_busy_seconds_total", peer="decode-0") > 0
        assert value(prefill, "tandem_prefill_blocks", state="free") == 64
        assert_only_growing(before, after)

    with_pair(gqa, PairOptions(transport=transport), body)


def assert_only_growing(before: dict[str, Samples], after: dict[str, Samples]) -> None:
    """Counters and the parts of histograms."""
    for process, samples in before.items():
        for key, old in samples.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert after[process][key] >= old, key


def test_the_link_says_which_transport_it_uses_and_what_was_negotiated(gqa: Path) -> None:
    async def body(pair: Pair) -> None:
        await pair.run(make_prompt(20))
        samples = (await scrape_both(pair))["prefill worker"]
        (labels,) = [dict(labels) for name, labels in samples if name == "tandem_kv_link_info"]
        assert labels == {"peer": "decode-0", "transport": "shm", "detail": "memfd"}

    with_pair(gqa, PairOptions(), body)


@pytest.mark.parametrize(("min_gbps", "is_slow"), [(0.0, 0), (1e6, 1)])
def test_what_was_measured_of_a_link_shows_and_whether_it_is_below_the_floor(
    gqa: Path, min_gbps: float, is_slow: int
) -> None:
    async def body(pair: Pair) -> None:
        await pair.run(make_prompt(20))
        prefill = (await scrape_both(pair))["prefill worker"]
        assert value(prefill, "tandem_kv_link_slow", peer="decode-0") == is_slow
        [link] = pair.prefill.links.links()
        assert value(prefill, "tandem_kv_link_probed_bytes_per_second", peer="decode-0") == link.speed.bytes_per_s
        assert value(prefill, "tandem_kv_link_latency_seconds", peer="decode-0") == link.speed.latency_s

    with_pair(gqa, PairOptions(min_gbps=min_gbps), body)


def test_a_strict_floor_fails_the_request_and_moves_nothing(gqa: Path) -> None:
    async def body(pair: Pair) -> None:
        with pytest.raises(TandemError, match=r"transfer\.strict"):
            await pair.run(make_prompt(20))
        await pair.settled()
        assert pair.decode.receiver.arrived.num_messages == 0

    with_pair(gqa, PairOptions(min_gbps=1e6, strict=True), body)


def test_a_corrupted_message_is_counted_as_asked_for_again(gqa: Path) -> None:
    async def body(pair: Pair) -> None:
        await pair.run(make_prompt(20))
        await pair.settled()
        decode = (await scrape_both(pair))["decode worker"]
        assert value(decode, "tandem_decode_nacked_messages_total") == 1
        assert value(decode, "tandem_decode_handoffs_total", outcome="delivered") == 1

    with_pair(gqa, PairOptions(faults=lambda _, index: Fault.NONE if index else Fault.CORRUPT), body)


def test_an_offer_that_waits_for_blocks_is_a_waiting_reservation(gqa: Path) -> None:
    async def body(pair: Pair) -> None:
        pair.decode_executor.stop()
        first = await Legs(pair, make_prompt(40), max_tokens=20).open()
        await until(lambda: pair.decode.scheduler.num_running == 1)
        second = await Legs(pair, make_prompt(40, 1), max_tokens=20).open()
        await until(lambda: pair.decode.scheduler.num_unreserved == 1)
        decode = (await scrape_both(pair))["decode worker"]
        assert value(decode, "tandem_decode_waiting_reservations") == 1
        assert value(decode, "tandem_decode_running_sequences") == 1
        assert value(decode, "tandem_decode_blocks", state="used") == 8
        for legs in (first, second):
            legs.decode.close()
            legs.prefill.close()
        registry = pair.decode.metrics.registry
        await until(lambda: registry.get_sample_value("tandem_decode_requests_total", {"code": "cancelled"}) == 2)
        pair.decode_executor.go()
        await pair.settled()
        decode = (await scrape_both(pair))["decode worker"]
        assert value(decode, "tandem_decode_requests_total", code="cancelled") == 2
        assert value(decode, "tandem_decode_handoffs_total", outcome="aborted") == 1

    with_pair(gqa, PairOptions(decode_blocks=10), body)


def test_a_refused_request_is_counted_by_its_code(gqa: Path) -> None:
    async def body(pair: Pair) -> None:
        with pytest.raises(TandemError):
            await pair.run(make_prompt(20))
        decode = (await scrape_both(pair))["decode worker"]
        assert value(decode, "tandem_decode_requests_total", code="incompatible_peer") == 1

    with_pair(gqa, PairOptions(decode_fingerprint="another"), body)
