"""All checks: name, where it is, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from cluster.checks.finding import Check
from tandem.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSpec:
    """`place` is "module:function". A check that takes longer than `deadline_s` is ended."""

    name: str
    place: str
    deadline_s: float = 15.0

    def load(self) -> Check:
        """The function."""
        module, _, function = self.place.partition(":")
        check: Check = getattr(import_module(module), function)
        return check


CHECKS = (
    CheckSpec(name="transport-ucx", place="cluster.checks.transport:check_ucx", deadline_s=60.0),
    CheckSpec(name="transport-shm", place="cluster.checks.transport:check_shm", deadline_s=60.0),
    CheckSpec(name="model", place="cluster.checks.model:check_model", deadline_s=120.0),
    CheckSpec(name="kernels", place="cluster.checks.kernels:check_kernels", deadline_s=60.0),
    CheckSpec(name="ray", place="cluster.checks.host:check_ray", deadline_s=60.0),
    CheckSpec(name="redis", place="cluster.checks.metadata:check_redis", deadline_s=30.0),
    CheckSpec(name="clock", place="cluster.checks.metadata:check_clock", deadline_s=30.0),
    CheckSpec(name="shared-memory", place="cluster.checks.memory:check_shared_memory", deadline_s=30.0),
    CheckSpec(name="ptrace", place="cluster.checks.memory:check_ptrace", deadline_s=30.0),
    CheckSpec(name="cores", place="cluster.checks.host:check_cores"),
    CheckSpec(name="open-files", place="cluster.checks.host:check_open_files"),
    CheckSpec(name="ports", place="cluster.checks.host:check_ports"),
    CheckSpec(name="rdma", place="cluster.checks.rdma:check_rdma"),
    CheckSpec(name="gpu", place="cluster.checks.gpu:check_gpu", deadline_s=60.0),
    CheckSpec(name="nvlink", place="cluster.checks.gpu:check_nvlink", deadline_s=30.0),
)
"""Longest first, so that they overlap with the rest."""


def choose(names: Sequence[str]) -> tuple[CheckSpec, ...]:
    """The checks of these names, all of them for none. Raises ConfigError for an unknown one."""
    known = {spec.name: spec for spec in CHECKS}
    for name in names:
        if name not in known:
            raise ConfigError(f"no check {name!r}; there are {', '.join(sorted(known))}", param="--only")
    return tuple(spec for spec in CHECKS if not names or spec.name in names)
