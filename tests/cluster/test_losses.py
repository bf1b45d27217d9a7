"""What is told of workers that die, and when."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from cluster.losses import Losses
from tandem.types import Epoch
from tests.cached_router import absent_workers

NO_PROCESS = 2**22 + 1
"""More than Linux gives."""
RECORD = replace(absent_workers()[1], pid=NO_PROCESS)
NAME = RECORD.worker_id


def make_losses() -> tuple[Losses, list[str]]:
    notes: list[str] = []
    return Losses(notes.append), notes


def test_a_dead_worker_is_told_of_once_with_its_process() -> None:
    losses, notes = make_losses()
    losses.registered([RECORD])
    for _ in range(3):
        losses.registered([])
        losses.missed([NAME])
    assert notes == [f"worker decode-0 died (process {NO_PROCESS}), starting it again"]


def test_each_life_is_told_of() -> None:
    losses, notes = make_losses()
    for epoch in (1, 2):
        losses.registered([replace(RECORD, epoch=Epoch(epoch))])
        losses.registered([])
        losses.missed([NAME])
    assert len(notes) == 2


def test_a_process_that_only_says_nothing_has_not_died_and_its_return_is_told_of() -> None:
    losses, notes = make_losses()
    silent = replace(RECORD, pid=os.getpid(), node=socket.gethostname())
    losses.registered([silent])
    losses.missed([NAME])
    losses.registered([silent])
    assert notes == [
        f"worker decode-0 (process {os.getpid()}) gives no sign of life; waiting for it",
        f"worker decode-0 (process {os.getpid()}) is back",
    ]


def test_of_another_hosts_worker_nobody_says_that_its_process_has_died() -> None:
    losses, notes = make_losses()
    losses.registered([replace(RECORD, node="other")])
    losses.missed([NAME])
    assert notes == [f"worker decode-0 on other (process {NO_PROCESS}) is lost, starting it again"]


def test_a_death_that_only_its_successor_shows_is_told_of_with_that() -> None:
    losses, notes = make_losses()
    losses.registered([RECORD])
    losses.registered([replace(RECORD, epoch=Epoch(2), pid=5)])
    assert notes == [f"worker decode-0 died (process {NO_PROCESS}) and is back (process 5)"]


def test_a_worker_that_was_taken_away_is_no_loss_when_another_one_gets_its_name() -> None:
    losses, notes = make_losses()
    losses.registered([RECORD])
    losses.registered([])
    losses.registered([replace(RECORD, epoch=Epoch(2))])
    assert notes == []
