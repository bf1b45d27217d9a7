"""What people see of `tandem cache`: tables that fit, and names that can be read."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from cluster.cache_view import print_prefixes, print_stats
from cluster.short_ids import short_ids
from tandem.rpc.tandem.v1 import inference_pb2


def test_nodes_are_named_by_as_many_digits_as_tell_them_apart() -> None:
    one, other = "0123456789" + 46 * "a", "0123456789" + 46 * "b"
    assert short_ids([one, one]) == {one: "01234567"}
    assert short_ids([one, other]) == {one: "0123456789a", other: "0123456789b"}
    assert short_ids(["n1", "a.long.host.name.that.is.no.number.of.digits"]) == {
        each: each for each in ("n1", "a.long.host.name.that.is.no.number.of.digits")
    }


def test_tables_have_short_ids_of_nodes_and_say_what_a_disk_tiers_size_is() -> None:
    node = 28 * "5f"
    tiers = [inference_pb2.TierCache(tier=tier, num_blocks=1, capacity_blocks=4) for tier in ("host", "disk")]
    stats = inference_pb2.CacheStats(
        nodes=[inference_pb2.NodeCache(node=node, tiers=tiers)], is_enabled=True, has_stores=True
    )
    prefix = inference_pb2.CachedPrefix(block="00ff", num_tokens=32, num_uses=2, nodes=[node])
    console = Console(width=160, record=True, file=StringIO())
    print_stats(stats, console)
    print_prefixes(inference_pb2.CachedPrefixes(prefixes=[prefix]), console)
    text = console.export_text()
    assert node not in text
    assert text.count("5f5f5f5f") == 3
    assert "prefix_store.disk_bytes" in text
    assert "loads" in text


def busy_stats() -> inference_pb2.CacheStats:
    """Two nodes with counts of many digits, and three workers."""
    counts = {"num_pinned": 120, "num_hits": 123456, "num_misses": 23456, "num_evictions": 12345, "num_damaged": 7}
    sizes = {"num_blocks": 12034, "capacity_blocks": 40000, "num_bytes": 12 * 10**9, "capacity_bytes": 45 * 10**9}
    tiers = [inference_pb2.TierCache(tier=tier, **sizes, **counts) for tier in ("host", "disk", "remote")]
    nodes = [inference_pb2.NodeCache(node=28 * digits, tiers=tiers) for digits in ("5f", "3c")]
    device = inference_pb2.DeviceTier(num_named_blocks=23456, num_cached_blocks=12345, num_evictions=123456)
    workers = [
        inference_pb2.WorkerCache(worker_id=name, state="unreachable", num_blocks=40000, device=device)
        for name in ("prefill-0", "decode-0", "decode-1")
    ]
    return inference_pb2.CacheStats(nodes=nodes, workers=workers, is_enabled=True, has_stores=True)


def shown(width: int) -> list[str]:
    block = inference_pb2.CachedPrefix(
        block=16 * "0f", num_tokens=32000, num_uses=1234, tenant=8 * "2d", nodes=[28 * "5f", 28 * "3c"], is_pinned=True
    )
    console = Console(width=width, record=True, file=StringIO())
    print_stats(busy_stats(), console)
    print_prefixes(inference_pb2.CachedPrefixes(prefixes=[block]), console)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_has_every_heading_and_number_whole(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert set(" ".join(shown(160)).split()) <= set(words)
    assert not any("…" in word for word in words)


def test_each_part_of_a_table_that_was_cut_in_two_names_its_rows() -> None:
    rows = [line.split()[:2] for line in shown(80) if line.startswith(("5f5f", "3c3c"))]
    names = [[node, tier] for node in ("5f5f5f5f", "3c3c3c3c") for tier in ("host", "disk", "remote")]
    assert rows == names + names


def test_a_wide_terminal_has_one_table_of_each_kind() -> None:
    assert [line.split()[0] for line in shown(160) if line.startswith(("node ", "worker ", "block "))] == [
        "node",
        "worker",
        "block",
    ]
