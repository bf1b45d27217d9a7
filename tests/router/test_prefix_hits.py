"""What the router believes of who has a prompt, from announcements over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cluster.embedded_redis import EmbeddedRedis
from router.naming import PromptNames
from router.prefix_hits import PrefixHits
from router.view import CachedPrefix
from tandem.prefix_store.announce import Announcer, AnnouncerSettings
from tandem.prefix_store.follow import PrefixIndexFollower
from tandem.prefix_store.registry import owner_of
from tandem.types import Epoch, Role
from tests.factories import make_worker_view
from tests.store_nodes import run, until

PROMPT = tuple(range(100))
WORKERS = (
    make_worker_view("prefill-0", Role.PREFILL, store_node="n0"),
    make_worker_view("prefill-1", Role.PREFILL, store_node="n1"),
    make_worker_view("decode-0", Role.DECODE),
)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    redis = EmbeddedRedis()
    asyncio.run(redis.start())
    yield redis.url
    redis.stop()


def test_each_worker_has_its_own_blocks_and_those_of_its_nodes_store(redis_url: str) -> None:
    async def test() -> None:
        names = PromptNames(PROMPT, salt="")
        blocks = names.of("same", 16).blocks
        follower = PrefixIndexFollower(redis_url, cluster="hits")
        hits = PrefixHits(follower)
        hits.follow(WORKERS)
        follower.start()
        settings = AnnouncerSettings(redis_url=redis_url, cluster="hits")
        owners = {"decode-0": ("device", 2), "prefill-0": ("device", 1), owner_of("n0"): ("host", 4)}
        announcers = []
        for owner, (tier, count) in owners.items():
            announcer = Announcer(settings, owner=owner, epoch=Epoch(1))
            announcer.changed(tier, blocks[:count], ())
            announcer.start()
            announcers.append(announcer)
        try:
            expected = {
                "prefill-0": CachedPrefix(device=1, host=4, disk=4, remote=4),
                "prefill-1": CachedPrefix(device=0, host=0, disk=0, remote=4),
                "decode-0": CachedPrefix(device=2, host=2, disk=2, remote=2),
            }
            await until(lambda: hits.of(names, WORKERS) == expected)
            assert hits.of(PromptNames(PROMPT, salt="other"), WORKERS) == {}
            hits.follow(WORKERS[1:])
            await until(lambda: "prefill-0" not in hits.of(names, WORKERS[1:]))
        finally:
            await asyncio.gather(*(announcer.close() for announcer in announcers))
            await follower.close()

    run(test)


def test_workers_of_another_model_are_not_asked_for_this_ones_blocks() -> None:
    names = PromptNames(PROMPT, salt="")
    assert names.of("one", 16).blocks[0] != names.of("another", 16).blocks[0]
    assert names.of("one", 16) is names.of("one", 16)
