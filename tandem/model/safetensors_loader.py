"""Models from Hugging Face directories: config.json, one or several safetensors files, their index."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.errors import ModelLoadError
from tandem.model.assemble import Assembler, TensorSource, check_shape
from tandem.model.config_fields import ConfigFields
from tandem.model.device_io import HOST
from tandem.model.digest import Span, sampled_digest
from tandem.model.families.family import Identity
from tandem.model.families.registry import read_config
from tandem.model.parallel import ModelShard
from tandem.model.rope import rotary_frequencies
from tandem.model.sources import read_json
from tandem.model.weights import Weights


def _header(path: Path) -> tuple[memoryview, list[Span], dict[str, Any]]:
    """The mapped file, the spans that identify it, and its table of tensors."""
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        size = int.from_bytes(data[:8], "little")
        table = json.loads(bytes(data[8 : 8 + size]))
        table.pop("__metadata__", None)
        offsets = [row["data_offsets"] for row in table.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{path}: not a safetensors file, or truncated ({exc})") from exc
    spans = [Span(0, 8 + size)]
    for start, end in offsets:
        if 8 + size + end > len(data):
            raise ModelLoadError(f"{path}: truncated: a tensor ends past the end of the file")
        spans.extend(Span.ends_of(8 + size + start, end - start))
    return data, spans, table


class SafetensorsModel:
    """A model in a Hugging Face directory, opened but not read."""

    def __init__(self, weights: tuple[Path, ...], name: str) -> None:
        """Raises ModelLoadError when a file is damaged or the model is of a kind that is not supported."""
        self._directory = weights[0].parent
        path = self._directory / "config.json"
        config = ConfigFields(read_json(path), path)
        headers = [_header(path) for path in weights]
        self._where = {key: path for path, header in zip(weights, headers, strict=True) for key in header[2]}
        identity = Identity(
            name=name,
            eos_token_ids=self._eos_token_ids(config),
            weights_digest=sampled_digest([header[:2] for header in headers], extra=path.read_bytes()),
        )
        family, spec = read_config(config, identity)
        self._family, self.spec = family, spec

    def _eos_token_ids(self, config: ConfigFields) -> tuple[int, ...]:
        path = self._directory / "generation_config.json"
        own = config.value("eos_token_id")
        found = read_json(path).get("eos_token_id") if path.exists() else None
        found = own if found is None else found
        ids = found if isinstance(found, list) else [] if found is None else [found]
        return tuple(sorted({int(i) for i in ids}))

    def _read(
        self, name: str, shape: tuple[int, ...], *, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """See `Reader`."""
        path = self._where.get(name)
        if path is None:
            raise ModelLoadError(f"{self._directory}: tensor {name} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(name)
                check_shape(self._directory, name, part.get_shape(), shape)
                tensor: torch.Tensor = part[_slices(rows, columns)]
        except (OSError, SafetensorError) as exc:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {exc}") from exc
        return tensor

    def load(self, dtype: torch.dtype, shard: ModelShard, device: torch.device = HOST) -> Weights:
        """Reads what a rank needs. Raises ModelLoadError naming file and tensor."""
        source = TensorSource(read=self._read, names=self._family.names)
        frequencies = tuple(rotary_frequencies(rope, self.spec.head_dim) for rope in self.spec.ropes)
        return Assembler(shard, source, dtype, device=device).weights(frequencies)


def _slices(rows: range | None, columns: range | None) -> slice | tuple[slice, slice]:
    taken = slice(None) if rows is None else slice(rows.start, rows.stop)
    return taken if columns is None else (taken, slice(columns.start, columns.stop))
