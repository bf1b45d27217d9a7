"""KV in a GPU's memory, as UCX takes it: as it lies, without a copy on the host. The one place where UCX meets CUDA.

Host memory is numpy views, as everywhere; memory of a GPU stays torch tensors, which UCXX reads through
`__cuda_array_interface__`. What a GPU still computes is waited for before UCX may read it, and what was copied on it is
there before anybody is told. Orders and types are tested; none of it has been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from kv_transfer.digest import digest
from kv_transfer.segments import HOST, Bytes, as_bytes, check_segments, copy, digest_bytes
from tandem.errors import TransportError

Memory: TypeAlias = "Bytes | torch.Tensor"
"""uint8, 1-D and contiguous: a numpy view in host memory, a tensor on a GPU."""

CUDA_TLS = "cuda_copy,cuda_ipc"
"""UCX's transports for memory of GPUs, beside those for the host's."""


def as_memory(segments: Sequence[torch.Tensor], num_bytes: int) -> list[Memory]:
    """`segments`, empty ones left out. Raises TransportError unless all lie on the host, or all on one GPU."""
    if not segments or segments[0].is_cpu:
        return list(as_bytes(segments, num_bytes))
    device = segments[0].device
    if device.type != "cuda":
        raise TransportError(f"UCX moves memory of the host and of CUDA devices, not of {device}", param="segments")
    check_segments(segments, num_bytes, device)
    return [segment.detach() for segment in segments if segment.numel()]


def device_of(memory: Sequence[Memory]) -> torch.device:
    """Where `memory` of `as_memory` lies."""
    return memory[0].device if memory and isinstance(memory[0], torch.Tensor) else HOST


def mark(device: torch.device, cuda: Any = torch.cuda) -> Callable[[], None]:
    """Marks what the caller's current stream has been given to do; the returned call waits for that, on any thread.

    Call it where the segments are written; call what it returns before UCX may read them. Does nothing on the host.
    """
    if device.type == "cpu":
        return _nothing
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return lambda: event.synchronize()


def prepare_thread(device: torch.device, cuda: Any = torch.cuda) -> None:
    """Makes the GPU's context that of this thread: UCX finds it there. Does nothing on the host."""
    if device.type != "cpu":
        cuda.set_device(device)
        cuda.current_stream(device).synchronize()


def take_thread(device: torch.device, cuda: Any = torch.cuda) -> None:
    """The same for a thread that a transport keeps; what it then copies is queued on a stream of its own, not behind
    what the engine computes.
    """
    if device.type != "cpu":
        prepare_thread(device, cuda)
        cuda.set_stream(cuda.Stream(device))


@contextmanager
def own_stream(device: torch.device, cuda: Any = torch.cuda) -> Iterator[None]:
    """What this thread asks of the GPU within is queued on a stream of its own. Does nothing on the host."""
    if device.type == "cpu":
        yield
        return
    with cuda.device(device), cuda.stream(cuda.Stream(device)):
        yield


def finish(device: torch.device, cuda: Any = torch.cuda) -> None:
    """Waits for what this thread has queued. Does nothing on the host."""
    if device.type != "cpu":
        cuda.current_stream(device).synchronize()


def gather(pieces: Sequence[Memory], target: Memory, cuda: Any = torch.cuda) -> None:
    """Copies `pieces`, one after another, into `target` of their sum's length; done when it returns."""
    if isinstance(target, torch.Tensor):
        torch.cat([piece for piece in pieces if isinstance(piece, torch.Tensor)], out=target)
        finish(target.device, cuda)
    else:
        copy([target], _host(pieces), with_digest=False)


def scatter(targets: Sequence[Memory], source: Memory, *, with_digest: bool, cuda: Any = torch.cuda) -> int:
    """Copies `source` into `targets`, in order; done when it returns. The digest, or 0 when not asked for one."""
    if not isinstance(source, torch.Tensor):
        return copy(_host(targets), [source], with_digest=with_digest)
    start = 0
    for target in targets:
        assert isinstance(target, torch.Tensor)
        target.copy_(source[start : start + target.numel()])
        start += target.numel()
    finish(source.device, cuda)
    return digest([source]) if with_digest else 0


def digest_memory(views: Sequence[Memory]) -> int:
    """The digest of what lies in `views`; a GPU's bytes are brought to the host for it (see `DigestPolicy`)."""
    if views and isinstance(views[0], torch.Tensor):
        return digest([view for view in views if isinstance(view, torch.Tensor)])
    return digest_bytes(_host(views))


def _host(views: Sequence[Memory]) -> list[Bytes]:
    return [view for view in views if not isinstance(view, torch.Tensor)]


def _nothing() -> None:
    pass
