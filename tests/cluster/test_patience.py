"""Waiting for what others are still starting."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cluster import patience
from cluster.patience import patiently
from tandem.errors import ClusterError, ConfigError
from tests.router_harness import runs_async


class Attempts:
    """Fails with these errors in turn, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_PAUSE_S", 0.001)


@runs_async
async def test_it_tries_again_and_says_each_reason_once() -> None:
    notes: list[str] = []
    attempts = Attempts(ClusterError("no head"), ClusterError("no head"), RedisConnectionError("refused"))
    assert await patiently(attempts, notes.append, patience_s=60) == "done"
    assert notes == ["no head; trying again for 60 s", "Redis is away: refused; trying again for 60 s"]


@runs_async
async def test_when_time_is_up_the_last_reason_is_raised() -> None:
    with pytest.raises(ClusterError, match="no head"):
        await patiently(Attempts(*[ClusterError("no head")] * 10_000), lambda _: None, patience_s=0.02)
    with pytest.raises(ClusterError, match="Redis is away: refused"):
        await patiently(Attempts(RedisConnectionError("refused")), lambda _: None, patience_s=0)


@runs_async
async def test_what_no_waiting_can_cure_is_raised_at_once() -> None:
    attempts = Attempts(ConfigError("wrong"))
    with pytest.raises(ConfigError):
        await patiently(attempts, lambda _: None)
    assert not attempts.errors
