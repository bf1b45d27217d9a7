"""A rank other than 0 as a process: joins rank 0, loads its share of the model, runs what it is told, ends with it.

What it does about handoffs is its pool's to give (`MakePart`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from tandem.config import ClusterConfig, DecodeConfig, PrefillConfig, from_mapping
from tandem.errors import ClusterError, TandemError, TransportError
from tandem.key_source import load_key
from tandem.model.collectives import open_store
from tandem.model.devices import choose_device
from tandem.ranks.channel import Kind, RankChannel, connect
from tandem.ranks.follower import Enqueue, Follower, HandoffPart
from tandem.ranks.hub import RankReport, pack_error
from tandem.ranks.loading import HOST, LoadedRank, RankShape, load_rank
from tandem.secret import ClusterKey
from tandem.types import Role, WorkerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """What a rank is told by whoever starts it: plain data but for the key, which is the process's own knowledge."""

    config: ClusterConfig
    worker_id: WorkerId
    rank: int
    port: int
    store_port: int
    host: str
    cores: tuple[int, ...]
    key: ClusterKey

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> RankSettings:
        """Inverse of `rank_values`. Raises ConfigError."""
        config = from_mapping(values["config"])
        return cls(
            config=config,
            key=load_key(config),
            worker_id=WorkerId(values["worker_id"]),
            rank=int(values["rank"]),
            port=int(values["port"]),
            store_port=int(values["store_port"]),
            host=str(values["host"]),
            cores=tuple(values["cores"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """What a pool makes its part of handoffs from."""

    settings: RankSettings
    loaded: LoadedRank
    transport: Transport
    channel: RankChannel
    enqueue: Enqueue
    on_crash: Callable[[BaseException], None]


MakePart = Callable[[RankParts], HandoffPart]


class RankProcess:
    """Starts at once, on a thread. `on_end` is called once it has ended: with the error, or None in good order."""

    def __init__(
        self,
        settings: RankSettings,
        role: Role,
        make_part: MakePart,
        *,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._settings = settings
        self._role = role
        self._make_part = make_part
        self._on_end = on_end
        self._lost = False
        if settings.cores:
            os.sched_setaffinity(0, settings.cores)
        self._thread = threading.Thread(target=self._run, name=f"rank-{settings.rank}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._serve()
        except Exception as exc:
            error = exc
        if not self._lost:
            self._on_end(error)

    def _on_lost(self, error: TransportError) -> None:
        """The compute thread may stand in a call that only another rank could end."""
        self._on_crash(ClusterError(f"rank 0 is gone: {error.message}"))

    def _on_crash(self, error: BaseException) -> None:
        self._lost = True
        self._on_end(error)

    def _serve(self) -> None:
        settings = self._settings
        channel = connect((HOST, settings.port), settings.key, settings.rank)
        transport: Transport | None = None
        try:
            device = choose_device(settings.config.model.device, rank=settings.rank)
            transport = make_transport(
                settings.config.transfer.transport, worker_id=settings.worker_id, host=settings.host, device=device
            )
            loaded = self._load(transport, device)
            follower = Follower(loaded.stage, channel, on_lost=self._on_lost)
            part = self._make_part(
                RankParts(
                    settings=settings,
                    loaded=loaded,
                    transport=transport,
                    channel=channel,
                    enqueue=follower.enqueue,
                    on_crash=self._on_crash,
                )
            )
            report = RankReport(
                rank=settings.rank,
                address=transport.address(),
                weights_bytes=loaded.weights_bytes,
                load_s=loaded.load_s,
            )
            channel.send(Kind.READY, report.pack())
            follower.run(part)
        except TandemError as exc:
            _say_why(channel, exc)
            raise
        finally:
            channel.close()
            if transport is not None:
                transport.close()

    def _load(self, transport: Transport, device: torch.device) -> LoadedRank:
        settings = self._settings
        pool = pool_of(settings.config, self._role)
        return load_rank(
            settings.config.model,
            RankShape(tp=pool.tensor_parallel, pp=pool.pipeline_parallel, rank=settings.rank, device=device),
            num_blocks=pool.num_blocks,
            num_threads=pool.num_threads or len(os.sched_getaffinity(0)),
            allocate=transport.allocate,
            meet=lambda: open_store(HOST, settings.store_port, is_master=False),
        )


def pool_of(config: ClusterConfig, role: Role) -> PrefillConfig | DecodeConfig:
    """The section of a role."""
    return config.prefill if role is Role.PREFILL else config.decode


def _say_why(channel: RankChannel, error: TandemError) -> None:
    try:
        channel.send(Kind.FAILED, pack_error(error))
    except TransportError:
        logger.info("rank 0 was gone before it could be told: %s", error.message)


def exit_with_rank(error: BaseException | None) -> None:
    """For `RankProcess`: nothing of a worker is left when its rank 0, or this rank, cannot go on."""
    if error is None:
        return
    logger.critical("rank ends: %s", error)
    logging.shutdown()
    os._exit(1)
