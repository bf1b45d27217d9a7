"""Where a process has the cluster's key from: its environment, else a file. Never Redis and never a command line.

Redis is left out on purpose: many may read it, and what its readers know is no secret from them. Arguments are left
out because every user of a host sees them. A parent hands the key to its children in their environment.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from urllib.parse import quote

from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.secret import KEY_BYTES, ClusterKey

logger = logging.getLogger(__name__)

KEY_VARIABLE = "TANDEM_CLUSTER_KEY"
"""Hex digits; wins over every file."""


def load_key(config: ClusterConfig) -> ClusterKey:
    """The key of a cluster that runs already. Raises ConfigError when this process was given none."""
    key = given_key(config)
    if key is None:
        raise ConfigError(
            f"no cluster key: set {KEY_VARIABLE} or security.key_file to that of cluster {config.cluster} "
            f"(a cluster of several nodes keeps it at {default_path(config)} on its head)",
            param="security.key_file",
        )
    return key


def given_key(config: ClusterConfig) -> ClusterKey | None:
    """The key from the environment, from `security.key_file`, or from the default file; None without any."""
    if text := os.environ.get(KEY_VARIABLE):
        return ClusterKey.from_hex(text)
    if config.security.key_file:
        return _read(Path(config.security.key_file))
    path = default_path(config)
    return _read(path) if path.exists() else None


def provide_key(config: ClusterConfig, *, kept: bool) -> ClusterKey:
    """For whoever starts a cluster: the given key, else a new one; handed to every child from here on.

    With `kept` a new key is written to the default file, so that nodes, more routers and a head that is started again
    can have it. Without, it lives as long as the cluster and in its processes only.
    """
    key = given_key(config) if kept or _is_given(config) else None
    if key is None:
        key = ClusterKey(secrets.token_bytes(KEY_BYTES))
        if kept:
            _write(default_path(config), key)
    hand_down(key)
    return key


def hand_down(key: ClusterKey) -> None:
    """Children of this process get the key in their environment."""
    os.environ[KEY_VARIABLE] = key.to_hex()


def default_path(config: ClusterConfig) -> Path:
    """Where the key of a cluster of several nodes is kept on a host."""
    base = os.environ.get("XDG_CONFIG_HOME")
    directory = Path(base) if base else Path.home() / ".config"
    return directory / "tandem" / f"{quote(config.cluster, safe='')}.key"


def _is_given(config: ClusterConfig) -> bool:
    return bool(os.environ.get(KEY_VARIABLE) or config.security.key_file)


def _read(path: Path) -> ClusterKey:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the cluster key {path} cannot be read: {exc}", param="security.key_file") from exc
    return ClusterKey.from_hex(text)


def _write(path: Path, key: ClusterKey) -> None:
    """Readable by this user alone. Another process that was quicker is not overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(key.to_hex() + "\n")
    logger.info("the cluster's key is kept at %s; nodes on other hosts need a copy", path)
