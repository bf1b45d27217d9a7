"""Which prompt comes before which on a prefill worker, and for which tickets are due. Pure.

Shortest remaining first, with ageing: a prompt stands at `tokens left + ageing * (arrival + served)`, the lowest
first. This needs no clock, because all that wait age alike; one that is computed does not age, or the end of a long
prompt would stand before short ones. A prompt of n tokens is overtaken only by those that arrive before it has waited
`n / ageing` seconds, so nobody starves. A level of priority counts as `PRIORITY_S` seconds of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefill_pool.sequence import Phase, PrefillSequence
from tandem.types import RequestId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOrder:
    """`ageing_tokens_per_s`: how many tokens less a prompt counts for each second that it has waited longer."""

    ageing_tokens_per_s: float

    def standing(self, sequence: PrefillSequence) -> float:
        """The lower, the sooner; it changes while the prompt is computed, and otherwise for hits alone."""
        since_s = sequence.request.order_s + sequence.served_s
        return sequence.num_expected + self.ageing_tokens_per_s * since_s

    def sort(self, sequences: Iterable[PrefillSequence]) -> list[PrefillSequence]:
        """In order; equal ones as they came."""
        return sorted(sequences, key=self.standing)


def due_tickets(ordered: Iterable[PrefillSequence], lookahead_tokens: int) -> tuple[RequestId, ...]:
    """Queued prompts before which fewer than `lookahead_tokens` for the same decode worker stand in this order."""
    before: dict[WorkerId, int] = {}
    due = []
    for sequence in ordered:
        destination = sequence.destination
        if destination is None or sequence.phase is Phase.COMPUTED:
            continue
        ahead = before.get(destination, 0)
        before[destination] = ahead + sequence.num_expected
        if sequence.phase is Phase.QUEUED and ahead < lookahead_tokens:
            due.append(sequence.request.request_id)
    return tuple(due)
