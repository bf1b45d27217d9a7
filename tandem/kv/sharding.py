"""How a worker of several ranks cuts the model's KV: layers by pipeline stage, KV heads by tensor rank. Pure.

With more tensor ranks than KV heads, several hold the same head. Layers and heads are numbered as the model has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank holds of the model's KV."""

    rank: int
    layers: range
    heads: range


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a worker of `tp * pp` ranks is cut. Rank `stage * tp + i` is TP rank i of a PP stage."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or (self.num_kv_heads % self.tp and self.tp % self.num_kv_heads):
            bound = f"divide {self.num_kv_heads} KV heads or be a multiple of them"
            raise ConfigError(f"tensor_parallel must {bound}, got {self.tp}")
        if not 1 <= self.pp <= self.num_layers:
            raise ConfigError(f"pipeline_parallel must be 1 to the {self.num_layers} layers, got {self.pp}")

    @property
    def num_ranks(self) -> int:
        """Processes of the worker."""
        return self.tp * self.pp

    @property
    def num_replicas(self) -> int:
        """TP ranks that hold the same heads."""
        return max(1, self.tp // self.num_kv_heads)

    def shards(self) -> list[Shard]:
        """Of all ranks, in order."""
        return [self.shard(rank) for rank in range(self.num_ranks)]

    def shard(self, rank: int) -> Shard:
        """Of one rank."""
        stage, index = divmod(rank, self.tp)
        first, end = (s * self.num_layers // self.pp for s in (stage, stage + 1))
        heads_each = max(1, self.num_kv_heads // self.tp)
        head = index // self.num_replicas * heads_each
        return Shard(rank=rank, layers=range(first, end), heads=range(head, head + heads_each))
