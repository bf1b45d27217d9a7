"""What a prompt gets from the node's store: asks how much there is, decides how much to take, and has it made ready.

The decision is `tandem/kv/tiering.py`'s; here are its measurements. A loan that comes is in the host tier: bringing it
into the cache is `tandem/worker/layer_loads.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tandem.kv.tiering import LOADED_FROM, LoadPlan, Prefix, Tier, TierGauge, plan_load
from tandem.prefix_store.client import StoreClient
from tandem.prefix_store.holdings import Loan
from tandem.types import BlockHash

_PATIENCE = 3.0
"""A load may take so many times what was expected of it."""
_LEAST_S = 0.25
_UNKNOWN_S_PER_TOKEN = 1.0
"""Computing a token, before the first was computed: anything is tried."""


class PrefixFetcher:
    """One prefill worker's. Event loop only."""

    def __init__(self, client: StoreClient, *, block_bytes: int, block_size: int) -> None:
        self.num_asked = 0
        self.num_loans = 0
        self._client = client
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._host = TierGauge()
        self._in_use = frozenset(LOADED_FROM)

    async def fetch(
        self, names: Sequence[BlockHash], *, num_here: int, compute_s_per_token: float, tenant: str, left_s: float
    ) -> Loan:
        """A loan of leading blocks, of which the first `num_here` are not needed; empty when computing is as quick.

        `left_s`: seconds until the request's deadline.
        """
        self.num_asked += 1
        found = await self._client.lookup(names)
        prefix = Prefix(
            block_bytes=self._block_bytes,
            block_tokens=self._block_size,
            compute_s_per_token=compute_s_per_token or _UNKNOWN_S_PER_TOKEN,
            found=found.counts(),
            num_present=num_here,
        )
        speeds = {**found.speeds, Tier.HOST: self._host.speed(time.monotonic())}
        plan = plan_load(prefix, speeds, in_use=self._in_use)
        if plan.num_blocks <= num_here:
            return Loan()
        self._in_use = frozenset(LOADED_FROM[: LOADED_FROM.index(plan.last_tier) + 1])
        timeout_s = min(left_s, self._patience_s(plan))
        loan = await self._client.acquire(names[: plan.num_blocks], tenant=tenant, timeout_s=max(0.0, timeout_s))
        self.num_loans += bool(loan.slots)
        return loan

    def _patience_s(self, plan: LoadPlan) -> float:
        """No longer than computing would have taken, but a little in any case."""
        return max(_LEAST_S, min(_PATIENCE * plan.load_s, plan.saved_s) if plan.load_s else plan.saved_s)

    def copied(self, num_blocks: int, seconds: float) -> None:
        """So many blocks came from the host tier into the cache."""
        self._host.observe(num_blocks * self._block_bytes, seconds, time.monotonic())
