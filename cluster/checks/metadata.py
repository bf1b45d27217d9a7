"""Redis, embedded or external, and clocks: this host's own, and against Redis."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import redis

from cluster.checks.finding import Finding, Reporter, Settings
from tandem.errors import ClusterError, ConfigError
from tandem.redis_access import connect_redis_blocking

LEAST_VERSION = (6, 2)
SLOW_PING_S = 0.02
SKEW_S = 1.0
_TIMEOUT_S = 3.0
_NUM_PINGS = 20
_NUM_READS = 100_000
_SLOW_READ_S = 2e-6
_FIRST_DAY_S = 1_735_689_600
"""2025-01-01: a clock before that has never been set."""


def check_redis(settings: Settings) -> list[Finding]:
    """The configured server, or the embedded one, which is started for this."""
    report = Reporter("redis")
    url = settings.config.registry.redis_url
    try:
        return _external(report, url) if url else _embedded(report)
    except ClusterError as exc:
        return report.problem(exc.message, "set registry.redis_url to a server that runs")
    except ConfigError as exc:
        return report.problem(exc.message, "write redis://host:port/db")
    except (redis.RedisError, OSError) as exc:
        return report.problem(
            f"no usable Redis at {_shown(url)}: {exc}",
            "start it, check address, password and firewall, or leave registry.redis_url empty for an embedded one",
        )


def _shown(url: str) -> str:
    """Without a password."""
    scheme, _, rest = url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _embedded(report: Reporter) -> list[Finding]:
    from cluster.embedded_redis import EmbeddedRedis

    server = EmbeddedRedis()
    started_s = time.monotonic()
    try:
        asyncio.run(server.start())
        took_s = time.monotonic() - started_s
        with connect_redis_blocking(server.url, timeout_s=_TIMEOUT_S) as client:
            info = _info(client)
        return report.ok(f"the embedded server starts in {took_s:.1f} s ({_named(info)})")
    finally:
        server.stop()


def _info(client: redis.Redis) -> dict[str, Any]:
    info: Any = client.info()
    return dict(info)


def _named(info: dict[str, Any]) -> str:
    name = str(info.get("server_name", "redis")).capitalize()
    return f"{name} {info.get(f'{name.lower()}_version') or info['redis_version']}"


def _external(report: Reporter, url: str) -> list[Finding]:
    with connect_redis_blocking(url, timeout_s=_TIMEOUT_S) as client:
        info = _info(client)
        pings_s = [_timed_ping(client) for _ in range(_NUM_PINGS)]
    latency_s = median(pings_s)
    version = tuple(int(word) for word in str(info["redis_version"]).split(".")[:2])
    keeps = "append-only file" if info.get("aof_enabled") else "snapshots only, or nothing"
    found = f"{_named(info)} at {_shown(url)}, ping {latency_s * 1e3:.2f} ms, persistence: {keeps}"
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if version < LEAST_VERSION:
        return report.problem(found, f"use Redis {'.'.join(map(str, LEAST_VERSION))} or newer, or Valkey")
    if int(info.get("maxmemory", 0)) and policy != "noeviction":
        return report.warning(f"{found}; maxmemory-policy is {policy}", "set it to noeviction: workers would vanish")
    if latency_s > SLOW_PING_S:
        return report.warning(found, "use a server nearer to the cluster: heartbeats and scaling wait for it")
    return report.ok(found)


def _timed_ping(client: redis.Redis) -> float:
    started_s = time.perf_counter()
    client.ping()
    return time.perf_counter() - started_s


def check_clock(settings: Settings) -> list[Finding]:
    """Leases and deadlines run on the monotonic clock; the wall clock names moments in logs and traces."""
    report = Reporter("clock")
    read_s, is_steady = _monotonic()
    source_file = Path(settings.sys_dir, "devices/system/clocksource/clocksource0/current_clocksource")
    source = source_file.read_text().strip() if source_file.exists() else "unknown"
    found = f"monotonic clock: {read_s * 1e9:.0f} ns a read, source {source}"
    if not is_steady:
        return report.problem(f"{found}; it went backwards", "use another clocksource (tsc or the hypervisor's own)")
    if time.time() < _FIRST_DAY_S:
        return report.warning(f"{found}; the wall clock says {time.strftime('%F')}", "set it, best with NTP")
    if url := settings.config.registry.redis_url:
        return _against_redis(report, url, found)
    if read_s > _SLOW_READ_S:
        return report.warning(found, "use a quicker clocksource (tsc or the hypervisor's own)")
    return report.ok(f"{found}; the wall clock is plausible")


def _monotonic() -> tuple[float, bool]:
    """(seconds for one read, whether it never went backwards)."""
    steady, last, started_s = True, time.monotonic(), time.monotonic()
    for _ in range(_NUM_READS):
        now = time.monotonic()
        steady, last = steady and now >= last, now
    return (last - started_s) / _NUM_READS, steady


def _against_redis(report: Reporter, url: str, found: str) -> list[Finding]:
    try:
        with connect_redis_blocking(url, timeout_s=_TIMEOUT_S) as client:
            client.ping()
            asked_s = time.time()
            seconds, micros = client.time()
            answered_s = time.time()
    except (redis.RedisError, OSError, ValueError) as exc:
        return report.skipped(f"{found}; the wall clock could not be compared with Redis: {exc}")
    offset_s = int(seconds) + int(micros) / 1e6 - (asked_s + answered_s) / 2
    found = f"{found}; wall clock {offset_s * 1e3:+.1f} ms from Redis"
    if abs(offset_s) > SKEW_S:
        return report.warning(found, "run NTP on both hosts: logs and traces cannot be put side by side")
    return report.ok(found)
