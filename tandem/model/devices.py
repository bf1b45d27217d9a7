"""Which device a rank computes on, from the configuration and what is here, and how it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tandem.config import DeviceKind, ModelConfig
from tandem.errors import ConfigError
from tandem.model.device_io import HOST


def choose_device(wanted: DeviceKind, *, rank: int = 0, cuda: Any = torch.cuda) -> torch.device:
    """For one rank of a worker. Ray shows a process the GPUs that are its own; where several ranks see the same ones,
    they take turns.

    Raises ConfigError when a GPU is wanted and torch sees none.
    """
    if wanted == "cpu" or (wanted == "auto" and not cuda.is_available()):
        return HOST
    if not cuda.is_available():
        raise ConfigError(
            f"model.device is cuda, and torch {torch.__version__} sees no GPU here; `tandem doctor` says more",
            param="model.device",
        )
    return torch.device("cuda", rank % cuda.device_count())


def node_has_gpu(dev_dir: str = "/dev") -> bool:
    """Whether workers of this node find a GPU, as far as a process that was given none can tell."""
    return torch.version.cuda is not None and any(Path(dev_dir).glob("nvidia[0-9]*"))


def on_gpu(model: ModelConfig) -> bool:
    """Whether this node's workers compute on GPUs; for what is not a worker but keeps KV of theirs."""
    return model.device == "cuda" or (model.device == "auto" and node_has_gpu())


def device_name(device: torch.device, cuda: Any = torch.cuda) -> str:
    """For people: "cpu", or "cuda:0 (NVIDIA H200)"."""
    return "cpu" if device.type == "cpu" else f"{device} ({cuda.get_device_name(device)})"
