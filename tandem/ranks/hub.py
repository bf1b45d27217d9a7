"""Rank 0's end of its worker: takes the other ranks in, speaks to them, and notices when one is gone.

A worker lives and dies whole. A rank that ends while the worker serves is reported once to `on_lost`, whose business is
to end this process; the other ranks then end too, because their connection does.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.errors import BY_CODE, ClusterError, ForeignCall, TandemError, TransportError, WorkerUnavailable
from tandem.model.collectives import open_store
from tandem.ranks.channel import Kind, RankChannel, accept
from tandem.ranks.loading import HOST
from tandem.secret import ClusterKey

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Longest that a rank may take to load its part of the model."""
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank says of itself once it can serve."""

    rank: int
    address: bytes
    """Of its transport."""
    weights_bytes: int
    load_s: float

    def pack(self) -> bytes:
        """JSON."""
        values = {
            "rank": self.rank,
            "address": self.address.hex(),
            "weights_bytes": self.weights_bytes,
            "load_s": self.load_s,
        }
        return json.dumps(values).encode()

    @classmethod
    def unpack(cls, data: bytes) -> RankReport:
        """Inverse of `pack`."""
        values: dict[str, Any] = json.loads(data)
        return cls(**{**values, "address": bytes.fromhex(values["address"])})


def pack_error(error: TandemError) -> bytes:
    """What a rank that cannot start sends."""
    return json.dumps({"code": error.code, "message": error.message}).encode()


def _unpack_error(rank: int, data: bytes) -> TandemError:
    values = json.loads(data)
    return BY_CODE.get(values["code"], ClusterError)(f"rank {rank}: {values['message']}")


class RankHub:
    """`num_ranks` counts rank 0. `close` ends the others in good order."""

    def __init__(self, key: ClusterKey, *, num_ranks: int, on_lost: Callable[[TandemError], None]) -> None:
        self.num_ranks = num_ranks
        self.store = open_store(HOST, 0, is_master=True)
        self._key = key
        self._on_lost = on_lost
        self._channels: dict[int, RankChannel] = {}
        self._reports: dict[int, RankReport] = {}
        self._failure: TandemError | None = None
        self._is_lost = False
        self._num_done = 0
        """Answers that `wait_done` has not taken."""
        self._changed = threading.Condition()
        self._closing = False
        self._on_handoff: Callable[[int, bytes], None] | None = None
        self._readers: list[threading.Thread] = []
        self._listener = socket.create_server((HOST, 0), backlog=num_ranks)
        self._acceptor = threading.Thread(target=self._accept, name="ranks-accept", daemon=True)
        self._acceptor.start()

    @property
    def addresses(self) -> list[bytes]:
        """Of the other ranks' transports, in order, once they are ready."""
        return [self._reports[rank].address for rank in sorted(self._reports)]

    @property
    def port(self) -> int:
        """Where the other ranks connect."""
        return int(self._listener.getsockname()[1])

    @property
    def store_port(self) -> int:
        """Where process groups meet."""
        return int(self.store.port)

    def listen_to_handoffs(self, on_handoff: Callable[[int, bytes], None]) -> None:
        """Who takes HANDOFF frames, given as rank and payload, on a thread of that rank's connection."""
        self._on_handoff = on_handoff

    def wait_ready(self) -> list[RankReport]:
        """All other ranks' reports, in order. Raises what kept one from starting, ClusterError when time runs out."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with self._changed:
            while len(self._reports) < self.num_ranks - 1:
                if self._failure is not None:
                    raise self._failure
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    missing = sorted(set(range(1, self.num_ranks)) - set(self._reports))
                    raise ClusterError(f"ranks {missing} were not ready within {START_TIMEOUT_S:g} s")
        self._stop_listening()
        return [self._reports[rank] for rank in sorted(self._reports)]

    def broadcast(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame to every other rank. Any thread. Raises LinkClosed when one is gone."""
        for channel in self._channels.values():
            channel.send(kind, payload)

    def send(self, rank: int, kind: Kind, payload: bytes = b"") -> None:
        """Sends a frame to one rank. Any thread. Raises LinkClosed when it is gone."""
        self._channels[rank].send(kind, payload)

    def wait_done(self) -> None:
        """Waits until every other rank has said DONE once more. Raises what ended one that is gone."""
        with self._changed:
            while self._num_done < self.num_ranks - 1:
                if self._is_lost and self._failure is not None:
                    raise self._failure
                self._changed.wait()
            self._num_done -= self.num_ranks - 1

    def close(self) -> None:
        """Lets the other ranks end, and waits for that. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._stop_listening()
        for rank, channel in self._channels.items():
            try:
                channel.send(Kind.STOP)
            except TransportError as exc:
                logger.info("rank %d had ended already: %s", rank, exc)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for reader in self._readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))
        for channel in self._channels.values():
            channel.close()

    def _stop_listening(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not end a call to accept
        except OSError:
            pass  # it is closed already
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed: everybody is here, or nobody is wanted any more
            try:
                rank, channel = accept(sock, self._key)
            except (ForeignCall, TransportError, OSError) as exc:
                logger.warning("refused a connection to the ranks' port: %s", exc)
                continue
            self._add(rank, channel)

    def _add(self, rank: int, channel: RankChannel) -> None:
        if not 0 < rank < self.num_ranks or rank in self._channels:
            logger.warning("refused a second or impossible rank %d", rank)
            channel.close()
            return
        self._channels[rank] = channel
        self._readers.append(
            channel.follow(
                lambda kind, payload: self._on_frame(rank, kind, payload),
                lambda error: self._on_end(rank, error),
                name=f"rank-{rank}",
            )
        )

    def _on_frame(self, rank: int, kind: Kind, payload: bytes) -> None:
        if kind is Kind.HANDOFF and self._on_handoff is not None:
            self._on_handoff(rank, payload)
            return
        with self._changed:
            if kind is Kind.READY:
                self._reports[rank] = RankReport.unpack(payload)
            elif kind is Kind.FAILED:
                self._failure = self._failure or _unpack_error(rank, payload)
            elif kind is Kind.DONE:
                self._num_done += 1
            self._changed.notify_all()

    def _on_end(self, rank: int, error: TransportError) -> None:
        self._channels[rank].close()
        if self._closing:
            return
        lost = WorkerUnavailable(f"rank {rank} of this worker is gone: {error.message}")
        with self._changed:
            is_first_lost, self._is_lost = not self._is_lost, True
            was_ready = len(self._reports) == self.num_ranks - 1
            why = self._failure = self._failure or lost
            self._changed.notify_all()
        if was_ready and is_first_lost:
            self._on_lost(why)
