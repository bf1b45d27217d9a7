"""The Ray node of this machine at one address: its raylet's process, whoever started it, and whether it answers.

Read off the process table: it needs no Ray, no Redis and no token, so a probe can ask it when all those are away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

from tandem.rpc.server import format_address

ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Raylet:
    """A raylet that runs here. `gcs_address` ("host:port") is its head's."""

    pid: int
    node_ip: str
    node_id: str
    gcs_address: str

    def answers(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
        """Whether each of its gRPC servers says that it serves. Only for a process of the same user."""
        try:
            connections = psutil.Process(self.pid).net_connections("tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        ports = sorted({c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN})
        return bool(ports) and all(serves(format_address(self.node_ip, port), timeout_s=timeout_s) for port in ports)


def raylets() -> Iterator[Raylet]:
    """All that this process can see."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if words and PurePath(words[0]).name == "raylet":
            yield Raylet(
                pid=process.pid,
                node_ip=_flag(words, "node_ip_address"),
                node_id=_flag(words, "node_id"),
                gcs_address=_flag(words, "gcs_address"),
            )


def find_raylet(node_ip: str) -> Raylet | None:
    """The one whose node has this address."""
    return next((raylet for raylet in raylets() if raylet.node_ip == node_ip), None)


def _flag(words: Sequence[str], name: str) -> str:
    """The value of --name=value; Ray writes some of its flags with dashes and some with underscores."""
    for word in words:
        given, _, value = word.partition("=")
        if given.replace("-", "_") == f"__{name}":
            return value
    return ""


def serves(address: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
    """Whether the gRPC server at host:port says so when its health is checked."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
