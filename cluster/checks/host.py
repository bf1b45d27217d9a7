"""Cores, open files, the router's ports, and Ray."""

from __future__ import annotations

import os
import resource
import socket
import sys
from importlib.metadata import version

from cluster.checks.cgroup import cpu_limit
from cluster.checks.finding import Finding, Reporter, Settings

GOOD_FILES = 4096
"""Below this a busy router or Ray can run out of descriptors."""
LEAST_FILES = 512


def check_cores(settings: Settings) -> list[Finding]:
    """Cores that may be used, a container's quota, and the workers that want one each."""
    report = Reporter("cores")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_limit(proc_dir=settings.proc_dir, sys_dir=settings.sys_dir)
    config = settings.config
    num_workers = config.prefill.num_workers + config.decode.num_workers
    found = f"{cores} cores" + (f", of which a quota allows {quota:g}" if quota else "") + f"; {num_workers} workers"
    if quota is not None and quota < cores:
        return report.warning(
            f"{found}; engines start a thread for each core they see and are throttled",
            "set prefill.num_threads and decode.num_threads to the quota's share, or use a cpuset instead of a quota",
        )
    if cores < num_workers:
        return report.warning(f"{found}: they will share cores", "start fewer workers here, or use a larger host")
    return report.ok(found)


def check_open_files(settings: Settings) -> list[Finding]:
    """The limit of open files."""
    report = Reporter("open-files")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} files may be open (hard limit {hard})"
    advice = f"ulimit -n {max(GOOD_FILES, 65_536)}"
    if soft < LEAST_FILES:
        return report.problem(found, advice)
    return report.warning(found, advice) if soft < GOOD_FILES else report.ok(found)


def check_ports(settings: Settings) -> list[Finding]:
    """Whether the router could listen where it is configured to."""
    report = Reporter("ports")
    router = settings.config.router
    wanted = {"gRPC": router.grpc_port, "HTTP": router.http_port}
    failures = {name: why for name, port in wanted.items() if (why := _cannot_bind(router.host, port))}
    found = ", ".join(f"{name} {router.host}:{port or 'any free'}" for name, port in wanted.items())
    if failures:
        text = "; ".join(f"{name} port {wanted[name]}: {why}" for name, why in failures.items())
        return report.warning(
            text, "a cluster may be running here already; else choose others: tandem up --grpc-port N --http-port N"
        )
    return report.ok(f"{found} can be had")


def _cannot_bind(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return str(exc.strerror)
    return ""


def check_ray(settings: Settings) -> list[Finding]:
    """Whether Ray can be loaded."""
    report = Reporter("ray")
    try:
        import ray
    except ImportError as exc:
        return report.problem(f"Ray cannot be imported: {exc}", "make install, or pip install 'ray>=2.60'")
    address = os.environ.get("RAY_ADDRESS")
    found = f"Ray {ray.__version__}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    if address:
        return report.ok(f"{found}; RAY_ADDRESS is {address}")
    return report.ok(f"{found}, protobuf {version('protobuf')}, grpcio {version('grpcio')}")
