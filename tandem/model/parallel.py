"""How a model is cut over the ranks of a worker, and which numbers and weights one rank has of it. Pure.

Tensor parallelism (Shoeybi et al., arXiv:1909.08053): projections into a block are cut by columns, those out of it by
rows, so that a block sums over ranks twice: after attention and after the MLP. Attention is cut between KV heads, and
heads are held several times where there are more ranks than heads. Experts are not cut: each rank has some of them.
Embedding and output matrix are cut by vocabulary.
Pipeline stages are runs of layers; the first has the embedding, the last the output matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.errors import ConfigError
from tandem.kv.layout import Dtype, KvLayout
from tandem.kv.sharding import Sharding
from tandem.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShard:
    """Rank `rank` of a worker of `tp * pp` ranks; ranks are numbered as in `Sharding`.

    Raises ConfigError, naming the number that does not divide, for a model that cannot be cut so.
    """

    spec: ModelSpec
    tp: int = 1
    pp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        spec = self.spec
        sizes = [("attention heads", spec.num_heads)]
        if not all(layer.has_experts for layer in spec.layers):
            sizes.append(("channels of its MLP", spec.intermediate_size))
        if spec.experts is not None:
            sizes.append(("experts", spec.experts.num_experts))
        for name, size in sizes:
            if size % self.tp:
                raise ConfigError(f"{spec.name} has {size} {name}: tensor_parallel must divide that, got {self.tp}")
        self.sharding(block_size=1)
        assert 0 <= self.rank < self.tp * self.pp

    def sharding(self, *, block_size: int) -> Sharding:
        """Of the whole worker's KV. Raises ConfigError."""
        return Sharding(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            block_size=block_size,
            tp=self.tp,
            pp=self.pp,
        )

    @property
    def stage(self) -> int:
        """Pipeline stage."""
        return self.rank // self.tp

    @property
    def index(self) -> int:
        """Place among the tensor ranks of the stage."""
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes logits."""
        return self.stage == self.pp - 1

    @property
    def layers(self) -> range:
        """Layers of this stage."""
        return self.sharding(block_size=1).shard(self.rank).layers

    @property
    def kv_heads(self) -> range:
        """KV heads here."""
        return self.sharding(block_size=1).shard(self.rank).heads

    def cut(self, size: int) -> range:
        """This rank's part of `size` things that come in equal parts, as far as that goes: the last may be smaller."""
        each = -(-size // self.tp)
        return range(min(size, self.index * each), min(size, (self.index + 1) * each))

    @property
    def vocabulary(self) -> range:
        """Token ids whose rows of embedding and output matrix are here."""
        return self.cut(self.spec.vocab_size)

    @property
    def experts(self) -> range:
        """Experts that are here, in each layer that has some."""
        return self.cut(0 if self.spec.experts is None else self.spec.experts.num_experts)

    @property
    def local(self) -> ModelSpec:
        """The model as this rank computes it: its layers, heads and channels only."""
        return replace(
            self.spec,
            num_layers=len(self.layers),
            layers=self.spec.layers[self.layers.start : self.layers.stop],
            num_heads=self.spec.num_heads // self.tp,
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.spec.intermediate_size // self.tp,
        )

    def kv_layout(self, *, block_size: int, dtype: Dtype) -> KvLayout:
        """Of this rank's cache."""
        return self.local.kv_layout(block_size=block_size, dtype=dtype)
