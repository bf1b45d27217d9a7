"""What clients hold, by their own word and by the clock."""

from __future__ import annotations

import pytest

from tandem.errors import WorkerUnavailable
from tandem.prefix_store.blocks import Held, Reservation
from tandem.prefix_store.sessions import Session, SessionTable
from tandem.types import BlockHash

LEASE_S = 10.0


class Book:
    """A table and what it gave back."""

    def __init__(self) -> None:
        self.returned: list[int] = []
        self.cancelled: list[int] = []
        self.ended: list[str] = []
        self.table = SessionTable(
            lease_s=LEASE_S,
            give_back=lambda held: self.returned.extend(one.slot for one in held),
            cancel=lambda reservation: self.cancelled.append(reservation.number),
        )

    def open(self, name: str = "w", *, has_memory: bool = True) -> Session:
        session = self.table.open(name, end=lambda: self.ended.append(name), now=0.0)
        if has_memory:
            self.table.memory_given(session)
        return session


def held(slot: int) -> list[Held]:
    return [Held(name=BlockHash(bytes(16)), slot=slot, generation=1, digest=1)]


def reservation(number: int) -> Reservation:
    return Reservation(number=number, first=0, names=(), slots=(), evicted=())


def test_a_silent_client_loses_its_loans_but_keeps_what_it_may_still_write() -> None:
    book = Book()
    session = book.open()
    book.table.lend(session, 1, held(5), now=0.0)
    book.table.grant(session, 2, reservation(7), tenant="", now=0.0)
    assert book.table.expire(LEASE_S) == []
    assert book.table.expire(LEASE_S + 1) == [session]
    assert (book.returned, book.cancelled, book.ended) == ([5], [], ["w"])
    with pytest.raises(WorkerUnavailable):
        book.table.get(session.session_id)
    book.table.memory_gone(session.session_id)
    assert book.cancelled == [7]
    assert book.table.num_grants == 0


def test_a_client_that_renews_keeps_what_it_names_and_loses_what_it_never_heard_of() -> None:
    book = Book()
    session = book.open()
    for number in (1, 2):
        book.table.lend(session, number, held(number), now=0.0)
        book.table.grant(session, 10 + number, reservation(number), tenant="", now=0.0)
    book.table.renew(session, loans=[1], grants=[11], now=LEASE_S / 2)
    assert (book.returned, book.cancelled) == ([], [])  # an answer may be on its way
    book.table.renew(session, loans=[1], grants=[11], now=LEASE_S + 1)
    assert (book.returned, book.cancelled) == ([2], [2])


def test_what_is_ready_after_the_end_of_a_session_goes_back_at_once() -> None:
    book = Book()
    session = book.open()
    book.table.close(session)
    book.table.lend(session, 1, held(3), now=0.0)
    book.table.grant(session, 2, reservation(4), tenant="", now=0.0)
    assert (book.returned, book.cancelled) == ([3], [4])


def test_a_client_without_the_memory_writes_nothing_so_its_grants_end_with_it() -> None:
    book = Book()
    session = book.open(has_memory=False)
    book.table.grant(session, 1, reservation(1), tenant="", now=0.0)
    book.table.close(session)
    assert book.cancelled == [1]


def test_a_release_is_good_once() -> None:
    book = Book()
    session = book.open()
    book.table.lend(session, 1, held(3), now=0.0)
    for _ in range(2):
        book.table.release(session, 1)
        book.table.cancel_grant(session, 9)
    assert book.returned == [3]
