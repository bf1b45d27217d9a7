"""How a client reaches a router: where it is, how to know that it is the right one, and what to show it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import ConfigError

if TYPE_CHECKING:
    import grpc

DEFAULT_ENDPOINT = "127.0.0.1:50051"
ENDPOINT_VARIABLE = "TANDEM_ENDPOINT"
API_KEY_VARIABLE = "TANDEM_API_KEY"


def default_endpoint() -> str:
    """$TANDEM_ENDPOINT, else where `tandem up` listens by default."""
    return os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One router. Raises ConfigError for what cannot be used."""

    endpoint: str
    """host:port of its gRPC port."""
    tls: bool = False
    """Encrypt; also where any of the files below is given."""
    tls_ca_file: Path | None = None
    """CAs that may have signed the router's certificate; None takes the well-known ones."""
    tls_cert_file: Path | None = None
    """The client's certificate, where routers ask for one, and its key."""
    tls_key_file: Path | None = None
    tls_server_name: str = ""
    """Name in the router's certificate, where it is reached by another one."""
    api_key: str = ""

    def __post_init__(self) -> None:
        if "://" in self.endpoint:
            raise ConfigError(
                "the endpoint is HOST:PORT of the gRPC port, 50051 unless it was changed; "
                f"got the URL {self.endpoint!r}"
            )
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("--tls-cert-file and --tls-key-file are given together")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("an API key has only printable ASCII characters")

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self.tls or bool(self.tls_ca_file or self.tls_cert_file or self.tls_server_name)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for a connection in the clear."""
        if not self.is_encrypted:
            return None
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.tls_ca_file),
            private_key=_read(self.tls_key_file),
            certificate_chain=_read(self.tls_cert_file),
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def read_key(path: Path) -> str:
    """The first key of a file with one a line. Raises ConfigError."""
    for line in (_read(path) or b"").decode(errors="replace").splitlines():
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise ConfigError(f"{path} holds no API key")


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
