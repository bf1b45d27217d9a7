"""What became of one simulated request, and when. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.types import Request, WorkerId


@dataclass(kw_only=True, slots=True)
class Life:
    """Times in seconds since the simulation's start; NaN for what did not happen."""

    request: Request
    num_prompt_tokens: int
    prefill: WorkerId | None = None
    decode: WorkerId | None = None
    """None for requests that end with their first token."""
    refused: str = ""
    """Why it was not taken."""
    prefill_started_s: float = math.nan
    prefill_ended_s: float = math.nan
    transfer_ended_s: float = math.nan
    """When the last message landed; NaN where nothing was sent."""
    first_token_s: float = math.nan
    newest_token_s: float = math.nan
    ended_s: float = math.nan
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    num_messages: int = 0
    num_sent_bytes: float = 0.0
    num_held_bytes: float = 0.0
    """What the decode worker held already, and was not sent."""

    @property
    def is_complete(self) -> bool:
        """Whether all its output came."""
        return not math.isnan(self.ended_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.request.arrival_s

    @property
    def queue_s(self) -> float:
        """From arrival to the first iteration with it."""
        return self.prefill_started_s - self.request.arrival_s

    @property
    def prefill_s(self) -> float:
        """From its first iteration to the end of its last one."""
        return self.prefill_ended_s - self.prefill_started_s

    @property
    def exposed_s(self) -> float:
        """End of transfer after the end of prefill."""
        if math.isnan(self.transfer_ended_s):
            return 0.0
        return max(0.0, self.transfer_ended_s - self.prefill_ended_s)

    @property
    def mean_tbt_s(self) -> float:
        """Mean time between tokens; 0 for a single token."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.newest_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    def token(self, now: float) -> float:
        """One more output token: the seconds since the one before it, NaN for the first."""
        gap_s = now - self.newest_token_s
        if not self.num_output_tokens:
            self.first_token_s = now
        self.num_output_tokens += 1
        self.newest_token_s = now
        return gap_s
