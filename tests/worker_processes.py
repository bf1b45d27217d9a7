"""Real worker processes without Ray: forked from a server that has imported everything, killed and started at will."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from tandem.key_source import KEY_VARIABLE
from tests.factories import CLUSTER_KEY

START_TIMEOUT_S = 60.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["decode_pool.actor", "prefill_pool.actor", "kv_transfer.ucx", "kv_transfer.loopback"])


Body = Callable[[Connection, str, dict[str, Any]], None]
"""What the process does, given its role and settings: says "ready", maybe more, and ends when it is told anything."""


class WorkerProcess:
    """One worker at a time, of `role` "prefill" or "decode"."""

    def __init__(self, role: str, settings: dict[str, Any], body: Body | None = None) -> None:
        """Without a `body` it runs what a cluster's process runs."""
        self._role = role
        self._settings = settings
        self._body = body or _run
        self.said: list[Any] = []
        """By all that were here, once they were ready."""

    def start(self) -> None:
        """Returns at once; `ready` waits."""
        self._channel, remote = _FORKS.Pipe()
        self._process = _FORKS.Process(target=self._body, args=(remote, self._role, self._settings))
        self._process.start()
        remote.close()

    def ready(self) -> None:
        """Until it is registered."""
        assert self._channel.poll(START_TIMEOUT_S), "the worker does not start"
        assert self._channel.recv() == "ready"

    def stand_still(self) -> None:
        """SIGSTOP: alive, and does nothing until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, at whatever it is doing, also while it stands still."""
        self._signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        """In good order, which is asserted."""
        if self._process.exitcode is None:
            self.go_on()
            self._channel.send("stop")
        self._process.join(START_TIMEOUT_S)
        exitcode = self._process.exitcode
        self._end()
        assert exitcode == 0, f"{self._settings['worker_id']} has not ended in good order: {exitcode}"

    def hear(self) -> None:
        """Takes what it has said; a process that says much and is not heard stands still in the end."""
        with contextlib.suppress(EOFError, OSError):
            while self._channel.poll():
                self.said.append(self._channel.recv())

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self.hear()
        self._channel.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.exitcode is None, f"{self._settings['worker_id']} has ended by itself"
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def stop_forks() -> None:
    """Ends the process that workers are forked from."""
    forkserver._forkserver._stop()


def _run(channel: Connection, role: str, settings: dict[str, Any]) -> None:
    from decode_pool.actor import DecodeActor
    from prefill_pool.actor import PrefillActor

    os.environ[KEY_VARIABLE] = CLUSTER_KEY.to_hex()
    actor = (PrefillActor if role == "prefill" else DecodeActor)(settings)
    actor.ready()
    channel.send("ready")
    channel.recv()
    actor.stop()
