"""A prefill worker's links as its status and metrics show them: one entry for each peer, whichever ranks they join.

A peer is an incarnation: once there is a link to a worker's successor, those to the earlier one are not shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from kv_transfer.links import OpenLink
from tandem.rpc.tandem.v1 import inference_pb2


def link_status(open_link: OpenLink) -> inference_pb2.LinkStatus:
    """One link of this rank."""
    stats = open_link.stats()
    return inference_pb2.LinkStatus(
        peer_worker_id=open_link.worker_id,
        peer_epoch=open_link.epoch,
        transport=open_link.link.transport,
        detail=open_link.link.detail,
        num_bytes=stats.num_bytes,
        num_messages=stats.num_messages,
        bytes_per_s=stats.num_bytes / stats.busy_s if stats.busy_s else 0.0,
        probed_bytes_per_s=open_link.speed.bytes_per_s,
        latency_s=open_link.speed.latency_s,
        slow=open_link.slow,
    )


def by_peer(links: Iterable[inference_pb2.LinkStatus]) -> list[inference_pb2.LinkStatus]:
    """Sums for each peer; speed, latency, transport and detail are those of its slowest link, which decides."""
    found: dict[str, inference_pb2.LinkStatus] = {}
    for link in links:
        known = found.get(link.peer_worker_id)
        if known is None or known.peer_epoch < link.peer_epoch:
            found[link.peer_worker_id] = link
        elif known.peer_epoch == link.peer_epoch:
            found[link.peer_worker_id] = _joined(known, link)
    return list(found.values())


def _joined(one: inference_pb2.LinkStatus, other: inference_pb2.LinkStatus) -> inference_pb2.LinkStatus:
    slower = inference_pb2.LinkStatus()
    slower.CopyFrom(min((one, other), key=lambda link: link.probed_bytes_per_s))
    busy_s = sum(link.num_bytes / link.bytes_per_s for link in (one, other) if link.bytes_per_s)
    slower.num_bytes = one.num_bytes + other.num_bytes
    slower.num_messages = one.num_messages + other.num_messages
    slower.bytes_per_s = slower.num_bytes / busy_s if busy_s else 0.0
    slower.slow = one.slow or other.slow
    return slower
