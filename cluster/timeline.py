"""Draws where one request's time went, and how much of its KV transfer hid behind prefill. Pure: messages in, text out.

Two pictures with a time axis each: the request from its arrival, and its prefill from the first chunk's start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median
from textwrap import wrap

from tandem.rpc.tandem.v1.common_pb2 import MessageTiming, PrefillTimings, TransferTimings
from tandem.rpc.tandem.v1.inference_pb2 import RequestTimings, Usage

LEVELS = " ▁▂▃▄▅▆▇█"
DEFAULT_WIDTH = 60
_LABEL_WIDTH = 12
_BESIDE_CELLS = _LABEL_WIDTH + len("││ last byte at 12.3 ms")
_FEWEST_CELLS = 20
_MARKS = re.compile("(?<=[·,:]) ")
_VISIBLE = 1e-6
"""Smaller shares are rounding, not messages."""
_RATE_BYTES = 16_000_000
"""Below this a transfer's GB/s would say nothing of the link: handing over each small message takes longest."""


def render_timeline(
    timings: RequestTimings, usage: Usage, *, width: int = DEFAULT_WIDTH, columns: int | None = None
) -> list[str]:
    """Lines for one request; bars have `width` cells. In `columns` columns lines that are longer go on in the next
    one, and bars are shorter where that keeps what is said beside them beside them.
    """
    if columns is not None:
        width = min(width, max(_FEWEST_CELLS, columns - _BESIDE_CELLS))
    lines = [_times_line(timings), *_prefill_lines(timings.prefill)]
    lines += _request_bar(timings, width)
    if timings.prefill.HasField("transfer"):
        lines += _transfer_bars(timings.prefill.transfer, width)
    lines.append(_tokens_line(timings, usage))
    return lines if columns is None else [part for line in lines for part in _folded(line, columns)]


def _folded(line: str, columns: int) -> list[str]:
    """The line in pieces that fit: cut behind a bar, else behind marks, else between words."""
    if len(line) <= columns:
        return [line]
    bar, mark, note = line.rpartition("│ ")
    if mark:
        indent = " " * (_LABEL_WIDTH + 1) if _LABEL_WIDTH + 1 + len(note) <= columns else ""
        return [bar + "│", *wrap(note, columns, initial_indent=indent, subsequent_indent=indent)]
    lines = [""]
    for part in _MARKS.split(line):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > columns:
            lines.append(" ")
        lines[-1] += f" {part}" if lines[-1] else part
    return [piece for each in lines for piece in wrap(each, columns, subsequent_indent="  ")]


