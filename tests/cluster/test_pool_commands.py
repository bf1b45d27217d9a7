"""The command line of the pools: what is understood, and when a change counts as done."""

from __future__ import annotations

import pytest

from cluster.pool_commands import parse_role, parse_sizes
from cluster.pool_wait import describe, is_drained, is_restarted, is_scaled
from tandem.errors import ConfigError
from tandem.rpc.tandem.v1.inference_pb2 import ClusterStatus, PoolStatus, WorkerStatus
from tandem.types import Role

D = Role.DECODE


def make_status(desired: int, *workers: WorkerStatus) -> ClusterStatus:
    states = [worker.state for worker in workers]
    pool = PoolStatus(
        role="decode", desired=desired, num_ready=states.count("ready"), num_draining=states.count("draining")
    )
    return ClusterStatus(workers=workers, pools=[pool], has_controller=True)


def make_worker(index: int, state: str = "ready", *, epoch: int = 1, generation: int = 0) -> WorkerStatus:
    return WorkerStatus(
        worker_id=f"decode-{index}", role="decode", state=state, epoch=epoch, generation=generation
    )


def test_sizes_are_read_for_one_pool_or_both() -> None:
    assert parse_sizes(["decode=0"]) == {Role.DECODE: 0}
    assert parse_sizes(["prefill=3", "decode=2"]) == {Role.PREFILL: 3, Role.DECODE: 2}


@pytest.mark.parametrize("text", ["decode", "decode=", "decode=-1", "decode=two", "other=2"])
def test_what_is_no_size_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=text.partition("=")[0]):
        parse_sizes([text])


def test_a_pool_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_sizes(["decode=1", "decode=2"])


def test_a_pool_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill and decode"):
        parse_role("router")


def test_a_scaling_is_done_when_exactly_the_wanted_workers_are_ready() -> None:
    done = is_scaled([D])
    assert done(make_status(2, make_worker(0), make_worker(1)))
    assert done(make_status(0))
    assert not done(make_status(2, make_worker(0)))
    assert not done(make_status(1, make_worker(0), make_worker(1, "draining")))
    assert not done(make_status(1, make_worker(0), make_worker(1, "unreachable")))


def test_a_drain_is_done_when_that_incarnation_is_gone_and_replaced() -> None:
    done = is_drained("decode-0", 1, D)
    assert not done(make_status(1, make_worker(0, "draining")))
    assert not done(make_status(1))
    assert done(make_status(1, make_worker(1)))
    assert done(make_status(1, make_worker(0, epoch=2)))


def test_a_restart_is_done_when_nobody_is_of_an_older_generation() -> None:
    done = is_restarted(D, 2)
    assert not done(make_status(2, make_worker(0, generation=1), make_worker(1, generation=2)))
    assert done(make_status(2, make_worker(2, generation=2), make_worker(1, generation=3)))


def test_a_pool_is_described_in_one_line() -> None:
    assert describe(make_status(3, make_worker(0), make_worker(1, "draining")).pools[0]) == (
        "decode: 1 of 3 ready, 1 draining"
    )
