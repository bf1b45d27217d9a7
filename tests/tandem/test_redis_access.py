"""Where passwords and CAs of Redis come from, against a Valkey with a password, also behind TLS."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

from cluster.embedded_redis import EmbeddedRedis, check_redis
from tandem.errors import ClusterError, ConfigError
from tandem.redis_access import CA_VARIABLE, PASSWORD_VARIABLE, connect_redis, connect_redis_blocking, hide_password
from tests.certificates import Authority
from tests.metadata import valkey
from tests.proxy import Proxy
from tests.router_harness import runs_async

PASSWORD = "p@ss/word"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (PASSWORD_VARIABLE, CA_VARIABLE):
        monkeypatch.setenv(variable, "")  # so that it is restored, whatever a test sets


@asynccontextmanager
async def guarded() -> AsyncIterator[EmbeddedRedis]:
    async with valkey() as server:
        with Redis.from_url(server.url) as redis:
            redis.config_set("requirepass", PASSWORD)
        yield server


def place_of(server: EmbeddedRedis) -> str:
    return server.url.removeprefix("redis://").removesuffix("/0")


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("redis://me:p%40ss@store.example:6380/1", "redis://me@store.example:6380/1", "p@ss"),
        ("rediss://:secret@store.example", "rediss://store.example", "secret"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0", ""),
        ("redis://me@store.example", "redis://me@store.example", ""),
        ("", "", ""),
    ],
)
def test_a_password_in_the_url_goes_into_the_environment(
    monkeypatch: pytest.MonkeyPatch, url: str, shown: str, password: str
) -> None:
    assert hide_password(url) == shown
    assert os.environ[PASSWORD_VARIABLE] == password


@runs_async
async def test_the_environments_password_opens_and_the_urls_own_one_wins() -> None:
    with pytest.MonkeyPatch.context() as environment:
        async with guarded() as server:
            with pytest.raises(ClusterError, match="wants another user or password"):
                await check_redis(server.url)
            environment.setenv(PASSWORD_VARIABLE, PASSWORD)
            await check_redis(server.url)
            with connect_redis_blocking(server.url, timeout_s=3.0) as client:
                assert client.ping()
            wrong = connect_redis(server.url.replace("redis://", "redis://:wrong@"))
            with pytest.raises(AuthenticationError):
                await wrong.ping()
            await wrong.aclose()


@runs_async
async def test_a_server_behind_tls_is_trusted_by_the_ca_in_the_environment(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PASSWORD_VARIABLE, PASSWORD)
        async with guarded() as server, Proxy.to(place_of(server), tls=context) as proxy:
            url = f"rediss://{proxy.address}/0"
            stranger = connect_redis(url)
            with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.ping()
            await stranger.aclose()
            environment.setenv(CA_VARIABLE, str(authority.file))
            await check_redis(url)


def test_what_is_no_redis_url_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="is not a Redis URL"):
        connect_redis("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="it must begin with one of redis://, rediss://, unix://"):
        hide_password("store.example:6379")
    with pytest.raises(ConfigError, match="is not a Redis URL"):
        connect_redis_blocking("store.example", timeout_s=1.0)
