"""TLS on both of the router's ports: who trusts whom, certificates that are replaced, files that are wrong."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.access import Access
from cluster.client import Client, make_sampling
from tandem.errors import ClusterError, ConfigError
from tandem.rpc.tls import TlsFiles
from tests.certificates import Authority, serial_of
from tests.router_harness import make_frontend, running, runs_async, saying


def served(files: TlsFiles) -> dict[str, str]:
    """The router's fields for these files."""
    fields = {"tls_cert_file": str(files.cert), "tls_key_file": str(files.key)}
    return fields | ({"tls_client_ca_file": str(files.client_ca)} if files.client_ca else {})


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def https(authority: Authority, *client: Path) -> httpx.AsyncClient:
    """A client that trusts `authority` and, with its files, shows a certificate of its own."""
    context = ssl.create_default_context(cafile=str(authority.file))
    if client:
        context.load_cert_chain(*client)
    return httpx.AsyncClient(verify=context, trust_env=False)


async def answer(access: Access) -> str:
    """One generation."""
    async with Client(access) as client:
        return "".join([response.text async for response in client.generate("Hi", make_sampling())])


@runs_async
async def test_both_ports_are_encrypted_and_answer_who_trusts_their_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with running(saying("Hello"), **served(authority.server_files())) as router:
        assert await answer(Access(endpoint=router.grpc_address, tls_ca_file=authority.file)) == "Hello"
        assert router.http_url == f"https://{router.http_address}"
        async with https(authority) as http:
            reply = await http.post(f"{router.http_url}/v1/completions", json={"prompt": "Hi"})
        assert reply.json()["choices"][0]["text"] == "Hello"


@runs_async
async def test_the_client_says_what_is_wrong_with_a_connection(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, name="stranger")
    async with running(saying("Hello"), **served(authority.server_files())) as router:
        with pytest.raises(ClusterError, match="not signed by a CA that we trust; give --tls-ca-file"):
            await answer(Access(endpoint=router.grpc_address, tls_ca_file=stranger.file))
        with pytest.raises(ClusterError, match="does it want TLS"):
            await answer(Access(endpoint=router.grpc_address))
    async with running(saying("Hello")) as router:
        with pytest.raises(ClusterError, match="it does not use TLS"):
            await answer(Access(endpoint=router.grpc_address, tls_ca_file=authority.file))


@runs_async
async def test_a_router_that_wants_client_certificates_serves_nobody_else(tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path), Authority(tmp_path, name="clients")
    cert, key = clients.issue("client")
    async with running(saying("Hello"), **served(authority.server_files(client_ca=clients.file))) as router:
        known: dict[str, Any] = {"tls_ca_file": authority.file, "tls_cert_file": cert, "tls_key_file": key}
        assert await answer(Access(endpoint=router.grpc_address, **known)) == "Hello"
        with pytest.raises(ClusterError, match=r"or a certificate of ours \(--tls-cert-file\)"):
            await answer(Access(endpoint=router.grpc_address, tls_ca_file=authority.file))
        async with https(authority) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{router.http_url}/v1/models")


@runs_async
async def test_a_certificate_that_is_replaced_is_shown_to_the_next_connection_on_both_ports(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.server_files()
    async with running(saying("Hello"), **served(files)) as router:
        ports = [port_of(router.grpc_address), port_of(router.http_address)]

        async def serials() -> list[str]:
            asked = [asyncio.to_thread(serial_of, "127.0.0.1", port, authority=authority) for port in ports]
            return await asyncio.gather(*asked)

        first = await serials()
        assert first[0] == first[1]
        old_key = files.key.read_bytes()
        authority.issue()
        new_key = files.key.read_bytes()
        files.key.write_bytes(old_key)  # half way: the new certificate beside the old key
        assert await serials() == first
        files.key.write_bytes(new_key)
        second = await serials()
        assert second[0] == second[1] != first[0]
        assert await answer(Access(endpoint=router.grpc_address, tls_ca_file=authority.file)) == "Hello"


@runs_async
async def test_clients_are_judged_by_an_authority_that_was_replaced(tmp_path: Path) -> None:
    authority, old, new = Authority(tmp_path), Authority(tmp_path, name="old"), Authority(tmp_path, name="new")
    client_ca = tmp_path / "clients.pem"
    client_ca.write_bytes(old.file.read_bytes())
    cert, key = new.issue("client")
    known: dict[str, Any] = {"tls_ca_file": authority.file, "tls_cert_file": cert, "tls_key_file": key}
    async with running(saying("Hello"), **served(authority.server_files(client_ca=client_ca))) as router:
        with pytest.raises(ClusterError):
            await answer(Access(endpoint=router.grpc_address, **known))
        client_ca.write_bytes(new.file.read_bytes())
        assert await answer(Access(endpoint=router.grpc_address, **known)) == "Hello"
        async with https(authority, cert, key) as http:
            assert (await http.get(f"{router.http_url}/v1/models")).status_code == 200


@pytest.mark.parametrize("wrong", ["absent", "other key", "no PEM"])
def test_files_that_cannot_be_served_end_the_start_with_their_names(tmp_path: Path, wrong: str) -> None:
    authority = Authority(tmp_path)
    files = authority.server_files()
    if wrong == "absent":
        files.key.unlink()
    elif wrong == "other key":
        files.key.write_bytes(authority.issue("other")[1].read_bytes())
    else:
        files.cert.write_text("nothing")

    @runs_async
    async def start() -> None:
        async with running(saying("Hello"), **served(files)):
            pass

    with pytest.raises(ConfigError, match=r"TLS cannot be served from .*server\.crt"):
        start()


def test_a_key_needs_a_certificate_and_client_authorities_need_both() -> None:
    with pytest.raises(ConfigError, match=r"router\.tls_key_file must be given together with"):
        make_frontend(saying("x"), tls_key_file="server.key")
    with pytest.raises(ConfigError, match=r"router\.tls_client_ca_file must be given with"):
        make_frontend(saying("x"), tls_client_ca_file="ca.pem")
