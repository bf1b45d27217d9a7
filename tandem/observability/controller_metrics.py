"""What the controller exports: the pools as wanted and as they are, what it did about it, and whether it is in charge.

For the controller's loop: make one `ControllerMetrics`, serve its `registry` with `server.serve_metrics`, call
`pool` with each observation, `action` with each thing done, `reconciled` or `failed` after each turn, and `lease`
when the lease is taken or lost.
"""

from __future__ import annotations

from tandem.observability.metric_set import MetricSet
from tandem.types import Role

ACTIONS = ("start", "wait", "drain", "stop", "forget")
"""Kinds of actions that have a series from the start; a controller that does something else names it itself."""


class ControllerMetrics(MetricSet):
    """Event loop only. Label values: the two roles, and the controller's own closed set of actions."""

    def __init__(self) -> None:
        super().__init__()
        self._make_pool_metrics()
        self._make_loop_metrics()
        for role in Role:
            self.pool(role, desired=0, ready=0, draining=0)
        for kind in ACTIONS:
            self._actions.labels(kind=kind)

    def _make_pool_metrics(self) -> None:
        self._desired = self.gauge(
            "tandem_controller_desired_workers", "Workers that a pool should have.", unit="workers", labels=("role",)
        )
        self._ready = self.gauge(
            "tandem_controller_ready_workers", "Workers that take requests.", unit="workers", labels=("role",)
        )
        self._draining = self.gauge(
            "tandem_controller_draining_workers",
            "Workers that finish what they have and then end.",
            unit="workers",
            labels=("role",),
        )
        self._unplaced = self.gauge(
            "tandem_controller_unplaced_workers",
            "Workers that are wanted and that no node has room for.",
            unit="workers",
            labels=("role",),
        )
        self._generation = self.gauge(
            "tandem_controller_pool_generation",
            "Restarts of a pool that were asked for so far.",
            labels=("role",),
        )

    def _make_loop_metrics(self) -> None:
        self._actions = self.counter(
            "tandem_controller_actions_total", "What the controller did, by kind.", unit="actions", labels=("kind",)
        )
        self._reconcile_seconds = self.histogram(
            "tandem_controller_reconcile_seconds", "One turn: observe, decide, act.", unit="seconds"
        )
        self._failures = self.counter(
            "tandem_controller_reconcile_failures_total",
            "Turns that ended with an error and are tried again.",
            unit="turns",
        )
        self._lease = self.gauge("tandem_controller_lease_held", "1 while this controller acts, 0 while another does.")

    def pool(
        self, role: Role, *, desired: int, ready: int, draining: int, unplaced: int = 0, generation: int = 0
    ) -> None:
        """A pool as it is now."""
        self._desired.labels(role=role).set(desired)
        self._ready.labels(role=role).set(ready)
        self._draining.labels(role=role).set(draining)
        self._unplaced.labels(role=role).set(unplaced)
        self._generation.labels(role=role).set(generation)

    def action(self, kind: str) -> None:
        """Something was done; `kind` is one word out of a closed set, best one of ACTIONS."""
        self._actions.labels(kind=kind).inc()

    def reconciled(self, seconds: float) -> None:
        """A turn is over."""
        self._reconcile_seconds.observe(seconds)

    def failed(self) -> None:
        """A turn ended with an error."""
        self._failures.inc()

    def lease(self, held: bool) -> None:
        """Whether this controller is the one that acts."""
        self._lease.set(held)
