"""Connections to the cluster's Redis: the URL says where it is, the environment holds its password and its CA.

So no password is on a command line, in a message, or in what a worker is told: child processes inherit it. A URL that
has one all the same loses it to the environment (`hide_password`) before it is passed on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from tandem.errors import ConfigError

if TYPE_CHECKING:
    import redis
    import redis.asyncio as aioredis

URL_VARIABLE = "TANDEM_REDIS_URL"
"""For commands that are given no --redis-url."""
PASSWORD_VARIABLE = "TANDEM_REDIS_PASSWORD"
"""For URLs without a password; one in the URL wins."""
CA_VARIABLE = "TANDEM_REDIS_CA_FILE"
"""PEM file of the CAs that may have signed the server's certificate; for rediss:// URLs. Else the system's."""


_SCHEMES = ("redis", "rediss", "unix")


def _options(url: str, *, connect_timeout_s: float, timeout_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {"socket_connect_timeout": connect_timeout_s, "socket_timeout": timeout_s}
    if password := os.environ.get(PASSWORD_VARIABLE):
        options["password"] = password
    ca_file = os.environ.get(CA_VARIABLE)
    if ca_file and url.startswith("rediss://"):
        options["ssl_ca_certs"] = ca_file
    return options


def _not_a_url(url: str, error: ValueError) -> ConfigError:
    return ConfigError(f"registry.redis_url {url!r} is not a Redis URL: {error}", param="registry.redis_url")


def connect_redis(
    url: str, *, decode_responses: bool = False, connect_timeout_s: float = 2.0, timeout_s: float = 5.0
) -> aioredis.Redis:
    """A lazy client; close it when done. Raises ConfigError for what is no Redis URL."""
    import redis.asyncio as aioredis

    options = _options(url, connect_timeout_s=connect_timeout_s, timeout_s=timeout_s)
    try:
        client: aioredis.Redis = aioredis.from_url(url, decode_responses=decode_responses, **options)
    except ValueError as exc:
        raise _not_a_url(url, exc) from exc
    return client


def connect_redis_blocking(url: str, *, timeout_s: float) -> redis.Redis:
    """The same for threads; answers are text."""
    import redis

    options = _options(url, connect_timeout_s=timeout_s, timeout_s=timeout_s)
    try:
        client: redis.Redis = redis.Redis.from_url(url, decode_responses=True, **options)
    except ValueError as exc:
        raise _not_a_url(url, exc) from exc
    return client


def redis_password() -> str:
    """The environment's; empty where there is none."""
    return os.environ.get(PASSWORD_VARIABLE, "")


def hide_password(url: str) -> str:
    """`url` without its password, which goes into this process's environment, for itself and its children.

    Raises ConfigError for what is no Redis URL; an empty one is none, and stays so.
    """
    parts = urlsplit(url)
    if url and parts.scheme not in _SCHEMES:
        raise _not_a_url(url, ValueError(f"it must begin with one of {', '.join(f'{s}://' for s in _SCHEMES)}"))
    if parts.password is None:
        return url
    os.environ[PASSWORD_VARIABLE] = unquote(parts.password)
    user, _, place = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}@{place}" if name else place))
