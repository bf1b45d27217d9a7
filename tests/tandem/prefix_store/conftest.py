"""One real Valkey for the tests of a module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cluster.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Where it listens."""
    server = EmbeddedRedis()
    asyncio.run(server.start())
    yield server.url
    server.stop()
