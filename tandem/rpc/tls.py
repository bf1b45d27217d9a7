"""A server's certificate and the CAs of its clients, for gRPC and for HTTP, from files that may be replaced.

Looked at with each handshake: a connection made after the files were replaced has the new certificate, an older one
goes on with the old. Files that do not belong together, as in the middle of a replacement, leave it as it was.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.errors import ConfigError
from tandem.file_stamp import stamp_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pems:
    """What the files hold. `client_ca` is None where clients need no certificate."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Paths of PEM files. With `client_ca` clients must show a certificate that one of its CAs signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)

    def context(self) -> ssl.SSLContext:
        """For a server over HTTP/1.1. Raises ConfigError when the files are unusable or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.cert, self.key, password="")
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as exc:
            files = ", ".join(map(str, self.paths))
            raise ConfigError(f"TLS cannot be served from {files}: {_why(exc)}", param="router.tls_cert_file") from exc
        return context

    def read(self) -> Pems:
        """The same as bytes, checked alike. Raises ConfigError."""
        self.context()
        try:
            return Pems(
                cert=self.cert.read_bytes(),
                key=self.key.read_bytes(),
                client_ca=None if self.client_ca is None else self.client_ca.read_bytes(),
            )
        except OSError as exc:
            raise ConfigError(f"{exc.filename} cannot be read: {exc.strerror}", param="router.tls_cert_file") from exc


def _why(error: OSError | ValueError) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).replace("_", " ").lower()


class Changes:
    """Notices when the files were replaced by others that are usable. Any thread."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp = stamp_of(files.paths)
        self._refused = self._stamp

    def come(self) -> bool:
        """Whether they are others than when this was last asked."""
        with self._lock:
            stamp = stamp_of(self._files.paths)
            if stamp in (self._stamp, self._refused):
                return False
            try:
                self._files.context()
            except ConfigError as exc:
                logger.warning("the certificate stays as it was: %s", exc.message)
                self._refused = stamp
                return False
            self._stamp = self._refused = stamp
        logger.info("the certificate in %s is another one now", self._files.cert)
        return True


def grpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For `add_secure_port`. Raises ConfigError."""
    changes = Changes(files)
    first = _configuration(files.read())

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC with each handshake, on threads of its own; None: as it was."""
        return _configuration(files.read()) if changes.come() else None

    needs_client = files.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(
        first,
        fetch,  # type: ignore[arg-type]  # None is documented, and left out of the stubs
        require_client_authentication=needs_client,
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], root_certificates=pems.client_ca)


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """For an asyncio server. Raises ConfigError."""
    changes = Changes(files)
    first = newest = files.context()

    def on_hello(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called with each handshake, whether the client names the server or not."""
        nonlocal newest
        if changes.come():
            newest = files.context()
        if newest is not first:
            connection.context = newest

    first.sni_callback = on_hello
    return first
