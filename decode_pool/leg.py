"""One request on a decode worker, from its leg's first word to the last token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kv_transfer.incoming import IncomingHandoff
from tandem.errors import TandemError
from tandem.model.choice import Choice
from tandem.rpc.tandem.v1 import common_pb2, worker_pb2
from tandem.types import HandoffId, Request


@dataclass(kw_only=True, slots=True)
class Leg:
    """One request on this worker. `events` ends with DecodeDone or an error."""

    request: Request
    handoff_id: HandoffId
    choices: tuple[Choice, ...]
    """The engine's once KV and first tokens are here."""
    ended_choices: set[int] = field(default_factory=set)
    """What the router wants no more of; guarded by the engine's lock."""
    events: asyncio.Queue[worker_pb2.DecodeEvent | TandemError] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None
    handoff: IncomingHandoff | None = None
    over: bool = False
    """No more events follow; the handoff may still hold blocks."""
    delivered_s: float = 0.0
    started_s: float = 0.0
    num_iterations: int = 0


def timings_of(leg: Leg) -> common_pb2.DecodeTimings:
    """What it took; empty for a leg that never ran."""
    if not leg.started_s:
        return common_pb2.DecodeTimings()
    return common_pb2.DecodeTimings(
        queue_s=leg.started_s - leg.delivered_s,
        decode_s=time.monotonic() - leg.started_s,
        num_iterations=leg.num_iterations,
    )
