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
from tandem.model.choice import Choice
from tandem.model.collectives import GlooCollectives, open_store
from tandem.model.executor import Scoring, SequenceSlice
from tandem.model.files import resolve_model
from tandem.model.loader import load_spec, load_weights
from tandem.model.parallel import ModelShard
from tandem.model.stage import Stage
from tandem.types import BlockId, SamplingParams

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


SOMEONE = (Choice(SamplingParams(max_tokens=1)),)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def batches() -> list[list[SequenceSlice]]:
    """Two prompts, one in two chunks and scored, then a token of each."""
    one, two = [BlockId(b) for b in (9, 3, 4, 17, 5, 6, 7, 8)], [BlockId(b) for b in (12, 11, 13, 2)]
    long, short = tokens(60, 1), tokens(19, 2)
    scoring = Scoring(targets=long[1:33], num_top=2)
    return [
        [
            SequenceSlice(token_ids=long[:32], num_computed=0, block_ids=one, scoring=scoring),
            SequenceSlice(token_ids=short, num_computed=0, block_ids=two, choices=SOMEONE),
        ],
        [SequenceSlice(token_ids=long[32:], num_computed=32, block_ids=one, choices=SOMEONE)],
        [
            SequenceSlice(token_ids=[7], num_computed=60, block_ids=one, choices=SOMEONE),
            SequenceSlice(token_ids=[8], num_computed=19, block_ids=two, choices=SOMEONE),
        ],
    ]


def logits_of(model: str | Path, *, tp: int, pp: int, dtype: Dtype = "float32") -> list[torch.Tensor]:
    """Rank 0's, of all batches; the other ranks must have none."""
    with Stages(model, tp=tp, pp=pp, dtype=dtype) as stages:
        per_rank = stages.on_all(lambda stage: [x.clone() for batch in batches() for x in stage.run(batch)])
    assert not any(len(x) for others in per_rank[1:] for x in others)
    return list(per_rank[0])
