"""Which transports there are for memory of a kind, and how payloads that lie on a device are digested."""

from __future__ import annotations

import logging

import pytest
import torch

from kv_transfer import transports
from kv_transfer.digest import DEVICE_SAMPLE, DigestPolicy, digest
from kv_transfer.group import Groups
from kv_transfer.transports import candidates, make_transport
from tandem.errors import TransportError
from tandem.types import WorkerId
from tests.gpus import need_gpus

GPU, NAME = torch.device("cuda", 0), WorkerId("worker")


def test_shared_memory_is_refused_for_a_gpus_memory_and_says_what_to_choose() -> None:
    with pytest.raises(TransportError, match="KV is on cuda:0: choose ucx, collective or auto") as caught:
        make_transport("shm", worker_id=NAME, device=GPU)
    assert caught.value.param == "transfer.transport"


def test_auto_never_considers_shared_memory_for_a_gpus_memory() -> None:
    assert candidates(torch.device("cpu"))[0] == "shm"
    assert candidates(GPU) == ("ucx", "collective")


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch has NCCL")
def test_a_gpus_memory_goes_over_nccl_and_torch_without_it_says_so() -> None:
    with pytest.raises(TransportError, match=r"cuda:0 over NCCL, which torch lacks"):
        Groups(GPU, host="127.0.0.1")


def test_auto_goes_without_what_does_not_work_and_fails_when_nothing_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[str, torch.device]] = []

    def make(name: str, *, device: torch.device, **_: object) -> None:
        made.append((name, device))
        raise TransportError(f"no {name} here")

    monkeypatch.setattr(transports, "make_transport", make)
    with caplog.at_level(logging.WARNING), pytest.raises(TransportError, match="memory of cuda:0"):
        transports._make_auto(NAME, "127.0.0.1", GPU)
    assert made == [("ucx", GPU), ("collective", GPU)]
    assert "auto goes without ucx: no ucx here" in caplog.text


class OnAGpu(torch.Tensor):
    """Bytes that say they lie on a GPU; what is joined of them says so too, until it is brought over."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


def test_of_payloads_on_a_gpu_a_sample_is_digested_and_all_where_the_configuration_says_so() -> None:
    segments = [torch.arange(100, dtype=torch.uint8).as_subclass(OnAGpu)]
    sampled, every, third = DigestPolicy(), DigestPolicy(1), DigestPolicy(3)
    found = [sampled.digest(segments) for _ in range(2 * DEVICE_SAMPLE)]
    expected = digest([torch.arange(100, dtype=torch.uint8)])
    assert [index for index, value in enumerate(found) if value] == [0, DEVICE_SAMPLE]
    assert set(found) == {0, expected}
    assert [every.digest(segments) for _ in range(3)] == [expected] * 3
    assert [third.digest(segments) for _ in range(4)] == [expected, 0, 0, expected]


def test_a_payload_on_a_gpu_has_the_digest_of_its_bytes_however_it_is_cut() -> None:
    whole = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    pieces = [piece.as_subclass(OnAGpu) for piece in whole.split(77)]
    assert digest(pieces) == digest([whole])


@pytest.mark.gpu
def test_a_gpus_bytes_have_the_digest_of_the_hosts() -> None:
    (gpu,) = need_gpus()
    whole = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    assert digest([piece.to(gpu) for piece in whole.split(99_999)]) == digest([whole])
