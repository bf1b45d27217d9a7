"""Certificates for tests: an authority, what it issues, and their files."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from tandem.rpc.tls import TlsFiles


@dataclass
class Authority:
    """A CA with a directory; each `issue` replaces the files of the same name."""

    directory: Path
    name: str = "ca"
    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.ca.cert_pem.write_to_path(self.file)

    @property
    def file(self) -> Path:
        """Its own certificate."""
        return self.directory / f"{self.name}.pem"

    def issue(self, name: str = "server", *, identity: str = "127.0.0.1") -> tuple[Path, Path]:
        """Files of a certificate for `identity` and of its key."""
        issued = self.ca.issue_cert(identity, common_name=name)
        cert, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key

    def server_files(self, *, client_ca: Path | None = None) -> TlsFiles:
        """For a server on loopback."""
        cert, key = self.issue()
        return TlsFiles(cert=cert, key=key, client_ca=client_ca)


def serial_of(host: str, port: int, *, authority: Authority) -> str:
    """Serial number of the certificate that a TLS server shows in a new connection that trusts `authority`."""
    context = ssl.create_default_context(cafile=str(authority.file))
    with (
        socket.create_connection((host, port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        found = connection.getpeercert()
    assert found is not None
    return str(found["serialNumber"])
