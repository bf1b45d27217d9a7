"""Whether a failed request is tried again, and what to keep away from then. Pure.

Only a request without output is tried again: nothing was promised to the client yet, and its seed gives the same
tokens anywhere. A worker that was lost or is draining is avoided, its successor is not; when the handoff between two
failed, that pair is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.lifecycle import Leg
from router.policy import Route
from router.view import Incarnation
from tandem.errors import HandoffFailed, IncompatiblePeer, TandemError, TransportError, WorkerUnavailable

MAX_ATTEMPTS = 4


@dataclass(kw_only=True, slots=True)
class RetryState:
    """What one request has failed on so far."""

    num_attempts: int = 1
    bad_workers: set[Incarnation] = field(default_factory=set)
    bad_pairs: set[tuple[Incarnation, Incarnation]] = field(default_factory=set)

    def may_retry(self, error: TandemError, *, has_output: bool) -> bool:
        """Whether another attempt can help and is allowed."""
        if has_output or self.num_attempts >= MAX_ATTEMPTS or isinstance(error, IncompatiblePeer):
            return False
        return isinstance(error, WorkerUnavailable | HandoffFailed | TransportError)

    def note_failure(self, error: TandemError, *, leg: Leg | None, on: Route) -> None:
        """Books a failed attempt."""
        self.num_attempts += 1
        lost = on.prefill if leg == "prefill" else on.decode
        if isinstance(error, WorkerUnavailable) and leg is not None and lost is not None:
            self.bad_workers.add(lost.incarnation)
        elif on.decode is not None:
            self.bad_pairs.add((on.prefill.incarnation, on.decode.incarnation))
