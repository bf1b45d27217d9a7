"""A rank of a prefill worker other than 0, as whoever starts processes sees it."""

from __future__ import annotations

import os
from typing import Any

from kv_transfer.digest import DigestPolicy
from kv_transfer.links import LinkTable
from kv_transfer.rank_loop import RankLoop
from kv_transfer.rank_process import RankParts, RankProcess, RankSettings, exit_with_rank
from kv_transfer.source_rank import SourceRank
from kv_transfer.source_side import SourceSide
from tandem.types import Role


def make_part(parts: RankParts) -> SourceRank:
    """Its halves of handoffs: it sends."""
    transfer = parts.settings.config.transfer
    links = LinkTable(parts.transport, min_gbps=transfer.min_gbps, strict=transfer.strict)
    side = SourceSide(cache=parts.loaded.stage.cache, links=links, digests=DigestPolicy(transfer.digest_every))
    loop = RankLoop(parts.channel, on_crash=parts.on_crash)
    return SourceRank(side, key=parts.settings.key, loop=loop, enqueue=parts.enqueue)


class PrefillRank:
    """`values`: see `RankSettings`. The constructor only starts a thread."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._process = RankProcess(
            RankSettings.from_mapping(values), Role.PREFILL, make_part, on_end=exit_with_rank
        )

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def join(self) -> None:
        """Waits for the end."""
        self._process.join()
