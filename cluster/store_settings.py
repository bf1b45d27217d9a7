"""What a store's process is told, as JSON on its command line: nothing in it is secret."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tandem.config import ClusterConfig, from_mapping, to_mapping
from tandem.errors import ConfigError
from tandem.kv.layout import KvLayout
from tandem.prefix_store.settings import StoreSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHostSettings:
    """One store on one node."""

    config: ClusterConfig
    redis_url: str
    """Without a password: that is in the environment."""
    node: str
    """Names the store among others; one store per node."""
    host: str
    """Address to listen on, at which peers reach it."""
    store: StoreSettings
    disk_directory: str = ""
    """Where blocks outlive the process; empty goes without a disk tier. No other store may use it."""
    disk_bytes: int = 0
    """What the disk tier's files may take together."""
    tenant_share: float = 1.0
    """Of each tier: what a tenant without a quota of its own may hold."""
    tenant_quotas: Mapping[str, int] = field(default_factory=dict)
    """Blocks that a tenant may hold in each tier; others share what there is."""

    def __post_init__(self) -> None:
        if not self.node:
            raise ConfigError("a store needs its node's name", param="node")
        if self.disk_directory and self.disk_bytes <= 0:
            raise ConfigError("a disk tier needs a size", param="disk_bytes")

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({**asdict(self), "config": to_mapping(self.config)})

    @classmethod
    def from_json(cls, text: str) -> StoreHostSettings:
        """Inverse of `to_json`. Raises ConfigError."""
        values = json.loads(text)
        store = StoreSettings(**values.pop("store"))
        return cls(config=from_mapping(values.pop("config")), store=store, **values)


def block_bytes(layout: KvLayout) -> int:
    """Bytes of a block as the store holds it: all layers, one after another."""
    return layout.num_layers * layout.block_layer_bytes


def slots_in(num_bytes: int, size: int) -> int:
    """Blocks of `size` bytes that fit into a host tier of so many bytes. Raises ConfigError when not even one does."""
    if num_bytes < size:
        raise ConfigError(f"a host tier of {num_bytes} bytes holds no block of {size} bytes", param="host_bytes")
    return num_bytes // size
