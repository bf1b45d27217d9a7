"""What is read off a worker's own counts at each scrape: queues, blocks, links, what arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.observability.metric_set import Reading, Values, plain, reading
from tandem.rpc.tandem.v1.inference_pb2 import LinkStatus, WorkerStatus


def _blocks(status: WorkerStatus) -> Values:
    free = status.num_free_blocks
    return [(("free",), free), (("used",), status.num_blocks - free)]


def _device(part: str) -> list[Reading[WorkerStatus]]:
    """What is cached in a worker's own blocks, and what it has copied to its node's store."""
    return [
        reading(
            (
                f"tandem_{part}_named_blocks",
                "gauge",
                "blocks",
                "KV blocks that can be found by their prefix: used by some request, or only cached.",
            ),
            lambda status: [
                (("used",), status.device_tier.num_named_blocks - status.device_tier.num_cached_blocks),
                (("cached",), status.device_tier.num_cached_blocks),
            ],
            labels=("state",),
        ),
        reading(
            (f"tandem_{part}_evicted_blocks_total", "counter", "blocks", "Cached KV blocks that made room for others."),
            lambda status: plain(status.device_tier.num_evictions),
        ),
        reading(
            (
                f"tandem_{part}_write_back_blocks_total",
                "counter",
                "blocks",
                "KV blocks that the node's store lacked: written there, dropped (too many waited) or refused (no room, "
                "or the store was away).",
            ),
            lambda status: [
                (("written",), status.device_tier.num_written_blocks),
                (("dropped",), status.device_tier.num_dropped_blocks),
                (("refused",), status.device_tier.num_refused_blocks),
            ],
            labels=("outcome",),
        ),
        reading(
            (f"tandem_{part}_write_back_bytes_total", "counter", "bytes", "KV bytes copied to the node's store."),
            lambda status: plain(status.device_tier.num_written_bytes),
        ),
        reading(
            (
                f"tandem_{part}_write_back_seconds_total",
                "counter",
                "seconds",
                "Time of those copies, on a thread of their own; bytes over these are their speed.",
            ),
            lambda status: plain(status.device_tier.write_s),
        ),
    ]


def _common(part: str, what: str) -> list[Reading[WorkerStatus]]:
    """What both pools' workers say in their status; `what` is their word for what they run."""
    return [
        reading(
            (f"tandem_{part}_running_{what}", "gauge", what, f"{what.capitalize()} in computation."),
            lambda status: plain(status.num_running),
        ),
        reading(
            (f"tandem_{part}_waiting_{what}", "gauge", what, f"{what.capitalize()} that have not started."),
            lambda status: plain(status.num_waiting),
        ),
        reading(
            (f"tandem_{part}_blocks", "gauge", "blocks", "KV blocks, by state: free or used."),
            _blocks,
            labels=("state",),
        ),
        reading(
            (f"tandem_{part}_open_handoffs", "gauge", "handoffs", "Handoffs that have not ended."),
            lambda status: plain(status.num_handoffs),
        ),
        reading(
            (f"tandem_{part}_draining", "gauge", "", "1 while the worker refuses new requests, else 0."),
            lambda status: plain(status.state == "draining"),
        ),
        *_device(part),
    ]


def _links(count: Callable[[LinkStatus], float]) -> Callable[[WorkerStatus], Values]:
    return lambda status: [((link.peer_worker_id,), count(link)) for link in status.links]


