"""The router as a child process: started at once, told ready over a pipe, restarted when it dies.

Workers are not touched by a router's death: it keeps no state but its streams, and its successor takes the same ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.processes import end, last_lines, spawn
from tandem.config import ClusterConfig, to_mapping
from tandem.errors import ClusterError

ROUTER_COMMAND = (sys.executable, "-m", "router")
_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_STABLE_S = 30.0
"""A router that ran this long before it died starts again without delay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterEndpoints:
    """Where the router listens: "host:port" and "http://host:port"; and its own start-up phases in seconds."""

    grpc: str
    http: str
    startup: dict[str, float]


class RouterProcess:
    """One router. `log` takes its output; None shows it on stderr."""

    def __init__(
        self, config: ClusterConfig, *, redis_url: str, log: Path | None, command: Sequence[str] = ROUTER_COMMAND
    ) -> None:
        self._config = config
        self._redis_url = redis_url
        self._log = log
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: asyncio.StreamReader | None = None
        self._pipe: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def start(self) -> RouterEndpoints:
        """Starts the process and returns when it listens. Raises ClusterError. Call on a thread that lives on."""
        self._close_pipe()
        read_fd, write_fd = os.pipe()
        self._lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        reader = self._lines
        self._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0)
        )
        try:
            self._spawn(write_fd)
        finally:
            os.close(write_fd)
        line = await self._line()
        endpoints = RouterEndpoints(grpc=line["grpc"], http=line["http"], startup=line.get("startup", {}))
        self._keep_ports(endpoints)
        return endpoints

    def _spawn(self, ready_fd: int) -> None:
        arguments = ["--config-json", json.dumps(to_mapping(self._config)), "--redis-url", self._redis_url]
        command = [*self._command, *arguments, "--ready-fd", str(ready_fd)]
        output = None if self._log is None else self._log.open("ab")
        try:
            self._process = spawn(command, output=output, death_signal=signal.SIGTERM, pass_fds=(ready_fd,))
        finally:
            if output is not None:
                output.close()

    def _keep_ports(self, endpoints: RouterEndpoints) -> None:
        """A successor must listen where clients already look."""
        grpc_port, http_port = (int(address.rpartition(":")[2]) for address in (endpoints.grpc, endpoints.http))
        router = replace(self._config.router, grpc_port=grpc_port, http_port=http_port)
        self._config = replace(self._config, router=router)

    async def serving(self) -> None:
        """Returns when requests will be served. Raises ClusterError when the router ends before."""
        while not (await self._line()).get("ready"):
            pass

    async def _line(self) -> dict[str, Any]:
        assert self._lines is not None
        line = await self._lines.readline()
        if not line.endswith(b"\n"):
            raise ClusterError(f"the router ended before it was ready: {await self._last_words()}")
        values: dict[str, Any] = json.loads(line)
        return values

    async def _last_words(self) -> str:
        status = await self.wait()
        logged = last_lines(self._log) if self._log is not None else ""
        return logged or f"exit status {status}"

    async def wait(self) -> int:
        """Returns the exit status when the process ends."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    async def supervise(self, note: Callable[[str], None]) -> None:
        """Starts the router again whenever it dies, later and later; until cancelled."""
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        since = loop.time()
        while True:
            status = await self.wait()
            if loop.time() - since > _STABLE_S:
                backoff_s = _FIRST_BACKOFF_S
            note(f"the router died (status {status}); starting it again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            since = loop.time()
            try:
                await self.start()
                await self.serving()
                note("the router is back")
            except ClusterError as exc:
                note(exc.message)

    async def stop(self, *, timeout_s: float) -> bool:
        """Drains and ends it; True when it ended by itself. Idempotent."""
        try:
            return self._process is None or await asyncio.to_thread(end, self._process, timeout_s=timeout_s)
        finally:
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
