"""gRPC health checks on a port of their own, never encrypted: for whoever probes a server that serves only over TLS.

The service "" is SERVING from the first moment to the last: the process lives. The named ones follow `set_serving`.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.rpc.server import SERVER_OPTIONS, bind_port, format_address

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthPort:
    """Made by `start_health_port`."""

    def __init__(self, server: grpc.aio.Server, checker: health.aio.HealthServicer, names: Sequence[str]) -> None:
        self._server = server
        self._checker = checker
        self._names = tuple(names)
        self._serving: bool | None = None
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        """Raises ClusterError when the address cannot be bound."""
        bound = bind_port(self._server, host, port)
        self.address = format_address(host, bound)
        await self._checker.set("", _SERVING)
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What checks of the named services answer."""
        if serving != self._serving:
            self._serving = serving
            for name in self._names:
                await self._checker.set(name, _SERVING if serving else _NOT_SERVING)

    async def stop(self) -> None:
        """Closes the port; watchers are told. Idempotent."""
        await self._checker.enter_graceful_shutdown()
        await self._server.stop(0)


async def start_health_port(host: str, port: int, service_names: Sequence[str]) -> HealthPort:
    """Serves health checks of `service_names` on host:port; 0 takes a free port. Raises ClusterError."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    served = HealthPort(server, checker, service_names)
    await served.start(host, port)
    return served
