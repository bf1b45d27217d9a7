"""What is known of a running cluster: what the ready file says."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from cluster.events import ModelInfo, Phase, WorkerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterInfo:
    """A running cluster, as the ready file has it. `startup` holds phases that overlap; seconds from the start.

    `head` is where other nodes join. With a head that others may join, `workers` is empty: it is up without any.
    Without a router `grpc` and `http` are empty.
    """

    grpc: str
    http: str
    redis: str
    head: str
    workers: tuple[WorkerInfo, ...]
    startup: tuple[Phase, ...]
    router_startup: dict[str, float]
    total_s: float
    model: ModelInfo | None = None

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2) + "\n"
