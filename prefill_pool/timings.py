"""What a prefill worker measured of one request, as the message that travels to the client."""

from __future__ import annotations

from kv_transfer.sender import OutgoingHandoff
from kv_transfer.sent import SentMessage
from tandem.rpc.tandem.v1 import common_pb2


def busy_seconds(messages: list[SentMessage]) -> float:
    """Seconds in which at least one message was under way: the length of the union of their intervals."""
    total, end = 0.0, float("-inf")
    for message in sorted(messages, key=lambda m: m.posted_s):
        total += max(0.0, message.done_s - max(message.posted_s, end))
        end = max(end, message.done_s)
    return total


def transfer_timings(
    messages: list[SentMessage], *, transport: str, started_s: float, last_kv_s: float, ended_s: float
) -> common_pb2.TransferTimings:
    """All arguments in seconds on one clock. `last_kv_s`: when the last layer's KV of the last chunk was written."""
    last_done_s = max((m.done_s for m in messages), default=ended_s)
    return common_pb2.TransferTimings(
        transport=transport,
        num_bytes=sum(m.num_bytes for m in messages),
        num_messages=len(messages),
        busy_s=busy_seconds(messages),
        hidden_bytes=sum(m.num_bytes for m in messages if m.done_s <= ended_s),
        before_last_layer_bytes=sum(m.num_bytes for m in messages if m.done_s <= last_kv_s),
        exposed_s=max(0.0, last_done_s - ended_s),
        compute_end_s=ended_s - started_s,
        messages=[
            common_pb2.MessageTiming(
                layer=m.blocks.layer,
                num_layers=m.blocks.num_layers,
                first_block=m.blocks.first_block,
                num_blocks=m.blocks.num_blocks,
                posted_s=m.posted_s - started_s,
                done_s=m.done_s - started_s,
            )
            for m in sorted(messages, key=lambda m: m.posted_s)
        ],
    )


def prefill_timings(
    *,
    arrival_s: float,
    started_s: float,
    last_kv_s: float,
    ended_s: float,
    num_chunks: int,
    handoff: OutgoingHandoff | None,
) -> common_pb2.PrefillTimings:
    """The whole leg; `handoff` is absent for requests that end with their first token."""
    timings = common_pb2.PrefillTimings(
        queue_s=started_s - arrival_s, prefill_s=ended_s - started_s, num_chunks=num_chunks
    )
    if handoff is not None:
        timings.ticket_s = handoff.ticket_s - handoff.asked_s
        transfer = transfer_timings(
            handoff.messages, transport=handoff.transport, started_s=started_s, last_kv_s=last_kv_s, ended_s=ended_s
        )
        timings.transfer.CopyFrom(transfer)
    return timings
