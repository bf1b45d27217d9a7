"""Every metric name, in one place, with its labels and buckets. Each role holds its own registry."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
OK = "ok"
"""The `code` of a request that ended normally; others have their error's code."""

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RouterMetrics:
    """What a router exports. Times in seconds, measured at the router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_router_requests_total",
            "Requests that ended, by outcome: ok, or the error's code.",
            ["code"],
            registry=self.registry,
        )
        self.running = Gauge(
            "tandem_router_running_requests", "Requests that are open at the router.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "tandem_router_prompt_tokens_total", "Prompt tokens of requests sent to workers.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "tandem_router_cached_prompt_tokens_total",
            "Prompt tokens whose KV was reused and not computed.",
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "tandem_router_completion_tokens_total", "Output tokens received from workers.", registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "tandem_router_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.time_between_tokens = Histogram(
            "tandem_router_time_between_tokens_seconds",
            "Between neighbouring tokens of one request.",
            buckets=_TBT_BUCKETS_S,
            registry=self.registry,
        )
        self.request_duration = Histogram(
            "tandem_router_request_duration_seconds",
            "From a request's arrival to its end, whatever the outcome.",
            buckets=_REQUEST_BUCKETS_S,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The Prometheus text format; its content type is METRICS_CONTENT_TYPE."""
        return generate_latest(self.registry)
