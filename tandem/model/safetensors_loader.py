"""Llama models from Hugging Face directories: config.json, one or several safetensors files, their index."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.errors import ModelLoadError
from tandem.model.digest import Span, sampled_digest
from tandem.model.rope import inverse_frequencies, llama3_scaled
from tandem.model.sources import read_json
from tandem.model.spec import ModelSpec
from tandem.model.weights import Weights, assemble


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
    """A Llama model in a Hugging Face directory, opened but not read."""

    def __init__(self, weights: tuple[Path, ...], name: str) -> None:
        """Raises ModelLoadError when a file is damaged or the model is of another kind."""
        self._directory = weights[0].parent
        self._config_path = self._directory / "config.json"
        self._config = read_json(self._config_path)
        self._check_supported()
        headers = [_header(path) for path in weights]
        self._where = {key: path for path, header in zip(weights, headers, strict=True) for key in header[2]}
        digest = sampled_digest([header[:2] for header in headers], extra=self._config_path.read_bytes())
        self._scaling = self._rope_parameters()
        self.spec = self._read_spec(name, digest)

    def _unsupported(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._config_path}: {what} is not supported")

    def _check_supported(self) -> None:
        config = self._config
        if config.get("model_type") != "llama":
            raise self._unsupported(f"model_type {config.get('model_type')!r} (llama is), it")
        for flag in ("attention_bias", "mlp_bias", "quantization_config"):
            if config.get(flag):
                raise self._unsupported(flag)
        if config.get("hidden_act", "silu") != "silu":
            raise self._unsupported(f"hidden_act {config['hidden_act']!r}")

    def _rope_parameters(self) -> Mapping[str, Any]:
        """Scaling and theta, from where transformers 5 (`rope_parameters`) or 4 (`rope_scaling`) writes them."""
        found = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        kind = found.get("rope_type", found.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise self._unsupported(f"rope scaling {kind!r}")
        return {**found, "rope_type": kind}

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int):
            raise ModelLoadError(f"{self._config_path}: {key} must be a whole number, got {value!r}")
        return value

    def _eos_token_ids(self) -> tuple[int, ...]:
        path = self._directory / "generation_config.json"
        found = read_json(path).get("eos_token_id") if path.exists() else None
        found = self._config.get("eos_token_id") if found is None else found
        ids = found if isinstance(found, list) else [] if found is None else [found]
        return tuple(sorted({int(i) for i in ids}))

    def _read_spec(self, name: str, digest: str) -> ModelSpec:
        hidden, heads = self._int("hidden_size"), self._int("num_attention_heads")
        theta = self._scaling.get("rope_theta", self._config.get("rope_theta", 10000.0))
        return ModelSpec(
            name=name,
            num_layers=self._int("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=self._int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self._int("num_key_value_heads", heads),
            head_dim=self._int("head_dim", hidden // heads),
            vocab_size=self._int("vocab_size"),
            max_context_tokens=self._int("max_position_embeddings"),
            rms_norm_eps=float(self._config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            tie_word_embeddings=bool(self._config.get("tie_word_embeddings", False)),
            eos_token_ids=self._eos_token_ids(),
            weights_digest=digest,
        )

    def _read(self, name: str) -> torch.Tensor:
        path = self._where.get(name)
        if path is None:
            raise ModelLoadError(f"{self._directory}: tensor {name} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as exc:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {exc}") from exc
        return tensor

    def _frequencies(self) -> torch.Tensor:
        plain = inverse_frequencies(self.spec.head_dim, self.spec.rope_theta)
        if self._scaling["rope_type"] == "default":
            return plain
        try:
            return llama3_scaled(plain, self._scaling)
        except KeyError as exc:
            raise ModelLoadError(f"{self._config_path}: llama3 rope scaling lacks {exc}") from exc

    def load(self, dtype: torch.dtype) -> Weights:
        """Reads everything. Raises ModelLoadError naming file and tensor."""
        origin = str(self._directory)
        return assemble(self.spec, self._read, dtype=dtype, inverse_frequencies=self._frequencies(), origin=origin)
