"""The engine's own kernels in C, where they were built: `kernels()` gives them or says why torch does the work.

They are built when Tandem is installed, for every instruction set at once, and choose one when they are loaded. Owns
no tensor: callers pass addresses, and answer for types, shapes and strides. `TANDEM_KERNELS=torch` leaves them out,
`base` takes those for any processor, `avx2` those for one without AVX-512.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from typing import Protocol

from tandem.errors import ConfigError

VARIABLE = "TANDEM_KERNELS"
CHOICES = ("torch", "base", "avx2")
"""Its values; where it is not set, the best ones are taken."""
_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """`_kernels` of `module.c`. Addresses are `data_ptr()`s, 0 where nothing is there; sizes in elements."""

    ISA: str
    """Instruction set that was chosen."""
    VECTOR_WIDTH: int
    """fp32 numbers in a vector; a panel of a packed matrix is two vectors wide."""
    LAYER_BYTES: int
    """Of `struct layer`."""

    def pack(self, *arguments: int) -> None:
        """Weight, row stride, column stride, packed, k, n, bf16, gated."""

    def matmul(self, *arguments: int) -> None:
        """x, its row stride, packed, bias, residual, out, m, k, n, bf16, activation, threads."""

    def attend(self, *arguments: float) -> None:
        """Query, stride, cache, output, slices, tables, numbers and sizes, scale, softcap, window, bf16, threads."""

    def rms_norm(self, *arguments: float) -> None:
        """x, weight, out, rows, size, eps, threads."""

    def place(self, *arguments: float) -> None:
        """Heads, tables, norms, cache, rows, numbers and sizes, eps, threads."""

    def run_layers(self, *arguments: float) -> None:
        """The step (see `step_floats`), the layers' table, first, end, halves: 1 until K and V are written, 2 after."""

    def step_floats(self, *arguments: float) -> int:
        """x, work, positions, rows, slices, tables, numbers and sizes, eps, threads: how many floats `work` needs."""

    def move(self, pieces: int, num_pieces: int, digesting: bool, /) -> int:
        """Copies int64 `[num_pieces, 3]`: target (0: none), source, bytes; their digest, if over 240 bytes, or 0."""


def check_choice() -> None:
    """Raises ConfigError for a value of $TANDEM_KERNELS that means nothing."""
    wanted = os.environ.get(VARIABLE)
    if wanted and wanted not in CHOICES:
        raise ConfigError(f"{VARIABLE} must be {', '.join(CHOICES)} or not set, got {wanted!r}", param=VARIABLE)


@cache
def _loaded() -> Kernels | str:
    check_choice()
    if os.environ.get(VARIABLE) == "torch":
        return f"{VARIABLE}=torch"
    try:
        module: Kernels = importlib.import_module("tandem.model.native._kernels")
    except ImportError as exc:
        _log.warning("no kernels of our own (%s): torch does their work, more slowly; see `tandem doctor`", exc)
        return str(exc)
    return module


def kernels() -> Kernels | None:
    """The kernels; None where they were not built or are switched off. Says so in the log, once.

    Raises ConfigError for a choice that there is not.
    """
    found = _loaded()
    return None if isinstance(found, str) else found


def why_missing() -> str | None:
    """Why there are none."""
    found = _loaded()
    return found if isinstance(found, str) else None
