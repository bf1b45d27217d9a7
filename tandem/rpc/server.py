"""The gRPC server of routers and workers: options, health, reflection, drain. What it serves is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.errors import ClusterError
from tandem.rpc.authentication import CallGuard
from tandem.rpc.client import MAX_MESSAGE_BYTES

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class RpcServer:
    """A running server. Health says NOT_SERVING until `set_serving(True)`. Made by `start_server`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        *,
        host: str,
        port: int,
        checker: health.aio.HealthServicer,
        names: tuple[str, ...],
    ) -> None:
        self._server = server
        self._health = checker
        self._names = names
        self._serving = False
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """host:port, for clients on this host when the server listens on all addresses."""
        return format_address(self.host, self.port)

    async def set_serving(self, serving: bool) -> None:
        """What health checks answer, for the server ("") and each of its services."""
        if serving != self._serving:
            self._serving = serving
            await self._publish(_SERVING if serving else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, lets running ones end for `grace_s` seconds, then cancels them. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _publish(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)


def format_address(host: str, port: int) -> str:
    """A dialable host:port: brackets around IPv6, loopback for a wildcard."""
    dialable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{dialable}]:{port}" if ":" in dialable else f"{dialable}:{port}"


def bind_port(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """The port that `server` will listen on. Raises ClusterError when it cannot be bound."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise ClusterError(f"cannot listen on {address}: {exc}", param="port") from exc


async def start_server(
    host: str,
    port: int,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    *,
    credentials: grpc.ServerCredentials | None = None,
    guard: CallGuard | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    options: Sequence[tuple[str, int]] = (),
) -> RpcServer:
    """Starts a server on host:port (0 takes a free port) with `register`'s services, health and reflection.

    `service_names` are full names ("tandem.v1.Inference"). Without `credentials` it serves in the clear,
    with a `guard` only calls of its cluster.
    `options` are gRPC's, beside SERVER_OPTIONS. Raises ClusterError when the address cannot be bound.
    """
    guards = () if guard is None else (guard,)
    server = grpc.aio.server(options=(*SERVER_OPTIONS, *options), interceptors=(*guards, *interceptors))
    register(server)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = bind_port(server, host, port, credentials)
    rpc = RpcServer(server, host=host, port=bound, checker=checker, names=tuple(service_names))
    if guard is not None:
        guard.address = rpc.address
    await rpc._publish(_NOT_SERVING)
    await server.start()
    return rpc
