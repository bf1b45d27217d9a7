"""One request on a prefill worker, and the numbers that a worker is given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kv_transfer.sender import OutgoingHandoff
from tandem.errors import TandemError
from tandem.model.choice import Choice
from tandem.prefix_store.holdings import Loan
from tandem.rpc.tandem.v1 import worker_pb2
from tandem.types import Epoch, HandoffId, Request, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillLimits:
    """The scheduler's and the handoff's numbers; see `tandem.config`."""

    max_batch_tokens: int
    max_batch_sequences: int
    ticket_lookahead_tokens: int
    ageing_tokens_per_s: float
    lease_s: float
    max_resends: int
    max_iteration_s: float = 0.0
    """0: no limit."""
    layers_per_message: int = 0
    digest_every: int = 0
    min_gbps: float = 0.0
    strict: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a job's KV goes."""

    handoff_id: HandoffId
    worker_id: WorkerId
    address: str
    epoch: Epoch


@dataclass(kw_only=True, slots=True)
class Job:
    """One request on this worker. `events` ends with PrefillDone or an error."""

    request: Request
    target: Target | None
    choices: tuple[Choice, ...]
    """The engine's, while the job runs."""
    events: asyncio.Queue[worker_pb2.PrefillEvent | TandemError] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None
    handoff: OutgoingHandoff | None = None
    num_blocks_computed: int = 0
    num_chunks: int = 0
    num_companions: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    loan: Loan = field(default_factory=Loan)
    """What the store has made ready; given back when it is in the cache, or the job is over."""
    started_s: float = 0.0
    last_kv_s: float = 0.0
    ended_s: float = 0.0
    failed: bool = False
    over: bool = False
