"""One request to the OpenAI API with nothing but the standard library: a completion, over TLS and with a key."""

from __future__ import annotations

import json
import ssl
import urllib.request
from urllib.error import HTTPError

from cluster.access import Access
from tandem.errors import ClusterError, ConfigError

TIMEOUT_S = 60.0


def complete(url: str, access: Access, *, max_tokens: int) -> str:
    """The text that completes a fixed prompt. `url` is "http://host:port". Raises ClusterError, ConfigError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--http must be a URL such as http://127.0.0.1:8000, got {url!r}")
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": max_tokens, "temperature": 0}).encode()
    headers = {"content-type": "application/json", **dict(access.metadata())}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", data=body, headers=headers)
    try:
        with _opener(access).open(request, timeout=TIMEOUT_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except HTTPError as exc:
        with exc:
            raise ClusterError(f"{url} answers {exc.code}: {_message(exc.read())}") from exc
    except (OSError, ValueError, LookupError) as exc:
        raise ClusterError(f"{url} does not answer as it should: {exc}") from exc


def _opener(access: Access) -> urllib.request.OpenerDirector:
    ca_file = None if access.tls_ca_file is None else str(access.tls_ca_file)
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if access.tls_cert_file is not None:
            context.load_cert_chain(access.tls_cert_file, access.tls_key_file)
    except OSError as exc:
        raise ConfigError(f"the files for TLS cannot be used: {exc}") from exc
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )


def _message(body: bytes) -> str:
    """OpenAI's error message, or what came instead."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]
