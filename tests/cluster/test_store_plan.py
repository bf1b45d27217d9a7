"""Which nodes have a prefix store, and of what size."""

from __future__ import annotations

import pytest

from cluster.store_plan import DISK_BYTES_LABEL, HOST_BYTES_LABEL, IDLE_S, StoreNode, StorePlan, config_of_node
from tandem.config import PrefixStoreConfig
from tandem.errors import ConfigError

WANTED = PrefixStoreConfig(host_bytes=100, disk_bytes=1000, disk_path="/disk", tenant_share=0.5)


def make_node(node_id: str = "a", *, has_workers: bool = True, **labels: str) -> StoreNode:
    names = {"host": HOST_BYTES_LABEL, "disk": DISK_BYTES_LABEL}
    return StoreNode(
        node_id=node_id, has_workers=has_workers, labels={names[key]: value for key, value in labels.items()}
    )


def test_a_node_without_labels_has_the_cluster_s_store() -> None:
    assert config_of_node(WANTED, {"zone": "a"}) == WANTED


def test_labels_say_what_a_node_has_instead() -> None:
    config = config_of_node(WANTED, make_node(host="50", disk="2000").labels)
    assert config == PrefixStoreConfig(host_bytes=50, disk_bytes=2000, disk_path="/disk", tenant_share=0.5)


def test_a_node_may_go_without_a_disk_or_without_a_store() -> None:
    config = config_of_node(WANTED, make_node(disk="0").labels)
    assert config is not None
    assert (config.disk_bytes, config.disk_path) == (0, "")
    assert config_of_node(WANTED, make_node(host="0").labels) is None
    assert config_of_node(WANTED, make_node(host="0", disk="0").labels) is None


@pytest.mark.parametrize("text", ["1Gi", "-1", "1.5", "\u0661"])
def test_a_label_that_is_no_number_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ConfigError, match=HOST_BYTES_LABEL):
        config_of_node(WANTED, make_node(host=text).labels)


def test_a_store_is_started_where_there_is_none_and_forgotten_where_there_is_no_node() -> None:
    plan = StorePlan(WANTED)
    nodes = [make_node("a"), make_node("b"), make_node("c", host="0")]
    changes = plan.changes(nodes, {"b", "gone"}, 0.0)
    plan.check_invariants()
    assert (dict(changes.starts), changes.ends, changes.lost) == ({"a": WANTED}, (), ("gone",))


def test_a_store_ends_when_its_node_has_been_without_workers_for_a_while() -> None:
    plan = StorePlan(WANTED)
    empty = [make_node(has_workers=False)]
    assert plan.changes(empty, (), 0.0).starts  # a new node: its workers are on their way
    assert plan.changes(empty, {"a"}, IDLE_S - 1).ends == ()
    assert plan.changes(empty, {"a"}, IDLE_S).ends == ("a",)
    changes = plan.changes(empty, (), IDLE_S + 1)
    plan.check_invariants()
    assert (dict(changes.starts), changes.ends) == ({}, ())
    assert plan.changes([make_node()], (), IDLE_S + 2).starts == {"a": WANTED}


def test_workers_that_come_in_time_keep_the_store() -> None:
    plan = StorePlan(WANTED)
    for now, has_workers in ((0.0, False), (IDLE_S - 1, True), (IDLE_S, False), (2 * IDLE_S - 1, False)):
        changes = plan.changes([make_node(has_workers=has_workers)], {"a"}, now)
        plan.check_invariants()
        assert changes.ends == ()


def test_what_is_wrong_with_a_node_s_labels_is_said_once_and_stops_no_other_node() -> None:
    plan = StorePlan(WANTED)
    nodes = [make_node("a", host="much"), make_node("b")]
    first, second = plan.changes(nodes, (), 0.0), plan.changes(nodes, {"b"}, 1.0)
    plan.check_invariants()
    assert len(first.refusals) == 1
    assert "'much'" in first.refusals[0]
    assert second.refusals == ()
    assert dict(first.starts) == {"b": WANTED}


def test_a_disk_label_where_the_cluster_has_no_directory_is_refused() -> None:
    plan = StorePlan(PrefixStoreConfig(host_bytes=100))
    (refusal,) = plan.changes([make_node(disk="5")], (), 0.0).refusals
    assert "prefix_store.disk_path" in refusal
