"""One rank's share of a model in memory: its slices of the weights, its cache, its place among the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.config import ModelConfig
from tandem.kv.cache import KvCache
from tandem.model.collectives import join_ranks
from tandem.model.device_io import HOST as HOST_MEMORY
from tandem.model.files import resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.parallel import ModelShard
from tandem.model.stage import Stage

HOST = "127.0.0.1"
"""Ranks of one worker share a node, so nothing of theirs is to be reached from another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShape:
    """Which rank of how large a worker, and where it computes."""

    tp: int
    pp: int
    rank: int
    device: torch.device = HOST_MEMORY


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRank:
    """What `load_rank` made."""

    stage: Stage
    tokenizer_file: Path
    weights_bytes: int
    load_s: float


def load_rank(
    model: ModelConfig,
    shape: RankShape,
    *,
    num_blocks: int,
    num_threads: int,
    allocate: Callable[[int], torch.Tensor],
    meet: Callable[[], Any],
) -> LoadedRank:
    """Reads what this rank needs and no more, then waits for the others in the store that `meet` gives.

    Raises ModelLoadError; ConfigError when the model cannot be cut so; TransportError when the others do not come.
    """
    started_s = time.monotonic()
    torch.set_num_threads(num_threads)
    dtype = model.kv_dtype(on_gpu=shape.device.type != "cpu")
    files = resolve_model(model.source)
    spec = load_spec(files)
    shard = ModelShard(spec=spec, tp=shape.tp, pp=shape.pp, rank=shape.rank)
    layout = shard.kv_layout(block_size=model.block_size, dtype=dtype)
    sharding = shard.sharding(block_size=model.block_size)
    slab = allocate(layout.slab_bytes(num_blocks))
    cache = KvCache(layout, num_blocks, slab, sharding=sharding, rank=shape.rank)
    weights = load_weights(files, spec, dtype, shard, device=slab.device)
    load_s = time.monotonic() - started_s
    others = join_ranks(meet(), shard, slab.device, host=HOST)
    return LoadedRank(
        stage=Stage(shard, weights, cache, collectives=others),
        tokenizer_file=files.tokenizer_dir / "tokenizer.json",
        weights_bytes=weights.num_bytes,
        load_s=load_s,
    )
