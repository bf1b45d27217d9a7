"""What a controller is told, and what it tells whoever started it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.events import WorkerInfo
from cluster.placement import Selector
from cluster.scaling import Limits
from tandem.errors import TandemError
from tandem.types import Role, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSettings:
    """What a controller works with; durations in seconds."""

    sizes: Mapping[Role, int]
    """Sizes for pools that nobody has sized yet."""
    drain_timeout_s: float
    """Longest that a worker may take to finish what it has."""
    settle_s: float
    """After this, every worker that lives has renewed its record in a Redis that was away or empty."""
    cores: Sequence[int] = ()
    """Cores of this host to pin workers to; empty pins nobody."""
    selectors: Mapping[Role, Selector] = field(default_factory=dict)
    """Nodes that each pool may use; all where a pool is left out."""
    num_ranks: Mapping[Role, int] = field(default_factory=dict)
    """Processes of each worker of a pool; one where it is left out."""
    limits: Limits = field(default_factory=Limits)
    period_s: float = 0.5
    """A turn at least this often."""
    lease_s: float = 5.0
    """How long a controller that says nothing more is taken to be acting."""
    stop_timeout_s: float = 10.0
    """Longest that a worker may take to end once it is drained; then it is killed."""


class ControllerEvents:
    """Is told what happens; this one tells nobody. Called on the controller's event loop."""

    def ready(self, info: WorkerInfo) -> None:
        """A worker that was started, or was away, serves."""

    def failed(self, worker_id: WorkerId, error: TandemError) -> None:
        """A worker could not be started; it will be tried again."""

    def gone(self, worker_id: WorkerId) -> None:
        """A worker was taken away."""

    def reached(self) -> None:
        """Every pool has as many ready workers as it should; told with every turn."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""
