"""What each client of the store holds: loans it reads, grants it writes; and when that ends without its word.

A client that falls silent loses its loans after a lease: its copies show by the slots' generations whether they are
good. What it was granted stays its own until it is certain that it writes no more, which is when the socket over which
it was given the memory closes: the kernel does that after the process's memory is gone. Event loop only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tandem.errors import WorkerUnavailable
from tandem.prefix_store.blocks import Held, Reservation


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan:
    held: Sequence[Held]
    since_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    reservation: Reservation
    tenant: str
    since_s: float


@dataclass(kw_only=True, slots=True)
class Session:
    """One client, from its hello to the end of its stream. Times are on the monotonic clock."""

    session_id: str
    worker_id: str
    seen_s: float
    end: Callable[[], None]
    """Ends its stream."""
    loans: dict[int, Loan] = field(default_factory=dict)
    grants: dict[int, Grant] = field(default_factory=dict)
    has_memory: bool = False
    """Whether its process has mapped the slab and not closed the socket since."""
    is_over: bool = False


class SessionTable:
    """All clients. `give_back` ends a loan, `cancel` a grant."""

    def __init__(
        self,
        *,
        lease_s: float,
        give_back: Callable[[Sequence[Held]], None],
        cancel: Callable[[Reservation], None],
    ) -> None:
        self._lease_s = lease_s
        self._give_back = give_back
        self._cancel = cancel
        self._sessions: dict[str, Session] = {}

    @property
    def num_clients(self) -> int:
        """Attached ones."""
        return sum(1 for session in self._sessions.values() if not session.is_over)

    @property
    def num_loans(self) -> int:
        """Over all clients."""
        return sum(len(session.loans) for session in self._sessions.values())

    @property
    def num_grants(self) -> int:
        """Over all clients; those of clients that are gone but may still write, too."""
        return sum(len(session.grants) for session in self._sessions.values())

    def open(self, worker_id: str, *, end: Callable[[], None], now: float) -> Session:
        """A new session."""
        session = Session(session_id=secrets.token_hex(16), worker_id=worker_id, seen_s=now, end=end)
        self._sessions[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Raises WorkerUnavailable for one that is over."""
        session = self._sessions.get(session_id)
        if session is None or session.is_over:
            raise WorkerUnavailable("the session with the prefix store is over; attach again")
        return session

    def lend(self, session: Session, number: int, held: Sequence[Held], now: float) -> None:
        """Books a loan; gives it back at once when the session ended meanwhile."""
        if session.is_over:
            self._give_back(held)
        else:
            session.loans[number] = Loan(held=held, since_s=now)

    def grant(self, session: Session, number: int, reservation: Reservation, *, tenant: str, now: float) -> None:
        """Books a grant; cancels it when the session ended meanwhile, for then the client never hears of it."""
        if session.is_over:
            self._cancel(reservation)
        else:
            session.grants[number] = Grant(reservation=reservation, tenant=tenant, since_s=now)

    def release(self, session: Session, number: int) -> None:
        """Ends a loan. Idempotent."""
        loan = session.loans.pop(number, None)
        if loan is not None:
            self._give_back(loan.held)

    def take_grant(self, session: Session, number: int) -> Grant | None:
        """The grant, which is the caller's from now on."""
        return session.grants.pop(number, None)

    def cancel_grant(self, session: Session, number: int) -> None:
        """The client writes no more into it. Idempotent."""
        grant = session.grants.pop(number, None)
        if grant is not None:
            self._cancel(grant.reservation)

    def renew(self, session: Session, *, loans: Iterable[int], grants: Iterable[int], now: float) -> None:
        """The client lives and holds these; what it never heard of, it does not hold."""
        session.seen_s = now
        old_s = now - self._lease_s
        held = set(loans)
        for number in [n for n, loan in session.loans.items() if n not in held and loan.since_s < old_s]:
            self.release(session, number)
        granted = set(grants)
        for number in [n for n, grant in session.grants.items() if n not in granted and grant.since_s < old_s]:
            self.cancel_grant(session, number)

    def memory_given(self, session: Session) -> None:
        """Its process can read and write the slab from now on."""
        session.has_memory = True

    def memory_gone(self, session_id: str) -> None:
        """Its process has closed the socket or is dead: it writes no more."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.has_memory = False
            session.end()
            self.close(session)

    def close(self, session: Session) -> None:
        """Ends a session; what it may still write stays reserved. Idempotent."""
        session.is_over = True
        for number in list(session.loans):
            self.release(session, number)
        if not session.has_memory:
            for number in list(session.grants):
                self.cancel_grant(session, number)
        if not session.grants:
            self._sessions.pop(session.session_id, None)

    def expire(self, now: float) -> list[Session]:
        """Closes those that were silent for a lease; they are told by the end of their stream."""
        silent = [s for s in self._sessions.values() if not s.is_over and now - s.seen_s > self._lease_s]
        for session in silent:
            session.end()
            self.close(session)
        return silent
