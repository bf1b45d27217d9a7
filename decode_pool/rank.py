"""A rank of a decode worker other than 0, as whoever starts processes sees it."""

from __future__ import annotations

import os
from typing import Any

from kv_transfer.destination_rank import DestinationRank
from kv_transfer.offer import TicketOffice
from kv_transfer.rank_loop import RankLoop
from kv_transfer.rank_process import RankParts, RankProcess, RankSettings, exit_with_rank
from kv_transfer.receiver import HandoffReceiver
from tandem.types import Epoch, Role


def make_part(parts: RankParts) -> DestinationRank:
    """Its halves of handoffs: it receives. Offers are rank 0's to take, so its own office takes none."""
    settings = parts.settings
    office = TicketOffice(settings.key, worker_id=settings.worker_id, epoch=Epoch(0))
    receiver = HandoffReceiver(cache=parts.loaded.stage.cache, transport=parts.transport, office=office)
    return DestinationRank(receiver, RankLoop(parts.channel, on_crash=parts.on_crash))


class DecodeRank:
    """`values`: see `RankSettings`. The constructor only starts a thread."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._process = RankProcess(RankSettings.from_mapping(values), Role.DECODE, make_part, on_end=exit_with_rank)

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def join(self) -> None:
        """Waits for the end."""
        self._process.join()
