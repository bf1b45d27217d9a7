"""Which bytes go from which rank to which when the two workers are cut differently. Pure.

KV is addressed by (layer, KV heads, tokens). A worker of TP x PP ranks cuts layers by PP stage and heads by TP rank;
with more TP ranks than heads, several hold the same head. Every destination rank gets each of its (layer, head, token)
once, from one rank that has it, and none of the tokens that it holds already. Per layer a block is
[2 (K, V), heads, tokens, head_dim], so a head range of a block is one slice for K and one for V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.kv.sharding import Shard, Sharding
from tandem.types import BlockId


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """What one source rank has of what one destination rank takes; two ranks share one lane, or none."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range


def only_lane(num_layers: int, num_kv_heads: int) -> Lane:
    """Between two workers of one rank each."""
    return Lane(source_rank=0, destination_rank=0, layers=range(num_layers), heads=range(num_kv_heads))


def lanes(source: Sharding, destination: Sharding) -> list[Lane]:
    """All lanes between two workers, by destination rank, then source rank.

    Every (layer, head) of every destination rank is in exactly one of its lanes. Raises ConfigError when the two are
    not of one model.
    """
    if (source.num_layers, source.num_kv_heads) != (destination.num_layers, destination.num_kv_heads):
        raise ConfigError("source and destination have different numbers of layers or KV heads")
    givers = source.shards()
    found = []
    for taker in destination.shards():
        for giver in givers:
            layers, heads = common(giver.layers, taker.layers), common(giver.heads, taker.heads)
            if layers and heads and _is_chosen(giver, taker, source):
                found.append(
                    Lane(source_rank=giver.rank, destination_rank=taker.rank, layers=layers, heads=heads)
                )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One piece of work: all numbers are the model's, not a rank's own."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range
    tokens: range


def plan_copies(
    source: Sharding, destination: Sharding, *, num_tokens: int, held_tokens: Sequence[int] = ()
) -> list[Copy]:
    """What must be copied. `held_tokens`: leading tokens that each destination rank has already (default: none).

    The number of copies depends on how the two are cut, never on tokens or blocks. Raises ConfigError when the two are
    not of one model.
    """
    copies = []
    for lane in lanes(source, destination):
        held = held_tokens[lane.destination_rank] if held_tokens else 0
        if held < num_tokens:
            copies.append(
                Copy(
                    source_rank=lane.source_rank,
                    destination_rank=lane.destination_rank,
                    layers=lane.layers,
                    heads=lane.heads,
                    tokens=range(held, num_tokens),
                )
            )
    return copies


def common(one: range, other: range) -> range:
    """What lies in both."""
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))


def _is_chosen(giver: Shard, taker: Shard, source: Sharding) -> bool:
    """Of the ranks that hold the same heads, takers use different ones, so that each has its share of the work."""
    return giver.rank % source.tp % source.num_replicas == taker.rank % source.num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """`num_tokens` tokens that lie in one block on each side, at these offsets in it."""

    source_block: BlockId
    source_offset: int
    destination_block: BlockId
    destination_offset: int
    num_tokens: int


def pieces(
    tokens: range,
    source: Sharding,
    destination: Sharding,
    *,
    source_blocks: Sequence[BlockId],
    destination_blocks: Sequence[BlockId],
) -> Iterator[Piece]:
    """Where a copy's tokens lie on both sides; the sizes of blocks may differ. Tables are of the whole prompt."""
    token = tokens.start
    while token < tokens.stop:
        source_index, source_offset = divmod(token, source.block_size)
        destination_index, destination_offset = divmod(token, destination.block_size)
        count = min(
            tokens.stop - token, source.block_size - source_offset, destination.block_size - destination_offset
        )
        yield Piece(
            source_block=source_blocks[source_index],
            source_offset=source_offset,
            destination_block=destination_blocks[destination_index],
            destination_offset=destination_offset,
            num_tokens=count,
        )
        token += count
