"""The router as a child process: started at once, told ready over a pipe, restarted when it dies.

Workers are not touched by a router's death: it keeps no state but its streams, and its successor takes the same ports.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cluster.child import ReportingChild
from cluster.events import ModelInfo
from tandem.config import ClusterConfig, to_mapping
from tandem.errors import ClusterError

ROUTER_COMMAND = (sys.executable, "-m", "router")
_END_S = 10.0
"""How long a router without requests may take to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterEndpoints:
    """Where the router listens: "host:port" and "http://host:port"; and its own start-up phases in seconds."""

    grpc: str
    http: str
    startup: dict[str, float]


NO_ENDPOINTS = RouterEndpoints(grpc="", http="", startup={})
"""Of a head without a router."""


class RouterProcess:
    """One router. `log` takes its output; None shows it on stderr."""

    def __init__(
        self, config: ClusterConfig, *, redis_url: str, log: Path | None, command: Sequence[str] = ROUTER_COMMAND
    ) -> None:
        self._config = config
        self._redis_url = redis_url
        self._command = tuple(command)
        self._child = ReportingChild("router", log=log)
        self._drained: bool | None = None

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return self._child.pid

    async def start(self) -> RouterEndpoints:
        """Starts the process and returns when it listens. Raises ClusterError. Call on a thread that lives on."""
        arguments = ["--config-json", json.dumps(to_mapping(self._config)), "--redis-url", self._redis_url]
        await self._child.start([*self._command, *arguments, "--stay"])
        line = await self._child.line()
        endpoints = RouterEndpoints(grpc=line["grpc"], http=line["http"], startup=line.get("startup", {}))
        self._keep_ports(endpoints)
        return endpoints

    def _keep_ports(self, endpoints: RouterEndpoints) -> None:
        """A successor must listen where clients already look."""
        grpc_port, http_port = (int(address.rpartition(":")[2]) for address in (endpoints.grpc, endpoints.http))
        router = replace(self._config.router, grpc_port=grpc_port, http_port=http_port)
        self._config = replace(self._config, router=router)

    async def serving(self) -> ModelInfo | None:
        """What it serves, once it does. Raises ClusterError when the router ends before."""
        while not (line := await self._child.line()).get("ready"):
            pass
        model = line.get("model")
        return model and ModelInfo(**{field.name: model[field.name] for field in fields(ModelInfo)})

    async def supervise(self, note: Callable[[str], None]) -> None:
        """Starts the router again whenever it dies; until cancelled."""
        await self._child.supervise(self._restart, note)

    async def _restart(self) -> None:
        await self.start()
        await self.serving()

    async def drain(self, *, timeout_s: float) -> bool:
        """Has it refuse new requests and end the running ones; True when it did in time. Idempotent.

        From then on it only answers operators, until `stop`.
        """
        if self._drained is None:
            self._drained = await self._drain(timeout_s)
        return self._drained

    async def _drain(self, timeout_s: float) -> bool:
        self._child.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                while self.pid is not None and not (await self._child.line()).get("drained"):
                    pass
        except ClusterError:
            return True  # it has ended: no request is left either
        except TimeoutError:
            return False
        return True

    async def stop(self, *, timeout_s: float) -> bool:
        """Drains for `timeout_s` seconds unless it has, and ends it; True when it ended by itself. Idempotent."""
        drained = await self.drain(timeout_s=timeout_s)
        return await self._child.stop(timeout_s=_END_S if drained else 0.0)
