"""RDMA devices, their links, and what pinning memory for them needs."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.checks.finding import Finding, Reporter, Settings, size

_RDMA_TLS = ("all", "rc", "rc_v", "rc_x", "ud", "ud_v", "ud_x", "dc", "dc_x", "ib")


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One port of one device, in the kernel's words."""

    name: str
    state: str
    layer: str
    rate: str

    @property
    def is_active(self) -> bool:
        """Whether it carries traffic."""
        return "ACTIVE" in self.state

    def __str__(self) -> str:
        return f"{self.name} {self.layer} {self.rate} {self.state}"


def ports(sys_dir: str) -> list[Port]:
    """All ports of all RDMA devices, by name."""

    def read(path: Path) -> str:
        return path.read_text().strip() if path.exists() else "unknown"

    found = sorted(Path(sys_dir, "class", "infiniband").glob("*/ports/*"))
    return [
        Port(
            name=f"{path.parents[1].name}:{path.name}",
            state=read(path / "state").partition(": ")[2] or read(path / "state"),
            layer=read(path / "link_layer"),
            rate=read(path / "rate"),
        )
        for path in found
    ]


def check_rdma(settings: Settings) -> list[Finding]:
    """Devices with a link, access to them, the limit of locked memory, and whether UCX would use them."""
    report = Reporter("rdma")
    found = ports(settings.sys_dir)
    if not found:
        return report.skipped("no RDMA device: between hosts KV moves over TCP, within a host through shared memory")
    text = "; ".join(map(str, found))
    if not any(port.is_active for port in found):
        return report.problem(f"no port has a link: {text}", "plug it in, or start the subnet manager; see `ibstat`")
    nodes = sorted(Path(settings.dev_dir, "infiniband").glob("uverbs*"))
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return report.problem(
            f"{text}, but /dev/infiniband/uverbs* cannot be opened",
            "give this user or container access (Kubernetes: the RDMA device plugin; Docker: --device)",
        )
    return _memlock(report, text) or _transports(report, text, os.environ.get("UCX_TLS", ""))


def _memlock(report: Reporter, text: str) -> list[Finding]:
    """RDMA pins every registered byte; the pool's size is known only after the model is read, so: no limit at all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return []
    return report.problem(
        f"{text}; only {size(soft)} of memory may be locked, KV pools must be locked whole",
        "set `ulimit -l unlimited` (limits.conf: memlock; Docker: --ulimit memlock=-1; Kubernetes: CAP_IPC_LOCK)",
    )


def _transports(report: Reporter, text: str, tls: str) -> list[Finding]:
    if uses_rdma(tls.split(",")):
        return report.ok(f"{text}; UCX_TLS={tls}")
    return report.warning(
        f"{text}; UCX would not use it: UCX_TLS is {tls or 'unset, which here means shared memory and TCP'}",
        "set UCX_TLS=all (or rc,sm,self) for all workers",
    )


def uses_rdma(tls: Sequence[str]) -> bool:
    """Whether a list of UCX transports contains one over RDMA."""
    return any(name.strip() in _RDMA_TLS for name in tls)
