"""What a simulation reads from files: a model's own description, and a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from cluster.simulator.cost_model import ModelCost, cost_of
from cluster.simulator.models import MODELS
from tandem.errors import ConfigError
from tandem.model.config_fields import ConfigFields
from tandem.model.families.family import Identity
from tandem.model.families.registry import read_config
from tandem.model.sources import DEFAULT_MODEL, read_json


def describe_model(source: str, *, value_bytes: int) -> ModelCost:
    """By name, or from a config.json (or the directory that holds it) or a .gguf file; weights are not read.

    Raises ConfigError or ModelLoadError.
    """
    if source in MODELS:
        return replace(MODELS[source], value_bytes=value_bytes)
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" and path.is_file():
        identity = Identity(name=path.resolve().parent.name, eos_token_ids=(), weights_digest="")
        _, spec = read_config(ConfigFields(read_json(path), path), identity)
        return cost_of(spec, value_bytes=value_bytes)
    if source == DEFAULT_MODEL or path.suffix == ".gguf":
        from tandem.model.files import resolve_model
        from tandem.model.loader import load_spec

        return cost_of(load_spec(resolve_model(source)), value_bytes=value_bytes)
    known = ", ".join((*MODELS, DEFAULT_MODEL))
    raise ConfigError(f"no model {source!r}: give a config.json, a .gguf file, or one of {known}", param="model")


def read_rows(path: Path, *, limit: int = 0) -> list[Mapping[str, Any]]:
    """The first `limit` requests (0: all) of a file with one JSON object a line. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return list(islice(_rows(path, lines), limit or None))
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"{path} cannot be read: {why}", param="trace") from exc


def _rows(path: Path, lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{path}, line {number} is not JSON: {exc}", param="trace") from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object", param="trace")
        yield row
