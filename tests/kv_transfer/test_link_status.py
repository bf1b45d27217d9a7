"""Links of several ranks to one worker are one link to whoever looks."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.link_status import by_peer
from tandem.rpc.tandem.v1 import inference_pb2


def make_link(peer: str = "decode-0", **changes: Any) -> inference_pb2.LinkStatus:
    values: dict[str, Any] = {
        "transport": "shm",
        "detail": "memfd",
        "num_bytes": 100,
        "num_messages": 2,
        "bytes_per_s": 50.0,
        "probed_bytes_per_s": 10.0,
        "latency_s": 1e-4,
    }
    return inference_pb2.LinkStatus(peer_worker_id=peer, **{**values, **changes})


def test_one_link_is_shown_as_it_is() -> None:
    assert by_peer([make_link()]) == [make_link()]


def test_bytes_and_time_add_up_and_the_slowest_link_gives_the_rest() -> None:
    slow = make_link(transport="ucx", detail="tcp", num_bytes=50, bytes_per_s=10.0, probed_bytes_per_s=3.0, slow=True)
    unused = make_link(num_bytes=0, num_messages=0, bytes_per_s=0.0, probed_bytes_per_s=5.0)
    [link] = by_peer([make_link(), slow, unused])
    assert (link.transport, link.detail, link.slow, link.probed_bytes_per_s) == ("ucx", "tcp", True, 3.0)
    assert (link.num_bytes, link.num_messages) == (150, 4)
    assert link.bytes_per_s == pytest.approx(150 / (100 / 50.0 + 50 / 10.0))


def test_peers_are_kept_apart_in_their_order() -> None:
    links = by_peer([make_link("decode-1"), make_link("decode-0"), make_link("decode-1")])
    assert [(link.peer_worker_id, link.num_bytes) for link in links] == [("decode-1", 200), ("decode-0", 100)]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_nothing_that_was_measured_of_a_workers_earlier_life_is_shown_as_its_successors(order: tuple[int, int]) -> None:
    lives = {1: make_link(peer_epoch=1, slow=True), 2: make_link(peer_epoch=2, num_bytes=7)}
    assert by_peer([lives[epoch] for epoch in order]) == [lives[2]]
