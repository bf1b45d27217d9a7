"""What a check is told and what it says: settings in, findings out; plain data, because it crosses a process border."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tandem.config import ClusterConfig, from_mapping, to_mapping


class State(StrEnum):
    """How it stands. Only `PROBLEM` means that Tandem will not work as configured."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """`found` is what was seen, with numbers; `advice` is what to do, empty where there is nothing to do."""

    check: str
    state: State
    found: str
    advice: str = ""

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> Finding:
        """Inverse of `asdict`."""
        return cls(**{**values, "state": State(values["state"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The cluster that is to run here, and where the kernel shows itself (elsewhere only in tests)."""

    config: ClusterConfig
    shm_dir: str = "/dev/shm"
    sys_dir: str = "/sys"
    proc_dir: str = "/proc"
    dev_dir: str = "/dev"

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**asdict(self), "config": to_mapping(self.config)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Inverse of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "config": from_mapping(values["config"])})


Check = Callable[[Settings], list[Finding]]
"""Returns at least one finding. May raise anything: whoever runs it reports that."""


class Reporter:
    """Makes findings of one check."""

    def __init__(self, check: str) -> None:
        self._check = check

    def ok(self, found: str) -> list[Finding]:
        """All is well."""
        return [Finding(check=self._check, state=State.OK, found=found)]

    def warning(self, found: str, advice: str) -> list[Finding]:
        """It works, but slower or less safely than it could."""
        return [Finding(check=self._check, state=State.WARNING, found=found, advice=advice)]

    def problem(self, found: str, advice: str) -> list[Finding]:
        """It will not work."""
        return [Finding(check=self._check, state=State.PROBLEM, found=found, advice=advice)]

    def skipped(self, reason: str) -> list[Finding]:
        """There is nothing to look at, and why."""
        return [Finding(check=self._check, state=State.SKIPPED, found=reason)]


def size(num_bytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
