"""Hands the slab's descriptor to clients over an abstract Unix socket, and notices when a client's process is gone.

Nothing is in the file system. A client says which session it is, is given the descriptor, and keeps the connection for
as long as it may write: its end is how the store knows that it does not. Same user and network namespace only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.errors import StoreError
from tandem.tasks import cancel_all

logger = logging.getLogger(__name__)

SESSION_BYTES = 32
_BACKLOG = 512
_HELLO_TIMEOUT_S = 5.0
_RETRY_S = 0.2
_UCRED = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end."""
    return int(_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


class MemorySocket:
    """The store's end. `given(session)` is asked before the descriptor is sent, False refuses; then `gone(session)`."""

    def __init__(self, fd: int, *, given: Callable[[str], bool], gone: Callable[[str], None]) -> None:
        self.address = f"tandem-store/{os.getpid()}/{secrets.token_hex(16)}".encode()
        self._fd = fd
        self._given = given
        self._gone = gone
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(b"\0" + self.address)
        self._listener.listen(_BACKLOG)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """In the running event loop."""
        self._keep(self._accept())

    async def close(self) -> None:
        """Ends all connections. Idempotent."""
        await cancel_all(self._tasks)
        self._listener.close()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as exc:  # out of descriptors: they come back
                logger.warning("no client can be given the store's memory now: %s", exc)
                await asyncio.sleep(_RETRY_S)
            else:
                self._keep(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            if peer_uid(connection) != os.getuid():
                logger.warning("refused the store's memory to a process of another user")
                return
            try:
                async with asyncio.timeout(_HELLO_TIMEOUT_S):
                    session = (await loop.sock_recv(connection, SESSION_BYTES + 1)).decode("ascii", "replace")
            except (TimeoutError, OSError) as exc:
                logger.warning("a client asked for the store's memory and did not say who it is: %r", exc)
                return
            if self._given(session):
                await self._give(connection, session)

    async def _give(self, connection: socket.socket, session: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            socket.send_fds(connection, [b"\0"], [self._fd], socket.MSG_NOSIGNAL)
            while await loop.sock_recv(connection, 1):
                pass  # a client has nothing to say here but that it is gone
        except OSError as exc:
            logger.info("a client's connection for the store's memory broke: %s", exc)
        finally:
            self._gone(session)


def receive_memory(address: bytes, session: str, *, timeout_s: float) -> tuple[socket.socket, int]:
    """The client's end: (connection to keep while the memory may be written, descriptor). Blocks; call on a thread.

    Raises StoreError when the store is not there, or is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(b"\0" + address)
        if peer_uid(sock) != os.getuid():
            raise StoreError("the prefix store runs as another user")
        sock.send(session.encode(), socket.MSG_NOSIGNAL)
        _, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if len(fds) != 1:
            raise StoreError("the prefix store does not share its memory with this session")
        return sock, fds[0]
    except OSError as exc:
        sock.close()
        raise StoreError(f"the prefix store's memory cannot be had: {exc}") from exc
    except StoreError:
        sock.close()
        raise