def seconds(value: float) -> str:
    """A duration with three digits or so: "850 µs", "12.3 ms", "1.23 s"."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 0.1:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def data_size(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def plural(count: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def transfer_rate(transfer: TransferTimings) -> float:
    """Bytes per second while at least one message was under way; 0 where that cannot be told."""
    return transfer.num_bytes / transfer.busy_s if transfer.busy_s > 0 else 0.0


def hidden_share(transfer: TransferTimings) -> float:
    """Share, 0 to 1, of the bytes that had left before prefill compute ended; 1 where there was nothing to send."""
    return transfer.hidden_bytes / transfer.num_bytes if transfer.num_bytes else 1.0


def _times_line(timings: RequestTimings) -> str:
    parts = [f"TTFT {seconds(timings.ttft_s)}"]
    if timings.tbt_p50_s > 0:
        parts.append(f"TBT p50 {seconds(timings.tbt_p50_s)}, p99 {seconds(timings.tbt_p99_s)}")
    parts.append(f"total {seconds(timings.total_s)}")
    return " · ".join(parts)


def _prefill_lines(prefill: PrefillTimings) -> list[str]:
    chunks = plural(prefill.num_chunks, "chunk")
    if prefill.num_companions:
        chunks += f", batched with {plural(prefill.num_companions, 'other prompt')}"
    first = f"queue {seconds(prefill.queue_s)} · prefill {seconds(prefill.prefill_s)} in {chunks}"
    if not prefill.HasField("transfer"):
        return [f"{first} · no KV transferred"]
    transfer = prefill.transfer
    second = (
        f"KV {data_size(transfer.num_bytes)} over {transfer.transport} in {plural(transfer.num_messages, 'message')}"
        f"{_speed(transfer)}: {hidden_share(transfer):.1%} hidden behind compute, {seconds(transfer.exposed_s)} exposed"
    )
    return [f"{first} · ticket {seconds(prefill.ticket_s)}", second]


def _speed(transfer: TransferTimings) -> str:
    if transfer.num_bytes >= _RATE_BYTES:
        return f", {transfer_rate(transfer) / 1e9:.3g} GB/s while any was under way"
    if not transfer.messages:
        return ""
    return f" of about {seconds(median(m.done_s - m.posted_s for m in transfer.messages))} each"


def _tokens_line(timings: RequestTimings, usage: Usage) -> str:
    path = " → ".join(filter(None, (timings.prefill_worker, timings.decode_worker)))
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    prompt, output = plural(usage.prompt_tokens, "prompt token"), plural(usage.completion_tokens, "output token")
    return f"{prompt}{cached}, {output} · {path}"


def _bar(label: str, cells: str, note: str = "") -> str:
    return f"{label:<{_LABEL_WIDTH}}│{cells}│ {note}".rstrip()


def _request_bar(timings: RequestTimings, width: int) -> list[str]:
    """The whole request, from arrival at the router to the last token, a letter for each phase."""
    waiting_s = timings.tokenize_s + timings.prefill.queue_s
    ends = [waiting_s, waiting_s + timings.prefill.prefill_s, max(timings.total_s, timings.ttft_s)]
    if ends[-1] <= 0:
        return []
    edges = [min(width, round(width * end / ends[-1])) for end in ends]
    cells, start = "", 0
    for letter, edge in zip("·PD", edges, strict=True):
        cells += letter * max(0, edge - start)
        start = max(start, edge)
    note = f"0 to {seconds(ends[-1])}: · waits  P prefill  D handoff and decode"
    return [_bar("request", cells.ljust(width), note)]


def _transfer_bars(transfer: TransferTimings, width: int) -> list[str]:
    """Compute above, share of each cell in which messages were under way below, then the bytes that had left."""
    end_s = max([transfer.compute_end_s, *(m.done_s for m in transfer.messages)])
    if end_s <= 0 or not transfer.messages:
        return []
    computed = max(1, min(width, round(width * transfer.compute_end_s / end_s)))
    last_s = max(m.done_s for m in transfer.messages)
    moving, sent = busy_shares(transfer.messages, end_s, width), sent_shares(transfer.messages, end_s, width)
    return [
        f"the prefill alone, on an axis of its own: 0 to {seconds(end_s)} from the start of its first chunk",
        _bar("  compute", ("█" * computed).ljust(width), f"until {seconds(transfer.compute_end_s)}"),
        _bar("  KV moving", _levels(moving), f"last byte at {seconds(last_s)}"),
        _bar("  KV sent", _levels(sent), data_size(transfer.num_bytes)),
    ]


def _levels(shares: Sequence[float]) -> str:
    """One character per share; anything at all is visible."""
    top = len(LEVELS) - 1
    return "".join(LEVELS[0 if share < _VISIBLE else max(1, min(top, round(share * top)))] for share in shares)


def busy_shares(messages: Sequence[MessageTiming], end_s: float, width: int) -> list[float]:
    """For each of `width` equal cells of 0..end_s: the share of it in which at least one message was under way."""
    cell_s = end_s / width
    shares = [0.0] * width
    for start_s, stop_s in _union([(m.posted_s, m.done_s) for m in messages]):
        first, last = int(start_s / cell_s), min(width - 1, int(stop_s / cell_s))
        for cell in range(max(0, first), last + 1):
            overlap_s = min(stop_s, (cell + 1) * cell_s) - max(start_s, cell * cell_s)
            shares[cell] += max(0.0, overlap_s) / cell_s
    return shares


def sent_shares(messages: Sequence[MessageTiming], end_s: float, width: int) -> list[float]:
    """For each cell: the share of all blocks that had left by its end."""
    total = sum(m.num_blocks for m in messages)
    counts = [0] * width
    for message in messages:
        counts[min(width - 1, max(0, int(message.done_s / end_s * width)))] += message.num_blocks
    shares, so_far = [], 0
    for count in counts:
        so_far += count
        shares.append(so_far / total if total else 0.0)
    return shares


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping intervals merged, in order."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
