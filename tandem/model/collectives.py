"""What ranks of one worker say to each other while they compute: sums within a stage, rows between stages.

Process groups of their own, never torch's global world: two workers in one process do not meet, and whoever ends takes
only its own along. Gloo moves host memory, NCCL memory of GPUs. A rank that dies breaks its group at once; one that
stands still breaks it after `STALL_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroupGloo

from tandem.errors import TransportError
from tandem.model.parallel import ModelShard

_dist: Any = dist
STALL_S = 300.0
"""Longest that a rank waits for another: for all of a micro-batch's compute, where that one is a stage before it."""
OPEN_TIMEOUT_S = 60.0


class Collectives(Protocol):
    """One rank's side. Calls block, are made by one thread, in an order that fits the other ranks' calls.

    All raise TransportError when a rank is gone.
    """

    num_all_reduces: int
    """Since the start."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sums `x` over the tensor ranks of this stage, in place; the same bits on all of them."""

    def send(self, x: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begins to send `x`, which stays as it is until the callable that is returned has been called."""

    def receive(self, x: torch.Tensor, rank: int) -> None:
        """Fills `x` with what `rank` sends next."""

    def close(self) -> None:
        """Leaves the groups."""


class GlooCollectives:
    """Over TCP. Sums of bf16 are made in fp32 and rounded once."""

    _kind: Any = ProcessGroupGloo

    def __init__(self, store: Any, shard: ModelShard, *, host: str) -> None:
        """Meets the other ranks in `store`; blocks until all are there. Raises TransportError."""
        self.num_all_reduces = 0
        try:
            device = self._kind.create_device(hostname=host, lazy_init=False)
            self._world: Any = self._group(store, "world", shard.rank, size=shard.tp * shard.pp, device=device)
            self._stage: Any = None
            if shard.tp > 1:
                self._stage = self._group(store, f"stage{shard.stage}", shard.index, size=shard.tp, device=device)
        except RuntimeError as exc:
            raise TransportError(f"the ranks' process group could not be made: {exc}") from exc

    def _group(self, store: Any, name: str, rank: int, *, size: int, device: Any) -> Any:
        options = self._kind._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=OPEN_TIMEOUT_S)
        options._threads = 1
        return self._kind(_dist.PrefixStore(name, store), rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> None:
        """See `Collectives`."""
        self.num_all_reduces += 1
        wide = x if x.dtype == torch.float32 else x.float()
        options = _dist.AllreduceOptions()
        options.timeout = timedelta(seconds=STALL_S)
        _wait(lambda: self._stage.allreduce([wide], options))
        if wide is not x:
            x.copy_(wide)

    def send(self, x: torch.Tensor, rank: int) -> Callable[[], None]:
        """See `Collectives`."""
        raw = x.contiguous().view(torch.uint8)
        work = _started(lambda: self._world.send([raw], rank, 0))

        def finish() -> None:
            _wait(lambda: work)
            assert raw is not None  # the memory lives until here

        return finish

    def receive(self, x: torch.Tensor, rank: int) -> None:
        """See `Collectives`."""
        raw = x.view(torch.uint8)
        _wait(lambda: self._world.recv([raw], rank, 0))

    def close(self) -> None:
        """See `Collectives`."""
        self._stage = self._world = None


def join_ranks(store: Any, shard: ModelShard, device: torch.device, *, host: str) -> Collectives:
    """Meets the other ranks, whose memory is of the same kind as `device`. Blocks. Raises TransportError."""
    if device.type == "cuda":
        return NcclCollectives(store, shard, device=device)
    return GlooCollectives(store, shard, host=host)


class NcclCollectives:
    """Between GPUs. NCCL's calls are queued on the current stream, as the model's are."""

    def __init__(self, store: Any, shard: ModelShard, *, device: torch.device) -> None:
        """Meets the other ranks in `store`; `device` is this rank's GPU. Raises TransportError."""
        from torch.distributed import ProcessGroupNCCL

        self.num_all_reduces = 0
        self._device = device
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=STALL_S)
        try:
            world = _dist.PrefixStore("world", store)
            self._world: Any = ProcessGroupNCCL(world, shard.rank, shard.tp * shard.pp, options)
            self._stage: Any = None
            if shard.tp > 1:
                stage = _dist.PrefixStore(f"stage{shard.stage}", store)
                self._stage = ProcessGroupNCCL(stage, shard.index, shard.tp, options)
        except RuntimeError as exc:
            raise TransportError(f"the ranks' process group could not be made: {exc}") from exc

    def all_reduce(self, x: torch.Tensor) -> None:
        """See `Collectives`."""
        self.num_all_reduces += 1
        with torch.cuda.device(self._device):
            _wait(lambda: self._stage.allreduce([x], _dist.AllreduceOptions()))

    def send(self, x: torch.Tensor, rank: int) -> Callable[[], None]:
        """See `Collectives`."""
        kept = x.contiguous()
        with torch.cuda.device(self._device):
            work = _started(lambda: self._world.send([kept], rank, 0))
        return lambda: _wait(lambda: work)

    def receive(self, x: torch.Tensor, rank: int) -> None:
        """See `Collectives`."""
        with torch.cuda.device(self._device):
            _wait(lambda: self._world.recv([x], rank, 0))

    def close(self) -> None:
        """See `Collectives`."""
        self._stage = self._world = None


def _started(start: Callable[[], Any]) -> Any:
    try:
        return start()
    except RuntimeError as exc:
        raise _broken(exc) from exc


def _wait(start: Callable[[], Any]) -> None:
    try:
        start().wait(timedelta(seconds=STALL_S))
    except RuntimeError as exc:
        raise _broken(exc) from exc


def _broken(exc: RuntimeError) -> TransportError:
    return TransportError(f"another rank of this worker is gone: {str(exc).splitlines()[0]}")


def open_store(host: str, port: int, *, is_master: bool) -> Any:
    """The place where ranks meet; port 0 takes a free one. Raises TransportError."""
    try:
        return _dist.TCPStore(
            host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=OPEN_TIMEOUT_S)
        )
    except RuntimeError as exc:
        raise TransportError(f"the store at {host}:{port} cannot be opened: {exc}") from exc
