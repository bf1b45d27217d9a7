"""What the controller's process is told, as JSON on its command line: nothing in it is secret."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config import ClusterConfig, from_mapping, to_mapping
from tandem.types import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    """One controller. `classes` are the workers' classes as "module:Class"."""

    config: ClusterConfig
    redis_url: str
    """Without a password: that is in the environment."""
    ray_address: str
    """host:port of Ray's head; its node must be on this machine."""
    worker_host: str
    """Address that workers bind to; empty takes that of each one's node."""
    classes: Mapping[Role, str]
    holder: str
    """Names this controller and its successors in the lease."""
    sizes_file: str = ""
    """A file with the sizes of the pools; see `sizes_file.py`. Empty: none."""
    metrics_host: str = "127.0.0.1"
    """Where /metrics is served, on config.controller_metrics_port."""

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "config": to_mapping(self.config),
                "redis_url": self.redis_url,
                "ray_address": self.ray_address,
                "worker_host": self.worker_host,
                "classes": {str(role): path for role, path in self.classes.items()},
                "holder": self.holder,
                "sizes_file": self.sizes_file,
                "metrics_host": self.metrics_host,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> ProcessSettings:
        """Inverse of `to_json`. Raises ConfigError."""
        values = json.loads(text)
        classes = {Role(role): path for role, path in values.pop("classes").items()}
        return cls(config=from_mapping(values.pop("config")), classes=classes, **values)
