"""Reads the cluster's configuration from a YAML or JSON file, and lays the command line's values over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.config import ClusterConfig, from_mapping, to_mapping
from tandem.errors import ConfigError
from tandem.redis_access import hide_password


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> ClusterConfig:
    """The file's configuration (defaults where there is none) with `overrides`, e.g. {"router.grpc_port": 0}, on top.

    Overrides that are None are left out. A password in the URL of Redis goes into the environment.
    Raises ConfigError naming the file, the key, the value and its bound.
    """
    config = ClusterConfig() if path is None else _read(path)
    values = to_mapping(config)
    for key, value in overrides.items():
        if value is not None:
            _set(values, key, value)
    values["registry"]["redis_url"] = hide_password(values["registry"]["redis_url"])
    return from_mapping(values)


def _read(path: Path) -> ClusterConfig:
    try:
        document = yaml.safe_load(path.read_text())  # JSON is YAML
    except OSError as exc:
        raise ConfigError(f"the configuration {path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the configuration {path} is not YAML or JSON: {_what(exc)}") from exc
    try:
        return from_mapping({} if document is None else document)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc.message}", param=exc.param) from exc


def fields_in(path: Path) -> frozenset[str]:
    """What the file says something about, as "router.grpc_port". Raises ConfigError as `load_config` does."""
    _read(path)
    document = yaml.safe_load(path.read_text()) or {}
    sections = {name: values if isinstance(values, dict) else None for name, values in document.items()}
    alone = {name for name, values in sections.items() if values is None}
    return frozenset(alone | {f"{name}.{key}" for name, values in sections.items() for key in values or ()})


def _what(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Where it stopped making sense, counted from 1, and why."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    why = ", ".join(part for part in (error.problem, error.context) if part)
    return f"line {mark.line + 1}, column {mark.column + 1}: {why}"


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values[section]
    values[name] = value
