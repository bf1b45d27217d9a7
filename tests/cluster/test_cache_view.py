"""What people see of `tandem cache`: tables that fit, and names that can be read."""

from __future__ import annotations

from io import StringIO

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
