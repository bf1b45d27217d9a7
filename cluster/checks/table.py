"""All checks: name, where it is, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from cluster.checks.finding import Check


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSpec:
    """`place` is "module:function" below `cluster.checks`. A check that takes longer than `deadline_s` is ended."""

    name: str
    place: str
    deadline_s: float = 15.0

    def load(self) -> Check:
        """The function."""
        module, _, function = self.place.partition(":")
        check: Check = getattr(import_module(f"cluster.checks.{module}"), function)
        return check


CHECKS = (
    CheckSpec(name="transport-ucx", place="transport:check_ucx", deadline_s=60.0),
    CheckSpec(name="transport-shm", place="transport:check_shm", deadline_s=60.0),
    CheckSpec(name="model", place="model:check_model", deadline_s=120.0),
    CheckSpec(name="ray", place="host:check_ray", deadline_s=60.0),
    CheckSpec(name="redis", place="metadata:check_redis", deadline_s=30.0),
    CheckSpec(name="clock", place="metadata:check_clock", deadline_s=30.0),
    CheckSpec(name="shared-memory", place="memory:check_shared_memory", deadline_s=30.0),
    CheckSpec(name="ptrace", place="memory:check_ptrace", deadline_s=30.0),
    CheckSpec(name="cores", place="host:check_cores"),
    CheckSpec(name="open-files", place="host:check_open_files"),
    CheckSpec(name="ports", place="host:check_ports"),
    CheckSpec(name="rdma", place="rdma:check_rdma"),
    CheckSpec(name="gpu", place="gpu:check_gpu", deadline_s=60.0),
    CheckSpec(name="nvlink", place="gpu:check_nvlink", deadline_s=30.0),
)
"""Longest first, so that they overlap with the rest."""
