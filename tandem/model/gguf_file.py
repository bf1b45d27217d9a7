"""Reads GGUF files: scalar metadata, the tensor table, and tensors as fp32 from a memory map.

The header is walked here because the gguf package's own reader builds an object per vocabulary entry, which takes
seconds; its table of block layouts is used as it is. Format: ggml's docs/gguf.md, versions 2 and 3. torch comes with
the first tensor: a router reads a header only, and starts without it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
from numpy.typing import NDArray

from tandem.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

Scalar = int | float | bool | str

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")
_ROWS_AT_ONCE = 256
"""Of a tensor of which only some columns are wanted: quantized blocks lie along rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One row of the tensor table. `shape` is outermost dimension first, as torch has it; `offset` is absolute."""

    name: str
    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class _Cursor:
    """A position in the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        result: int | float | bool = value
        return result

    def count(self) -> int:
        return int(self.scalar("<Q"))

    def string(self) -> str:
        size = self.count()
        raw = self.data[self.at : self.at + size]
        if len(raw) != size:
            raise struct.error("string past the end of the file")
        self.at += size
        return raw.decode("utf-8")

    def skip_array(self) -> None:
        kind, count = int(self.scalar("<I")), self.count()
        if kind in _SCALARS:
            self.at += count * struct.calcsize(_SCALARS[kind])
        elif kind == _STRING:
            data, at = self.data, self.at
            for _ in range(count):
                at += 8 + _U64.unpack_from(data, at)[0]
            self.at = at
        else:
            raise struct.error(f"array of unknown type {kind}")

    def value(self) -> Scalar | None:
        kind = int(self.scalar("<I"))
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            self.skip_array()
            return None
        raise struct.error(f"value of unknown type {kind}")


class GgufFile:
    """An open GGUF file. `metadata` holds scalars and strings; arrays are passed over."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError when the file is missing, truncated or no GGUF file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise ModelLoadError(f"{path}: cannot be opened: {exc}") from exc
        try:
            self._read_header()
        except (struct.error, OverflowError, UnicodeDecodeError) as exc:
            raise ModelLoadError(f"{path}: the GGUF header is truncated or damaged ({exc})") from exc

    def _read_header(self) -> None:
        cursor = _Cursor(self.data)
        if self.data[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file")
        cursor.at = 4
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        num_tensors, num_values = cursor.count(), cursor.count()
        self.metadata: dict[str, Scalar] = {}
        for _ in range(num_values):
            key, value = cursor.string(), cursor.value()
            if value is not None:
                self.metadata[key] = value
        rows = [self._read_row(cursor) for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        self.header_bytes = -(-cursor.at // alignment) * alignment
        self.tensors = {row[0]: self._tensor(*row) for row in rows}

    @staticmethod
    def _read_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        dims = [cursor.count() for _ in range(int(cursor.scalar("<I")))]
        return name, tuple(reversed(dims)), int(cursor.scalar("<I")), cursor.count()

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
        except ValueError as exc:
            raise ModelLoadError(f"{self.path}: tensor {name} has the unknown type {kind}") from exc
        block_size, type_size = gguf.GGML_QUANT_SIZES[quantization]
        num_elements = int(np.prod(shape, dtype=np.int64))
        start, num_bytes = self.header_bytes + offset, num_elements // block_size * type_size
        if not shape or shape[-1] % block_size:
            raise ModelLoadError(f"{self.path}: tensor {name} of shape {shape} cannot be {quantization.name}")
        if start + num_bytes > len(self.data):
            raise ModelLoadError(f"{self.path}: truncated: tensor {name} ends past the end of the file")
        return GgufTensor(name=name, shape=shape, quantization=quantization, offset=start, num_bytes=num_bytes)

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Tensor `name`, or `rows` of it, or `columns`, as fp32, a copy; no other row is read.

        Raises ModelLoadError when it is missing or its type is not supported.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.path}: tensor {name} is missing")
        rows = rows or range(tensor.shape[0])
        if columns is None:
            return self._rows(tensor, rows)
        import torch

        part = torch.empty(len(rows), len(columns))
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            part[start : start + len(some)] = self._rows(tensor, some)[:, columns.start : columns.stop]
        return part

    def _rows(self, tensor: GgufTensor, rows: range) -> torch.Tensor:
        from tandem.model.dequantize import dequantize

        row_bytes = tensor.num_bytes // tensor.shape[0]
        raw: NDArray[np.uint8] = np.frombuffer(
            self.data, np.uint8, len(rows) * row_bytes, tensor.offset + rows.start * row_bytes
        )
        try:
            return dequantize(raw, tensor.quantization, (len(rows), *tensor.shape[1:]))
        except NotImplementedError as exc:
            kind = tensor.quantization.name
            raise ModelLoadError(f"{self.path}: tensor {tensor.name} is {kind}, which cannot be dequantized") from exc
