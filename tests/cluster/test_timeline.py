"""The picture of one request's time."""

from __future__ import annotations

import pytest

from cluster.timeline import busy_shares, data_size, render_timeline, seconds, sent_shares
from tandem.rpc.tandem.v1.common_pb2 import DecodeTimings, MessageTiming, PrefillTimings, TransferTimings
from tandem.rpc.tandem.v1.inference_pb2 import RequestTimings, Usage


def make_message(posted_s: float, done_s: float, num_blocks: int = 1) -> MessageTiming:
    return MessageTiming(posted_s=posted_s, done_s=done_s, num_blocks=num_blocks)


def make_timings() -> RequestTimings:
    transfer = TransferTimings(
        transport="ucx",
        num_bytes=80_000_000,
        num_messages=2,
        busy_s=0.1,
        hidden_bytes=76_000_000,
        exposed_s=0.004,
        messages=[make_message(0.5, 0.6, 19), make_message(0.95, 1.0, 1)],
        compute_end_s=0.996,
    )
    prefill = PrefillTimings(
        queue_s=0.012, ticket_s=0.002, prefill_s=1.0, num_chunks=4, num_companions=3, transfer=transfer
    )
    return RequestTimings(
        ttft_s=1.05,
        tbt_p50_s=0.02,
        tbt_p99_s=0.031,
        total_s=2.0,
        tokenize_s=0.003,
        prefill=prefill,
        decode=DecodeTimings(decode_s=0.9, num_iterations=40),
        prefill_worker="prefill-0",
        decode_worker="decode-0",
    )


def render() -> str:
    return "\n".join(render_timeline(make_timings(), Usage(prompt_tokens=1800, completion_tokens=41), width=20))


@pytest.mark.parametrize(
    "part",
    [
        "TTFT 1.05 s",
        "TBT p50 20.0 ms, p99 31.0 ms",
        "queue 12.0 ms",
        "KV 80.0 MB over ucx in 2 messages, 0.8 GB/s while any was under way: ",
        "prefill 1.00 s in 4 chunks, batched with 3 other prompts",
        "│ 0 to 2.00 s: ",
        "an axis of its own: 0 to 1.00 s ",
        "last byte at 1.00 s",
        "95.0% hidden behind compute, 4.0 ms exposed",
        "1800 prompt tokens, 41 output tokens",
        "prefill-0 → decode-0",
    ],
)
def test_every_number_is_said(part: str) -> None:
    assert part in render()


def test_the_bars_line_up_and_show_the_overlap() -> None:
    bars = {line.split("│")[0].strip(): line.split("│")[1] for line in render().splitlines() if "│" in line}
    assert {len(cells) for cells in bars.values()} == {20}
    assert bars["compute"] == "█" * 20
    assert bars["KV moving"] == " " * 10 + "██" + " " * 7 + "█"
    assert bars["request"].startswith("PPPPPPPPPP")
    assert bars["KV sent"][-1] == "█"


def test_a_request_without_a_handoff_says_so() -> None:
    timings = RequestTimings(ttft_s=0.1, total_s=0.1, prefill=PrefillTimings(prefill_s=0.1, num_chunks=1))
    text = "\n".join(render_timeline(timings, Usage(prompt_tokens=5, completion_tokens=1)))
    assert "no KV transferred" in text
    assert "in 1 chunk " in text
    assert "1 output token " in text
    assert "KV moving" not in text
    assert "TBT" not in text


def test_a_small_transfer_says_how_long_a_message_takes_and_no_rate() -> None:
    timings = make_timings()
    timings.prefill.transfer.num_bytes = 900_000
    text = "\n".join(render_timeline(timings, Usage(prompt_tokens=18, completion_tokens=41)))
    assert "KV 900.0 kB over ucx in 2 messages of about 75.0 ms each: " in text
    assert "GB/s" not in text


@pytest.mark.parametrize("columns", [40, 60, 78, 100])
def test_in_a_narrow_terminal_every_line_fits_and_every_word_is_there(columns: int) -> None:
    usage = Usage(prompt_tokens=1800, completion_tokens=41)
    lines = render_timeline(make_timings(), usage, columns=columns)
    assert max(map(len, lines)) <= columns
    unbounded = [line for line in render_timeline(make_timings(), usage) if "│" not in line]
    assert set(" ".join(unbounded).split()) <= set(" ".join(lines).split())
    bars = [line.split("│")[1] for line in lines if "│" in line]
    assert len(bars) == 4
    assert len({len(cells) for cells in bars}) == 1


def test_in_a_wide_terminal_nothing_is_cut() -> None:
    usage = Usage(prompt_tokens=1800, completion_tokens=41)
    assert render_timeline(make_timings(), usage, columns=158) == render_timeline(make_timings(), usage)


def test_empty_timings_do_not_fail() -> None:
    assert render_timeline(RequestTimings(), Usage())


def test_overlapping_messages_are_counted_once() -> None:
    messages = [make_message(0.0, 0.6), make_message(0.2, 0.5), make_message(0.9, 1.0)]
    assert busy_shares(messages, 1.0, 2) == pytest.approx([1.0, 0.4])


def test_the_share_sent_grows_to_all() -> None:
    messages = [make_message(0.0, 0.2, 3), make_message(0.0, 1.0, 1)]
    assert sent_shares(messages, 1.0, 4) == pytest.approx([0.75, 0.75, 0.75, 1.0])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 µs"), (0.0005, "500 µs"), (0.0123, "12.3 ms"), (0.85, "850 ms"), (1.234, "1.23 s")]
)
def test_durations_have_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_sizes_are_decimal() -> None:
    assert [data_size(n) for n in (12, 1500, 2.5e6, 3e9)] == ["12 B", "1.5 kB", "2.5 MB", "3.0 GB"]
