"""What metrics are made of: one set for each process, with a registry of its own, that can list what it exports.

Counters and histograms are booked where things happen; gauges and what others count are read when somebody scrapes.
Names follow Prometheus' conventions: `tandem_<part>_<what>_<unit>`, base units, `_total` for counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
OK = "ok"
"""The `code` of a request that ended normally; others have their error's code."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets of durations that may be short."""

Kind = Literal["counter", "gauge", "histogram"]
Values = Iterable[tuple[tuple[str, ...], float]]
"""Label values and the number that belongs to them."""

S = TypeVar("S")

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series and say little


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """One exported metric. The `name` of a counter ends with `_total`; `unit` is a word, "" for states and the like."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(Generic[S]):
    """A metric that is read off a sample of type `S` at each scrape. Only counters and gauges."""

    spec: MetricSpec
    values: Callable[[S], Values]


def reading(
    spec: tuple[str, Kind, str, str], values: Callable[[S], Values], *, labels: tuple[str, ...] = ()
) -> Reading[S]:
    """`spec` is (name, kind, unit, help)."""
    name, kind, unit, text = spec
    return Reading(spec=MetricSpec(name=name, kind=kind, unit=unit, help=text, labels=labels), values=values)


def plain(value: float) -> Values:
    """One number without labels."""
    return [((), value)]


class SampleCollector(Collector, Generic[S]):
    """Takes one sample for each scrape and reads all its metrics off it."""

    def __init__(self, sample: Callable[[], S], readings: Sequence[Reading[S]]) -> None:
        self._sample = sample
        self._readings = readings

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """All families, empty: registering takes no sample."""
        return [_family(reading.spec) for reading in self._readings]

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """All families as they are now."""
        sample = self._sample()
        for reading in self._readings:
            family = _family(reading.spec)
            for labels, value in reading.values(sample):
                family.add_metric(labels, value)
            yield family


def _family(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily:
    assert spec.kind != "histogram"
    family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return family(spec.name, spec.help, labels=spec.labels)


class MetricSet:
    """The metrics of one process; `specs` lists them in the order in which they were made."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.specs: list[MetricSpec] = []
        ProcessCollector(registry=self.registry)

    def render(self) -> bytes:
        """The Prometheus text format; its content type is METRICS_CONTENT_TYPE."""
        return generate_latest(self.registry)

    def counter(self, name: str, help: str, *, unit: str = "", labels: tuple[str, ...] = ()) -> Counter:
        """A counter; `name` ends with `_total`."""
        self._note(name, "counter", unit, help=help, labels=labels)
        return Counter(name, help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, *, unit: str = "", labels: tuple[str, ...] = ()) -> Gauge:
        """A gauge that is set where it changes."""
        self._note(name, "gauge", unit, help=help, labels=labels)
        return Gauge(name, help, labels, registry=self.registry)

    def histogram(self, name: str, help: str, *, unit: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        """A histogram without labels; `buckets` in `unit`."""
        self._note(name, "histogram", unit, help=help)
        return Histogram(name, help, buckets=buckets, registry=self.registry)

    def announce(self, readings: Sequence[Reading[S]]) -> None:
        """Lists metrics that `sampled` will serve once there is something to sample."""
        self.specs += [reading.spec for reading in readings]

    def sampled(self, sample: Callable[[], S], readings: Sequence[Reading[S]]) -> None:
        """Serves announced metrics from `sample`, which is called once for each scrape."""
        self.registry.register(SampleCollector(sample, readings))

    def _note(self, name: str, kind: Kind, unit: str, *, help: str, labels: tuple[str, ...] = ()) -> None:
        self.specs.append(MetricSpec(name=name, kind=kind, unit=unit, help=help, labels=labels))
