"""Fixtures of the transports' conformance suite: two transports of one kind in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kv_transfer.segments import HOST
from kv_transfer.transport import Transport
from kv_transfer.transports import make_transport
from tandem.types import WorkerId
from tests.gpus import need_gpus
from tests.kv_transfer.kinds import ON_GPUS, ON_HOST
from tests.kv_transfer.peers import stop_forks


@pytest.fixture(params=[*ON_HOST, *ON_GPUS])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A transport's name, and what it goes over or where its memory is."""
    kind = str(request.param)
    if " over " in kind:
        monkeypatch.setenv("UCX_TLS", kind.partition(" over ")[2])
    return kind


@pytest.fixture
def name(kind: str) -> str:
    return kind.partition(" ")[0]


@pytest.fixture
def devices(kind: str) -> tuple[torch.device, torch.device]:
    """Of source and destination. NCCL never joins a GPU with itself."""
    if "GPUs" not in kind:
        return HOST, HOST
    found = need_gpus(2 if kind.startswith("collective") else 1)
    return found[0], found[-1]


@pytest.fixture
def source(name: str, devices: tuple[torch.device, torch.device]) -> Iterator[Transport]:
    transport = make_transport(name, worker_id=WorkerId("source"), device=devices[0])
    yield transport
    transport.close()


@pytest.fixture
def destination(name: str, devices: tuple[torch.device, torch.device]) -> Iterator[Transport]:
    transport = make_transport(name, worker_id=WorkerId("destination"), device=devices[1])
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def ended_forks() -> Iterator[None]:
    """For modules with peers in processes of their own: none is left after them, nor what they were forked from."""
    yield
    stop_forks()
