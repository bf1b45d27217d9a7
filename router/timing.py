"""When one request's tokens came, and what follows from that: TTFT, time between tokens, percentiles."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from router.dispatch import DispatchResult
from tandem.rpc.tandem.v1 import inference_pb2


class TokenClock:
    """Arrival times at the router, in seconds on its monotonic clock."""

    def __init__(self, *, arrival_s: float, tokenized_s: float) -> None:
        self._arrival_s = arrival_s
        self._tokenized_s = tokenized_s
        self._first_s: float | None = None
        self._last_s = arrival_s
        self._last_of: dict[int, float] = {}
        """When each choice's newest token came."""
        self._gaps_s = array("d")
        self.num_tokens = 0
        """Tokens so far, of all choices."""

    def tick(self, now: float, *, choice: int = 0) -> None:
        """A token of a choice came."""
        if choice in self._last_of:
            self._gaps_s.append(now - self._last_of[choice])
        self._last_of[choice] = self._last_s = now
        self._first_s = now if self._first_s is None else self._first_s
        self.num_tokens += 1

    def ttft_s(self) -> float | None:
        """From arrival to the first token; None before it."""
        return None if self._first_s is None else self._first_s - self._arrival_s

    def gaps_s(self) -> list[float]:
        """Between neighbouring tokens of one choice, in order."""
        return list(self._gaps_s)

    def elapsed_s(self, now: float) -> float:
        """From arrival to `now`."""
        return now - self._arrival_s

    def timings(self, result: DispatchResult) -> inference_pb2.RequestTimings:
        """The timeline of an ended request."""
        gaps = sorted(self.gaps_s())
        return inference_pb2.RequestTimings(
            ttft_s=self.ttft_s() or 0.0,
            tbt_p50_s=percentile(gaps, 0.50),
            tbt_p99_s=percentile(gaps, 0.99),
            total_s=self._last_s - self._arrival_s,
            tokenize_s=self._tokenized_s - self._arrival_s,
            prefill=result.prefill,
            decode=result.decode,
            prefill_worker=result.prefill_worker,
            decode_worker=result.decode_worker or "",
        )


def percentile(ascending: Sequence[float], fraction: float) -> float:
    """Nearest-rank percentile; 0 of nothing."""
    if not ascending:
        return 0.0
    rank = -(-fraction * len(ascending) // 1)
    return ascending[max(0, int(rank) - 1)]
