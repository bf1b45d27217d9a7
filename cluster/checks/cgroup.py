"""Limits that a container puts on this process: memory and CPU, from cgroups of either version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60


def _directories(controller: str, *, proc_dir: str, sys_dir: str) -> Iterator[Path]:
    """Where the controller's files may lie, innermost first; version 2 has no controller in its line."""
    root = Path(sys_dir, "fs", "cgroup")
    memberships = Path(proc_dir, "self", "cgroup")
    for line in memberships.read_text().splitlines() if memberships.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        inner = base / path.strip("/")
        for directory in (inner, *inner.parents):
            if directory.is_relative_to(base):
                yield directory


def _numbers(controller: str, names: tuple[str, ...], *, proc_dir: str, sys_dir: str) -> Iterator[list[int]]:
    """The first words of all files of these names, as numbers, for each directory that has them all."""
    for directory in _directories(controller, proc_dir=proc_dir, sys_dir=sys_dir):
        files = [directory / name for name in names]
        if not all(file.is_file() for file in files):
            continue
        words = [word for file in files for word in file.read_text().split()]
        if "max" not in words:
            yield [int(word) for word in words]


def memory_left_bytes(*, proc_dir: str = "/proc", sys_dir: str = "/sys") -> int | None:
    """What the tightest limit leaves to this process; None without a limit. Page cache counts as used."""
    found = [
        limit - used
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        for limit, used in _numbers("memory", names, proc_dir=proc_dir, sys_dir=sys_dir)
        if limit < _UNLIMITED_BYTES
    ]
    return min(found) if found else None


def cpu_limit(*, proc_dir: str = "/proc", sys_dir: str = "/sys") -> float | None:
    """CPUs that the tightest quota allows; None without one."""
    found = [
        quota / period
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        for quota, period in _numbers("cpu", names, proc_dir=proc_dir, sys_dir=sys_dir)
        if quota > 0
    ]
    return min(found) if found else None


def memory_available_bytes(*, proc_dir: str = "/proc", sys_dir: str = "/sys") -> int:
    """What can still be had without swapping or being killed."""
    lines = Path(proc_dir, "meminfo").read_text().splitlines()
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    left = memory_left_bytes(proc_dir=proc_dir, sys_dir=sys_dir)
    return values["MemAvailable"] if left is None else min(values["MemAvailable"], left)
