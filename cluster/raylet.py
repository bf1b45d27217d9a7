"""The Ray node of this machine at one address: its raylet's process, whoever started it, and whether it answers.

Read off the process table: it needs no Ray, no Redis and no token, so a probe can ask it when all those are away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

from tandem.rpc.server import format_address

ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Raylet:
    """A raylet that runs here. `gcs_address` ("host:port") is its head's; `ports` are those it listens on."""

    pid: int
    node_ip: str
    node_id: str
    gcs_address: str
    ports: tuple[int, ...]

    def answers(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
        """Whether each of its gRPC servers says that it serves."""
        return bool(self.ports) and all(
            _serves(format_address(self.node_ip, port), timeout_s=timeout_s) for port in self.ports
        )


def find_raylet(node_ip: str) -> Raylet | None:
    """The raylet whose node has this address; None when none runs, or it may not be looked at."""
    for process in psutil.process_iter():
        try:
            found = _read(process, node_ip)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if found is not None:
            return found
    return None


def _read(process: psutil.Process, node_ip: str) -> Raylet | None:
    words = process.cmdline()
    if not words or PurePath(words[0]).name != "raylet" or _flag(words, "node_ip_address") != node_ip:
        return None
    listening = (c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    return Raylet(
        pid=process.pid,
        node_ip=node_ip,
        node_id=_flag(words, "node_id"),
        gcs_address=_flag(words, "gcs-address"),
        ports=tuple(sorted({connection.laddr.port for connection in listening})),
    )


def _flag(words: Sequence[str], name: str) -> str:
    """The value of --name=value; Ray writes some of its flags with dashes and some with underscores."""
    for word in words:
        given, _, value = word.partition("=")
        if given.replace("-", "_") == f"__{name.replace('-', '_')}":
            return value
    return ""


def _serves(address: str, *, timeout_s: float) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
