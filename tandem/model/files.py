"""A model's files, with its tokenizer prepared once. `sources.py` finds them. Reads no weights.

A GGUF file holds a tokenizer in a form that takes seconds to convert; the result is kept in a cache directory
($TANDEM_CACHE, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem) under the hash of the file's header.
`python -m tandem.model.files [SOURCE]` does this ahead of time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from tandem.errors import ModelLoadError
from tandem.model.gguf_file import GgufFile
from tandem.model.sources import DEFAULT_MODEL, find_model

__all__ = ["DEFAULT_MODEL", "ModelFiles", "cache_dir", "resolve_model"]


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


def resolve_model(source: str) -> ModelFiles:
    """The files of a known model's name, a .gguf file, or a Hugging Face directory; prepares its tokenizer.

    Raises ModelLoadError that says what is missing and how to get it.
    """
    found = find_model(source)
    if found.kind == "gguf":
        return _gguf_files(found.weights[0], found.name)
    return ModelFiles(name=found.name, kind=found.kind, weights=found.weights, tokenizer_dir=found.directory)


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
