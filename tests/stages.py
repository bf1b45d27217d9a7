"""The ranks of one worker as threads of this process: real process groups, real weights, each rank its own slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from tandem.kv.cache import KvCache
from tandem.kv.layout import Dtype
from tandem.model.collectives import GlooCollectives, open_store
from tandem.model.files import resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.parallel import ModelShard
from tandem.model.stage import Stage

T = TypeVar("T")
BLOCK_SIZE = 8


class Stages:
    """All ranks of a worker that is cut into `tp * pp`."""

    def __init__(self, source: str | Path, *, tp: int, pp: int, num_blocks: int = 64, dtype: Dtype = "float32") -> None:
        files = resolve_model(str(source))
        spec = load_spec(files)
        store = open_store("127.0.0.1", 0, is_master=True)
        self._threads = ThreadPoolExecutor(tp * pp)

        def make(rank: int) -> Stage:
            shard = ModelShard(spec=spec, tp=tp, pp=pp, rank=rank)
            client = store if rank == 0 else open_store("127.0.0.1", store.port, is_master=False)
            layout = shard.kv_layout(block_size=BLOCK_SIZE, dtype=dtype)
            slab = torch.full((layout.slab_bytes(num_blocks),), 0xFF, dtype=torch.uint8)
            sharding = shard.sharding(block_size=BLOCK_SIZE)
            cache = KvCache(layout, num_blocks, slab, sharding=sharding, rank=rank)
            weights = load_weights(files, spec, dtype, shard)
            others = GlooCollectives(client, shard, host="127.0.0.1") if tp * pp > 1 else None
            return Stage(shard, weights, cache, collectives=others)

        self.ranks = list(self._threads.map(make, range(tp * pp)))

    def on_all(self, call: Callable[[Stage], T]) -> Sequence[T]:
        """`call` on every rank at once."""
        return list(self._threads.map(call, self.ranks))

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._threads.shutdown)
            for rank in self.ranks:
                if rank.collectives is not None:
                    rank.collectives.close()
