"""Which nodes are to have a prefix store, and of what size: the cluster's setting, or what a node's labels say. Pure.

A node without workers loses its store after a while. Its memory would serve nobody there, and an autoscaler takes only
nodes away on which nothing runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.config import PrefixStoreConfig
from tandem.errors import ConfigError

HOST_BYTES_LABEL = "tandem.dev/store-host-bytes"
DISK_BYTES_LABEL = "tandem.dev/store-disk-bytes"
"""Labels of a node, in place of `prefix_store.host_bytes` and `disk_bytes`; 0 goes without."""
IDLE_S = 60.0
"""So long a store stays on a node whose workers are gone: as long as others may take their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreNode:
    """A living node that can take workers."""

    node_id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    has_workers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreChanges:
    """What is to be done now."""

    starts: Mapping[str, PrefixStoreConfig]
    """By node: the settings of a store that is not there yet."""
    ends: tuple[str, ...]
    """Nodes that live, and whose stores are to end."""
    lost: tuple[str, ...]
    """Nodes that are gone, and whose stores are to be forgotten."""
    refusals: tuple[str, ...]
    """What is wrong with a node's labels, said once for each node."""


def config_of_node(wanted: PrefixStoreConfig, labels: Mapping[str, str]) -> PrefixStoreConfig | None:
    """The settings of one node's store; None for no store. Raises ConfigError, naming the label or the field."""
    host_bytes = _bytes(labels, HOST_BYTES_LABEL, wanted.host_bytes)
    disk_bytes = _bytes(labels, DISK_BYTES_LABEL, wanted.disk_bytes)
    if not host_bytes:
        return None
    disk_path = wanted.disk_path if disk_bytes else ""
    return replace(wanted, host_bytes=host_bytes, disk_bytes=disk_bytes, disk_path=disk_path)


def _bytes(labels: Mapping[str, str], label: str, default: int) -> int:
    text = labels.get(label)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"label {label} must be a number of bytes, got {text!r}", param=label)
    return int(text)


class StorePlan:
    """Remembers since when nodes are without workers."""

    def __init__(self, wanted: PrefixStoreConfig, *, idle_s: float = IDLE_S) -> None:
        self._wanted = wanted
        self._idle_s = idle_s
        self._idle_since: dict[str, float] = {}
        self._refused: set[str] = set()
        self._nodes: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()

    def changes(self, nodes: Sequence[StoreNode], present: Collection[str], now: float) -> StoreChanges:
        """`present` are the nodes that have a store; `now` is in seconds."""
        self._note(nodes, now)
        configs, refusals = self._configs(nodes)
        return StoreChanges(
            starts={node: config for node, config in configs.items() if node not in present},
            ends=tuple(sorted(node for node in self._nodes.intersection(present) if node not in configs)),
            lost=tuple(sorted(set(present) - self._nodes)),
            refusals=refusals,
        )

    def _note(self, nodes: Sequence[StoreNode], now: float) -> None:
        self._nodes = frozenset(node.node_id for node in nodes)
        self._idle_since = {
            node.node_id: self._idle_since.get(node.node_id, now) for node in nodes if not node.has_workers
        }
        self._refused &= self._nodes
        self._kept = frozenset(node for node in self._nodes if now - self._idle_since.get(node, now) < self._idle_s)

    def _configs(self, nodes: Sequence[StoreNode]) -> tuple[dict[str, PrefixStoreConfig], tuple[str, ...]]:
        configs, refusals = {}, []
        for node in nodes:
            try:
                config = config_of_node(self._wanted, node.labels)
            except ConfigError as exc:
                if node.node_id not in self._refused:
                    refusals.append(f"node {node.node_id[:8]} gets no prefix store: {exc.message}")
                self._refused.add(node.node_id)
                continue
            if config is not None and node.node_id in self._kept:
                configs[node.node_id] = config
        return configs, tuple(refusals)

    def check_invariants(self) -> None:
        """Nothing is remembered of nodes that are gone. Raises AssertionError."""
        assert self._idle_since.keys() <= self._nodes
        assert self._refused <= self._nodes
