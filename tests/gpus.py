"""Real GPUs for the tests marked `gpu`; all others see none (`tests/conftest.py`)."""

from __future__ import annotations

import pytest
import torch


def need_gpus(count: int = 1) -> list[torch.device]:
    """So many; skips the test where there are fewer."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA device{'s' if count > 1 else ''}, and pytest -m gpu")
    return [torch.device("cuda", index) for index in range(count)]
