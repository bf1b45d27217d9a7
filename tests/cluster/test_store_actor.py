"""A node's store as its actor runs it: what keeps it from starting passes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.embedded_redis import EmbeddedRedis
from cluster.store_actor import StoreActor, store_settings
from tandem.config import from_mapping, to_mapping
from tandem.key_source import hand_down
from tandem.prefix_store.disk import DiskTier
from tests.factories import CLUSTER_KEY
from tests.tiny_model import save_tiny_llama


def test_a_store_whose_directory_is_anothers_starts_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "")
    hand_down(CLUSTER_KEY)
    model = save_tiny_llama(tmp_path / "model", num_kv_heads=2)
    tiers = {"host_bytes": 1 << 20, "disk_bytes": 64 << 20, "disk_path": str(tmp_path / "disk")}
    config = from_mapping({"model": {"source": str(model)}, "prefix_store": tiers, "transfer": {"transport": "shm"}})
    redis = EmbeddedRedis()
    asyncio.run(redis.start())
    try:
        store = store_settings(config, redis_url=redis.url, node="n", host="127.0.0.1").store
        owner = DiskTier(
            tiers["disk_path"], block_bytes=store.block_bytes, capacity_bytes=64 << 20, identity=store.fingerprint
        )
        actor = StoreActor(
            {"config": to_mapping(config), "redis_url": redis.url, "store_node": "n", "host": "127.0.0.1"}
        )
        with pytest.raises(TimeoutError):
            actor._started.result(2.0)
        owner.close()
        assert actor._started.result(30.0)["node"] == "n"
        assert "trying again" in caplog.text
        actor.stop()
        actor._loop.call_soon_threadsafe(actor._loop.stop)
        actor._thread.join()
        actor._loop.close()
    finally:
        redis.stop()
