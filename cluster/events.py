"""What the launcher tells whoever watches: phases that take time, and things that happen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

WORKERS_PHASE = "controller and workers: processes, model, registration"
"""In which workers start; each says how long the parts of its own start took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of the start-up; seconds from the launcher's start."""

    name: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What a router serves: `max_context_tokens` is what the pools hold, the other what the model itself takes."""

    name: str
    max_context_tokens: int
    model_context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker that is ready. `startup` has its own phases, in seconds."""

    worker_id: str
    role: str
    address: str
    pid: int
    startup: dict[str, float]

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> WorkerInfo:
        """From what a worker actor's `ready()` returns."""
        return cls(
            worker_id=str(values["worker_id"]),
            role=str(values["role"]),
            address=str(values["address"]),
            pid=int(values["pid"]),
            startup={str(name): float(seconds) for name, seconds in values.get("startup", {}).items()},
        )


class Progress(Protocol):
    """Is told about waits as they begin and end, and about events. Called on the launcher's thread."""

    def begin(self, name: str) -> None:
        """A wait began."""

    def done(self, phase: Phase) -> None:
        """A wait ended."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""


class SilentProgress:
    """Tells nobody."""

    def begin(self, name: str) -> None:
        """Ignored."""

    def done(self, phase: Phase) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""
