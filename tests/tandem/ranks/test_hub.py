"""How ranks meet and part: only with the cluster's key, and never one without the others noticing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.errors import ForeignCall, ModelLoadError, TandemError, TransportError, WorkerUnavailable
from tandem.ranks.channel import Kind, RankChannel, connect
from tandem.ranks.hub import RankHub, RankReport, pack_error
from tandem.ranks.loading import HOST
from tandem.secret import ClusterKey
from tests.factories import CLUSTER_KEY

WAIT_S = 10.0


class Losses:
    """What `on_lost` was told."""

    def __init__(self) -> None:
        self.errors: list[TandemError] = []
        self.happened = threading.Event()

    def __call__(self, error: TandemError) -> None:
        self.errors.append(error)
        self.happened.set()


@contextmanager
def a_hub(num_ranks: int) -> Iterator[tuple[RankHub, Losses]]:
    losses = Losses()
    hub = RankHub(CLUSTER_KEY, num_ranks=num_ranks, on_lost=losses)
    try:
        yield hub, losses
    finally:
        hub.close()


class Follower:
    """The other end, by hand."""

    def __init__(self, hub: RankHub, rank: int) -> None:
        self.channel: RankChannel = connect((HOST, hub.port), CLUSTER_KEY, rank)
        self.frames: list[tuple[Kind, bytes]] = []
        self.ended = threading.Event()
        self.heard = threading.Event()
        self.thread = self.channel.follow(self._hear, self._end, name="follower")

    def _hear(self, kind: Kind, payload: bytes) -> None:
        self.frames.append((kind, payload))
        self.heard.set()
        if kind is Kind.STOP:
            self.channel.close()

    def _end(self, _: TransportError) -> None:
        self.channel.close()
        self.ended.set()

    def ready(self, rank: int) -> None:
        report = RankReport(rank=rank, address=b"there", weights_bytes=5, load_s=0.5)
        self.channel.send(Kind.READY, report.pack())


def test_ranks_report_in_and_hear_what_rank_0_says_in_order() -> None:
    with a_hub(3) as (hub, losses):
        followers = {rank: Follower(hub, rank) for rank in (2, 1)}
        for rank, follower in followers.items():
            follower.ready(rank)
        assert [report.rank for report in hub.wait_ready()] == [1, 2]
        assert hub.addresses == [b"there", b"there"]
        hub.broadcast(Kind.BATCH, b"one")
        hub.send(2, Kind.COPY, b"two")
        hub.close()
        assert followers[1].frames == [(Kind.BATCH, b"one"), (Kind.STOP, b"")]
        assert followers[2].frames == [(Kind.BATCH, b"one"), (Kind.COPY, b"two"), (Kind.STOP, b"")]
    assert losses.errors == []


def test_a_rank_that_goes_is_reported_once_and_sends_to_it_fail() -> None:
    with a_hub(2) as (hub, losses):
        follower = Follower(hub, 1)
        follower.ready(1)
        hub.wait_ready()
        follower.channel.close()
        assert losses.happened.wait(WAIT_S)
        assert [type(error) for error in losses.errors] == [WorkerUnavailable]


def test_a_rank_that_fails_while_it_serves_is_lost_with_what_it_said() -> None:
    with a_hub(2) as (hub, losses):
        follower = Follower(hub, 1)
        follower.ready(1)
        hub.wait_ready()
        follower.channel.send(Kind.FAILED, pack_error(TransportError("a process group broke")))
        follower.channel.close()
        assert losses.happened.wait(WAIT_S)
        assert [error.message for error in losses.errors] == ["rank 1: a process group broke"]


def test_a_rank_whose_rank_0_goes_is_told() -> None:
    with a_hub(2) as (hub, _):
        follower = Follower(hub, 1)
        follower.ready(1)
        hub.wait_ready()
        hub._channels[1].close()
        assert follower.ended.wait(WAIT_S)


def test_what_keeps_a_rank_from_starting_is_what_the_worker_fails_with() -> None:
    with a_hub(2) as (hub, losses):
        follower = Follower(hub, 1)
        follower.channel.send(Kind.FAILED, pack_error(ModelLoadError("no such file")))
        with pytest.raises(ModelLoadError, match="rank 1: no such file"):
            hub.wait_ready()
        assert losses.errors == []


def test_a_rank_that_dies_while_it_loads_fails_the_start_at_once() -> None:
    with a_hub(2) as (hub, losses):
        Follower(hub, 1).channel.close()
        with pytest.raises(WorkerUnavailable, match="rank 1"):
            hub.wait_ready()
        assert losses.errors == []


def test_neither_side_takes_the_other_without_the_clusters_key() -> None:
    with a_hub(2) as (hub, _):
        with pytest.raises(ForeignCall):
            connect((HOST, hub.port), ClusterKey(b"x" * 32), 1)
        assert hub._channels == {}
        follower = Follower(hub, 1)  # the true one is still taken
        follower.ready(1)
        hub.wait_ready()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n......", b"GET", b""])
def test_a_stranger_is_let_go_and_the_true_rank_still_taken(said: bytes) -> None:
    with a_hub(2) as (hub, _):
        with socket.create_connection((HOST, hub.port)) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
        follower = Follower(hub, 1)
        follower.ready(1)
        hub.wait_ready()


def test_a_second_or_impossible_rank_is_refused() -> None:
    with a_hub(2) as (hub, _):
        follower = Follower(hub, 1)
        follower.ready(1)
        for rank in (1, 7):
            assert Follower(hub, rank).ended.wait(WAIT_S)
        hub.wait_ready()


def test_nobody_is_at_the_address_of_a_worker_that_is_gone() -> None:
    with a_hub(2) as (hub, _):
        port = hub.port
    with pytest.raises(TransportError):
        connect((HOST, port), CLUSTER_KEY, 1)


class Waiting:
    """`hub.wait_done` on a thread."""

    def __init__(self, hub: RankHub) -> None:
        self.errors: list[TandemError] = []
        self._hub = hub
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._hub.wait_done()
        except TandemError as exc:
            self.errors.append(exc)


def test_rank_0_waits_until_every_rank_is_done() -> None:
    with a_hub(3) as (hub, _):
        followers = [Follower(hub, rank) for rank in (1, 2)]
        for rank, follower in enumerate(followers, start=1):
            follower.ready(rank)
        hub.wait_ready()
        for _ in range(2):
            waiting = Waiting(hub)
            followers[0].channel.send(Kind.DONE)
            followers[0].channel.send(Kind.READY, RankReport(rank=1, address=b"", weights_bytes=0, load_s=0.0).pack())
            with hub._changed:
                assert hub._changed.wait_for(lambda: hub.addresses[0] == b"", WAIT_S), "the frames were not heard"
            assert waiting.thread.is_alive()
            followers[1].channel.send(Kind.DONE)
            waiting.thread.join(WAIT_S)
            assert not waiting.thread.is_alive()
            assert waiting.errors == []
            followers[0].ready(1)
            with hub._changed:
                assert hub._changed.wait_for(lambda: hub.addresses[0] == b"there", WAIT_S)


def test_rank_0_does_not_wait_for_one_that_is_gone() -> None:
    with a_hub(2) as (hub, losses):
        follower = Follower(hub, 1)
        follower.ready(1)
        hub.wait_ready()
        waiting = Waiting(hub)
        follower.channel.close()
        waiting.thread.join(WAIT_S)
        assert not waiting.thread.is_alive()
        assert [type(error) for error in waiting.errors] == [WorkerUnavailable]
        assert losses.happened.wait(WAIT_S)
