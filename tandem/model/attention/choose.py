"""Which attention kernels a rank computes with, decided once at the start and said by name."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass

from tandem.kv.cache import KvCache
from tandem.model.attention.base import AttentionBackend
from tandem.model.attention.flashinfer import FlashInferAttention, Wrappers, why_unfit
from tandem.model.attention.native import NativeAttention
from tandem.model.attention.torch_cpu import TorchAttention
from tandem.model.device_io import DeviceIo
from tandem.model.native import kernels
from tandem.model.spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenAttention:
    """A backend and its name for people: "flashinfer", "torch", or the instruction set of our own kernels."""

    backend: AttentionBackend
    name: str


def choose_attention(spec: ModelSpec, cache: KvCache, io: DeviceIo) -> ChosenAttention:
    """For the cache of one rank; `spec` has the rank's numbers. On a GPU FlashInfer, where it is there and fits."""
    if io.device.type == "cpu":
        own = kernels()
        if own is not None:
            return ChosenAttention(backend=NativeAttention(own, cache.layout), name=own.ISA)
        return ChosenAttention(backend=TorchAttention(cache.layout), name="torch")
    found = why_unfit(cache.layout) or load_flashinfer()
    if isinstance(found, str):
        logger.warning("attention on %s is torch's own, much slower than FlashInfer's: %s", io.device, found)
        return ChosenAttention(backend=TorchAttention(cache.layout, io), name="torch")
    backend = FlashInferAttention(cache.layout, spec.num_heads, device=io.device, wrappers=found)
    return ChosenAttention(backend=backend, name="flashinfer")


def load_flashinfer() -> Wrappers | str:
    """FlashInfer; or why it cannot be had."""
    try:
        module: Wrappers = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as exc:  # the last two: built for another CUDA or torch than is here
        return f"flashinfer cannot be imported ({exc}); pip install flashinfer-python"
    return module