_LINKS: list[Reading[WorkerStatus]] = [
    reading(
        (
            "tandem_kv_link_info",
            "gauge",
            "",
            "1 for each open link, with the transport in use and what it negotiated. A slow one shows here.",
        ),
        lambda status: [((link.peer_worker_id, link.transport, link.detail), 1.0) for link in status.links],
        labels=("peer", "transport", "detail"),
    ),
    reading(
        ("tandem_kv_link_bytes_total", "counter", "bytes", "KV bytes sent over a link since it was opened."),
        _links(lambda link: link.num_bytes),
        labels=("peer",),
    ),
    reading(
        ("tandem_kv_link_messages_total", "counter", "messages", "Messages sent over a link since it was opened."),
        _links(lambda link: link.num_messages),
        labels=("peer",),
    ),
    reading(
        (
            "tandem_kv_link_busy_seconds_total",
            "counter",
            "seconds",
            "Seconds in which a message was under way on a link; bytes over these are the link's speed.",
        ),
        _links(lambda link: link.num_bytes / link.bytes_per_s if link.bytes_per_s else 0.0),
        labels=("peer",),
    ),
    reading(
        (
            "tandem_kv_link_probed_bytes_per_second",
            "gauge",
            "bytes/s",
            "Speed of large messages that was measured when the link was opened.",
        ),
        _links(lambda link: link.probed_bytes_per_s),
        labels=("peer",),
    ),
    reading(
        (
            "tandem_kv_link_latency_seconds",
            "gauge",
            "seconds",
            "Time of a small message that was measured when the link was opened.",
        ),
        _links(lambda link: link.latency_s),
        labels=("peer",),
    ),
    reading(
        (
            "tandem_kv_link_slow",
            "gauge",
            "",
            "1 for a link that was measured slower than transfer.min_gbps: alert on it. Else 0.",
        ),
        _links(lambda link: float(link.slow)),
        labels=("peer",),
    ),
]

PREFILL_READINGS: list[Reading[WorkerStatus]] = [
    *_common("prefill", "requests"),
    reading(
        ("tandem_prefill_waiting_tokens", "gauge", "tokens", "Prompt tokens that are here and not yet computed."),
        lambda status: plain(status.num_waiting_tokens),
    ),
    reading(
        ("tandem_prefill_prompt_tokens_total", "counter", "tokens", "Prompt tokens computed."),
        lambda status: plain(status.num_tokens),
    ),
    *_LINKS,
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSample:
    """What a decode worker counts by itself: its status, who waits for blocks, and what arrived."""

    status: WorkerStatus
    num_unreserved: int
    num_swapped: int
    num_received_bytes: int
    num_received_messages: int
    num_refused_messages: int
    num_nacked_messages: int
    num_forged_messages: int


def _of_status(of: Reading[WorkerStatus]) -> Reading[DecodeSample]:
    return Reading(spec=of.spec, values=lambda sample: of.values(sample.status))


DECODE_READINGS: list[Reading[DecodeSample]] = [
    *(_of_status(each) for each in _common("decode", "sequences")),
    reading(
        (
            "tandem_decode_waiting_reservations",
            "gauge",
            "sequences",
            "Sequences among the waiting ones whose blocks could not be reserved yet: the pool is full.",
        ),
        lambda sample: plain(sample.num_unreserved),
    ),
    reading(
        (
            "tandem_decode_swapped_requests",
            "gauge",
            "requests",
            "Preempted requests whose KV is in host memory; they wait for blocks.",
        ),
        lambda sample: plain(sample.num_swapped),
    ),
    reading(
        ("tandem_decode_output_tokens_total", "counter", "tokens", "Output tokens computed."),
        lambda sample: plain(sample.status.num_tokens),
    ),
    reading(
        ("tandem_decode_received_bytes_total", "counter", "bytes", "KV bytes that arrived whole."),
        lambda sample: plain(sample.num_received_bytes),
    ),
    reading(
        ("tandem_decode_received_messages_total", "counter", "messages", "KV messages that arrived whole."),
        lambda sample: plain(sample.num_received_messages),
    ),
    reading(
        (
            "tandem_decode_refused_messages_total",
            "counter",
            "messages",
            "KV messages that were thrown away: late, stale, repeated or out of range.",
        ),
        lambda sample: plain(sample.num_refused_messages),
    ),
    reading(
        (
            "tandem_decode_nacked_messages_total",
            "counter",
            "messages",
            "KV messages that did not arrive whole and were asked for again.",
        ),
        lambda sample: plain(sample.num_nacked_messages),
    ),
    reading(
        (
            "tandem_decode_forged_messages_total",
            "counter",
            "messages",
            "KV messages without their ticket's code, thrown away: somebody outside of the cluster sends here.",
        ),
        lambda sample: plain(sample.num_forged_messages),
    ),
]
