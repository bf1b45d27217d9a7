"""What workers of both pools export. Booked once for each iteration, request or handoff; the rest is read at scrapes.

Label values are bounded: outcomes and codes are closed sets, peers are the links open now.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.errors import BY_CODE, DeadlineExceeded, RequestCancelled, TandemError
from tandem.observability.metric_set import OK, MetricSet
from tandem.observability.worker_readings import DECODE_READINGS, PREFILL_READINGS, DecodeSample
from tandem.rpc.tandem.v1 import common_pb2
from tandem.rpc.tandem.v1.inference_pb2 import WorkerStatus

HANDOFF_OUTCOMES = ("delivered", "failed", "aborted")
PREFIX_SOURCES = ("device", "store", "computed")
SWAP_DIRECTIONS = ("out", "in")
_BATCH_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_BATCH_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class WorkerMetrics(MetricSet):
    """What both pools book in the same way."""

    def __init__(self, part: str, *, what: str, queue: str) -> None:
        super().__init__()
        self.iteration_seconds = self.histogram(
            f"tandem_{part}_iteration_seconds", "Compute of one iteration, all layers.", unit="seconds"
        )
        self.batch_sequences = self.histogram(
            f"tandem_{part}_batch_sequences",
            f"{what} in one iteration.",
            unit="sequences",
            buckets=_BATCH_SEQUENCES,
        )
        self.queue_seconds = self.histogram(f"tandem_{part}_queue_seconds", queue, unit="seconds")
        self.requests = self.counter(
            f"tandem_{part}_requests_total",
            "Requests that ended here, by outcome: ok, or the error's code.",
            unit="requests",
            labels=("code",),
        )
        self.handoffs = self.counter(
            f"tandem_{part}_handoffs_total",
            "Handoffs by outcome: delivered, failed (the KV could not be moved) or aborted (the request ended first).",
            unit="handoffs",
            labels=("outcome",),
        )
        for code in (OK, *BY_CODE):
            self.requests.labels(code=code)
        for outcome in HANDOFF_OUTCOMES:
            self.handoffs.labels(outcome=outcome)

    def failed(self, error: TandemError, *, moving: bool) -> None:
        """A request ended with an error; `moving`: its handoff was open and not delivered."""
        self.requests.labels(code=error.code).inc()
        if moving:
            first = isinstance(error, RequestCancelled | DeadlineExceeded)
            self.handoffs.labels(outcome="aborted" if first else "failed").inc()


class PrefillMetrics(WorkerMetrics):
    """What a prefill worker exports."""

    def __init__(self) -> None:
        super().__init__("prefill", what="Prompts", queue="From a request's arrival here to its first iteration.")
        self.batch_tokens = self.histogram(
            "tandem_prefill_batch_tokens", "Prompt tokens in one iteration.", unit="tokens", buckets=_BATCH_TOKENS
        )
        self.ticket_wait_seconds = self.histogram(
            "tandem_prefill_ticket_wait_seconds",
            "From asking a decode worker for a ticket to having it.",
            unit="seconds",
        )
        self.transfer_bytes = self.counter(
            "tandem_prefill_transfer_bytes_total", "KV bytes sent by handoffs that have ended.", unit="bytes"
        )
        self.prefix_tokens = self.counter(
            "tandem_prefill_prefix_tokens_total",
            "Prompt tokens by where their KV came from: the worker's blocks (device), its node's store, or compute.",
            unit="tokens",
            labels=("source",),
        )
        for source in PREFIX_SOURCES:
            self.prefix_tokens.labels(source=source)
        self.load_wait_seconds = self.histogram(
            "tandem_prefill_load_wait_seconds",
            "What an iteration that takes blocks from the store waited for them, all layers.",
            unit="seconds",
        )
        self.announce(PREFILL_READINGS)

    def follow(self, status: Callable[[], WorkerStatus]) -> None:
        """Serves gauges and the worker's own counts from `status`, once for each scrape."""
        self.sampled(status, PREFILL_READINGS)

    def iteration(self, seconds: float, *, num_sequences: int, num_tokens: int) -> None:
        """An iteration is over. Engine thread."""
        self.iteration_seconds.observe(seconds)
        self.batch_sequences.observe(num_sequences)
        self.batch_tokens.observe(num_tokens)

    def prefilled(self, num_prompt: int, *, num_cached: int, num_loaded: int) -> None:
        """A prompt's first token is there. Of its `num_cached` tokens, `num_loaded` came from the store."""
        self.prefix_tokens.labels(source="device").inc(num_cached - num_loaded)
        self.prefix_tokens.labels(source="store").inc(num_loaded)
        self.prefix_tokens.labels(source="computed").inc(num_prompt - num_cached)

    def completed(self, timings: common_pb2.PrefillTimings) -> None:
        """A request ended normally."""
        self.requests.labels(code=OK).inc()
        self.queue_seconds.observe(timings.queue_s)
        if timings.HasField("transfer"):
            self.handoffs.labels(outcome="delivered").inc()
            self.ticket_wait_seconds.observe(timings.ticket_s)


class DecodeMetrics(WorkerMetrics):
    """What a decode worker exports."""

    def __init__(self) -> None:
        super().__init__("decode", what="Sequences", queue="From the arrival of its KV to its first iteration.")
        self.preemptions = self.counter(
            "tandem_decode_preemptions_total",
            "Times that a running request's blocks were taken for one that stands a level of priority before it.",
            unit="requests",
        )
        self.swapped_blocks = self.counter(
            "tandem_decode_swapped_blocks_total",
            "KV blocks copied to host memory (out) or back (in) for preempted requests.",
            unit="blocks",
            labels=("direction",),
        )
        self.swap_seconds = self.counter(
            "tandem_decode_swap_seconds_total",
            "Time of those copies, in which no iteration ran.",
            unit="seconds",
            labels=("direction",),
        )
        for direction in SWAP_DIRECTIONS:
            self.swapped_blocks.labels(direction=direction)
            self.swap_seconds.labels(direction=direction)
        self.announce(DECODE_READINGS)

    def follow(self, sample: Callable[[], DecodeSample]) -> None:
        """Serves gauges and the worker's own counts from `sample`, which is called once for each scrape."""
        self.sampled(sample, DECODE_READINGS)

    def iteration(self, seconds: float, *, num_sequences: int) -> None:
        """An iteration is over. Engine thread."""
        self.iteration_seconds.observe(seconds)
        self.batch_sequences.observe(num_sequences)

    def swapped(self, direction: str, num_blocks: int, *, seconds: float) -> None:
        """Blocks were copied to host memory ("out") or back ("in"). Engine thread."""
        self.swapped_blocks.labels(direction=direction).inc(num_blocks)
        self.swap_seconds.labels(direction=direction).inc(seconds)

    def delivered(self) -> None:
        """A handoff has arrived whole. Any thread."""
        self.handoffs.labels(outcome="delivered").inc()

    def completed(self, timings: common_pb2.DecodeTimings) -> None:
        """A request ended normally."""
        self.requests.labels(code=OK).inc()
        if timings.num_iterations:
            self.queue_seconds.observe(timings.queue_s)
