"""What a node exports beside the metrics of its workers: how many there are, and whose could not be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.observability.metric_set import MetricSet, Reading, plain, reading


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSample:
    """The last look at the workers of a node: whether each one's metrics were had, by its id."""

    answered: Mapping[str, bool] = field(default_factory=dict)


_READINGS: tuple[Reading[NodeSample], ...] = (
    reading(
        ("tandem_node_workers", "gauge", "workers", "Workers that are registered at this node's address."),
        lambda sample: plain(len(sample.answered)),
    ),
    reading(
        ("tandem_node_worker_up", "gauge", "", "1 where a worker's metrics could be had for this page, else 0."),
        lambda sample: [((worker_id,), float(answered)) for worker_id, answered in sample.answered.items()],
        labels=("worker",),
    ),
)


class NodeMetrics(MetricSet):
    """Event loop only. Label values: the workers that are registered now."""

    def __init__(self) -> None:
        super().__init__()
        self.sample = NodeSample()
        self.announce(_READINGS)
        self.sampled(lambda: self.sample, _READINGS)
