"""What a stranger may have written: records in Redis, and token ids on a worker's port."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import redis.asyncio as aioredis

from cluster.embedded_redis import EmbeddedRedis
from tandem.errors import ContextLengthExceeded, InvalidRequest
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tandem.model.loader import load_spec
from tandem.registry import Registry, WorkerRecord
from tandem.types import WorkerId
from tests.router.test_admin import RECORD


def test_unreadable_records_are_passed_over_and_later_fields_are_ignored() -> None:
    async def body() -> list[WorkerId]:
        server = EmbeddedRedis()
        await server.start()
        registry = Registry(server.url, cluster="c", ttl_s=60)
        client = aioredis.from_url(server.url)
        try:
            await registry.put(RECORD)
            later = {**json.loads(replace(RECORD, worker_id=WorkerId("later")).to_json()), "new_field": 1}
            await client.set("tandem:c:worker:later", json.dumps(later))
            for name, text in (("evil", "not json"), ("list", "[]"), ("empty", "{}")):
                await client.set(f"tandem:c:worker:{name}", text)
            return [record.worker_id for record in await registry.workers()]
        finally:
            await client.aclose()
            await registry.close()
            server.stop()

    assert asyncio.run(body()) == ["decode-0", "later"]


def test_what_is_no_record_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="record"):
        WorkerRecord.from_json("{}")


def test_token_ids_beyond_the_vocabulary_and_prompts_beyond_the_context_are_refused() -> None:
    spec = load_spec(resolve_model(DEFAULT_MODEL))
    spec.check_prompt([spec.vocab_size - 1])
    with pytest.raises(InvalidRequest, match="vocabulary"):
        spec.check_prompt([1, spec.vocab_size])
    with pytest.raises(ContextLengthExceeded):
        spec.check_prompt([1] * (spec.max_context_tokens + 1))
