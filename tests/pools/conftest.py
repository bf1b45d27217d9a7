"""The small models that the pools run here: random weights, written once for the whole session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.embedded_redis import EmbeddedRedis
from tests.tiny_model import save_tiny_llama


@pytest.fixture(scope="session")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads over two KV heads."""
    return save_tiny_llama(tmp_path_factory.mktemp("gqa"), num_kv_heads=2)


@pytest.fixture(scope="session")
def mha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, four KV heads."""
    return save_tiny_llama(tmp_path_factory.mktemp("mha"), num_kv_heads=4, seed=1)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A real server, for those that want a node's store."""
    redis = EmbeddedRedis()
    asyncio.run(redis.start())
    yield redis.url
    redis.stop()
