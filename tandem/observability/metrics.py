"""What a router exports: requests as clients see them, and what their workers measured of them."""

from __future__ import annotations

from collections import OrderedDict

from tandem.errors import BY_CODE, HandoffFailed, TandemError, TransportError
from tandem.observability.metric_set import METRICS_CONTENT_TYPE, OK, MetricSet, Reading, reading
from tandem.rpc.tandem.v1 import inference_pb2
from tandem.types import WorkerId

__all__ = ["METRICS_CONTENT_TYPE", "OK", "RouterMetrics"]

MAX_WORKERS = 256
"""Workers with a series of their own; past that, the one that was not chosen for longest loses its."""

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_EXPOSED_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_HANDOFF_OUTCOMES = ("delivered", "not_needed", "failed", "aborted")

_ROUTED: Reading[OrderedDict[tuple[str, str], int]] = reading(
    (
        "tandem_router_routed_requests_total",
        "counter",
        "requests",
        "Requests that were sent to a worker, tries included.",
    ),
    lambda routed: [((role, worker), float(count)) for (role, worker), count in routed.items()],
    labels=("role", "worker"),
)


class RouterMetrics(MetricSet):
    """Times in seconds, measured at the router unless said otherwise. Event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self._routed: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._make_request_metrics()
        self._make_routing_metrics()
        self._make_transfer_metrics()

    def _make_request_metrics(self) -> None:
        self.requests = self.counter(
            "tandem_router_requests_total",
            "Requests that ended, by outcome: ok, or the error's code.",
            unit="requests",
            labels=("code",),
        )
        for code in (OK, *BY_CODE):
            self.requests.labels(code=code)
        self.running = self.gauge(
            "tandem_router_running_requests", "Requests that are open at the router.", unit="requests"
        )
        self.prompt_tokens = self.counter(
            "tandem_router_prompt_tokens_total", "Prompt tokens of requests sent to workers.", unit="tokens"
        )
        self.cached_tokens = self.counter(
            "tandem_router_cached_prompt_tokens_total",
            "Prompt tokens whose KV was reused and not computed.",
            unit="tokens",
        )
        self.predicted_tokens = self.counter(
            "tandem_router_predicted_cached_prompt_tokens_total",
            "Prompt tokens that routing expected to be reused; compare with the cached ones.",
            unit="tokens",
        )
        self.completion_tokens = self.counter(
            "tandem_router_completion_tokens_total", "Output tokens received from workers.", unit="tokens"
        )
        self.time_to_first_token = self.histogram(
            "tandem_router_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            unit="seconds",
            buckets=_TTFT_BUCKETS_S,
        )
        self.time_between_tokens = self.histogram(
            "tandem_router_time_between_tokens_seconds",
            "Between neighbouring tokens of one request.",
            unit="seconds",
            buckets=_TBT_BUCKETS_S,
        )
        self.request_duration = self.histogram(
            "tandem_router_request_duration_seconds",
            "From a request's arrival to its end, whatever the outcome.",
            unit="seconds",
            buckets=_REQUEST_BUCKETS_S,
        )

    def _make_routing_metrics(self) -> None:
        self.announce([_ROUTED])
        self.sampled(lambda: self._routed, [_ROUTED])
        self.retries = self.counter(
            "tandem_router_retries_total",
            "Requests that were sent to other workers after a failure, by the failure's code.",
            unit="requests",
            labels=("code",),
        )
        self.handoffs = self.counter(
            "tandem_router_handoffs_total",
            "Ends of requests by what became of their KV: delivered, not_needed (the first token was the last), failed "
            "(it could not be moved) or aborted (the request ended for another reason).",
            unit="handoffs",
            labels=("outcome",),
        )
        for outcome in _HANDOFF_OUTCOMES:
            self.handoffs.labels(outcome=outcome)

    def _make_transfer_metrics(self) -> None:
        self.transfer_exposed = self.histogram(
            "tandem_router_transfer_exposed_seconds",
            "From the end of a request's prefill compute to the end of its last KV message; measured by the prefill "
            "worker.",
            unit="seconds",
            buckets=_EXPOSED_BUCKETS_S,
        )
        self.transfer_hidden = self.histogram(
            "tandem_router_transfer_hidden_ratio",
            "Part of a request's KV bytes that had left before its prefill compute ended.",
            unit="ratio",
            buckets=_RATIO_BUCKETS,
        )
        self.transfer_bytes = self.counter(
            "tandem_router_transfer_bytes_total", "KV bytes of requests that were handed over.", unit="bytes"
        )
        self.transfer_hidden_bytes = self.counter(
            "tandem_router_transfer_hidden_bytes_total",
            "Those of them that had left before prefill compute ended.",
            unit="bytes",
        )

    def routed(self, role: str, worker_id: WorkerId) -> None:
        """A leg of a request goes to a worker."""
        key = (role, str(worker_id))
        self._routed[key] = self._routed.pop(key, 0) + 1
        if len(self._routed) > MAX_WORKERS:
            self._routed.popitem(last=False)

    def retried(self, error: TandemError) -> None:
        """A request goes to other workers because of `error`."""
        self.retries.labels(code=error.code).inc()

    def ended(self, outcome: str, timings: inference_pb2.RequestTimings | None) -> None:
        """A dispatched request has ended: `outcome` is OK or an error's code; timings where all legs reported."""
        self.requests.labels(code=outcome).inc()
        self.handoffs.labels(outcome=_handoff_outcome(outcome, timings)).inc()
        if timings is not None and timings.prefill.HasField("transfer"):
            self._transferred(timings)

    def _transferred(self, timings: inference_pb2.RequestTimings) -> None:
        transfer = timings.prefill.transfer
        self.transfer_exposed.observe(transfer.exposed_s)
        self.transfer_bytes.inc(transfer.num_bytes)
        self.transfer_hidden_bytes.inc(transfer.hidden_bytes)
        if transfer.num_bytes:
            self.transfer_hidden.observe(transfer.hidden_bytes / transfer.num_bytes)


def _handoff_outcome(outcome: str, timings: inference_pb2.RequestTimings | None) -> str:
    if outcome == OK:
        return "not_needed" if timings is not None and not timings.decode_worker else "delivered"
    failed = issubclass(BY_CODE.get(outcome, TandemError), HandoffFailed | TransportError)
    return "failed" if failed else "aborted"
