"""A whole router in the running event loop: gRPC and HTTP over one frontend, health that follows the workers, drain."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc

from router.api_keys import ApiKeys
from router.auth import KeyInterceptor, KeyLayer
from router.cors import open_to_pages
from router.dispatch import Dispatcher
from router.frontend import Frontend
from router.grpc_service import SERVICE_NAMES, Admin, register
from router.http_server import HttpServer, start_http
from router.lingering import ClosingLayer, age_options
from router.openai_http import make_app
from router.tokenizer import ChatTokenizer
from tandem.config import ClusterConfig, RouterConfig
from tandem.observability.metrics import RouterMetrics
from tandem.rpc.health_port import HealthPort
from tandem.rpc.server import RpcServer, start_server
from tandem.rpc.tls import TlsFiles, grpc_credentials, http_context

_HEALTH_PERIOD_S = 0.2
_LAST_WORDS_S = 1.0
"""Time that ended requests have to tell their clients so."""


class RunningRouter:
    """Made by `serve`. Addresses are host:port, dialable from this host."""

    def __init__(
        self,
        *,
        frontend: Frontend,
        rpc: RpcServer,
        http: HttpServer,
        health: HealthPort | None,
        lingering: ClosingLayer,
        linger_s: float,
    ) -> None:
        self.frontend = frontend
        self._rpc = rpc
        self._http = http
        self._health_port = health
        self._lingering = lingering
        self._linger_s = linger_s
        self._health = asyncio.create_task(self._follow_readiness(), name="router health")
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def grpc_address(self) -> str:
        """Where tandem.v1.Inference and Admin are."""
        return self._rpc.address

    @property
    def http_address(self) -> str:
        """Where the OpenAI API is."""
        return self._http.address

    @property
    def http_url(self) -> str:
        """The same with its scheme."""
        return self._http.url

    @property
    def health_address(self) -> str:
        """Where health checks alone are answered; empty when nowhere."""
        return "" if self._health_port is None else self._health_port.address

    async def drain(self, grace_s: float) -> None:
        """Lingers, refuses new requests, lets running ones end for `grace_s` seconds, ends the rest. Idempotent.

        Both ports still answer: that it is shutting down, and what operators ask.
        """
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s), name="router drain")
        await asyncio.shield(self._draining)

    async def stop(self, grace_s: float) -> None:
        """Drains, then closes both ports. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace_s), name="router stop")
        await asyncio.shield(self._stopping)

    async def _stop(self, grace_s: float) -> None:
        await self.drain(grace_s)
        await asyncio.gather(self._rpc.stop(_LAST_WORDS_S), self._http.stop(_LAST_WORDS_S))

    async def _drain(self, grace_s: float) -> None:
        self._health.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._health
        await self._say(False)
        self._lingering.closing = True
        await asyncio.sleep(self._linger_s)
        await self.frontend.drain(grace_s)

    async def _follow_readiness(self) -> None:
        """gRPC health is pushed to its watchers, and the dispatcher announces nothing: so look, and tell changes."""
        while True:
            await self._say(self.frontend.accepts_requests)
            await asyncio.sleep(_HEALTH_PERIOD_S)

    async def _say(self, serving: bool) -> None:
        await self._rpc.set_serving(serving)
        if self._health_port is not None:
            await self._health_port.set_serving(serving)


def tls_files(router: RouterConfig) -> TlsFiles | None:
    """Where its certificate is; None when it serves in the clear."""
    if not router.tls_cert_file:
        return None
    client_ca = Path(router.tls_client_ca_file) if router.tls_client_ca_file else None
    return TlsFiles(cert=Path(router.tls_cert_file), key=Path(router.tls_key_file), client_ca=client_ca)


async def serve(
    *,
    config: ClusterConfig,
    dispatcher: Dispatcher,
    tokenizer_dir: Path,
    admin: Admin | None = None,
    metrics: RouterMetrics | None = None,
    health: HealthPort | None = None,
) -> RunningRouter:
    """Starts a router on config.router's host and ports; port 0 takes a free one. `health` is the caller's to stop.

    Raises ModelLoadError for an unusable tokenizer, ClusterError when an address cannot be bound.
    """
    tokenizer = await asyncio.to_thread(ChatTokenizer.load, tokenizer_dir)
    return await serve_frontend(
        Frontend(
            dispatcher=dispatcher, tokenizer=tokenizer, config=config.router, metrics=metrics or RouterMetrics()
        ),
        config=config,
        admin=admin,
        health=health,
    )


async def serve_frontend(
    frontend: Frontend, *, config: ClusterConfig, admin: Admin | None = None, health: HealthPort | None = None
) -> RunningRouter:
    """`serve` with a frontend that exists already. Raises ConfigError for unusable certificates or keys."""

    def add_services(server: grpc.aio.Server) -> None:
        register(server, frontend, admin)

    router = config.router
    tls = tls_files(router)
    keys = ApiKeys(Path(router.api_keys_file)) if router.api_keys_file else None
    app = ClosingLayer(make_app(frontend))
    rpc = await start_server(
        router.host,
        router.grpc_port,
        add_services,
        SERVICE_NAMES,
        credentials=None if tls is None else grpc_credentials(tls),
        interceptors=[] if keys is None else [KeyInterceptor(keys)],
        options=age_options(router.linger_s),
    )
    try:
        http = await start_http(
            open_to_pages(app if keys is None else KeyLayer(app, keys), router.cors_origins),
            router.host,
            port=router.http_port,
            tls=None if tls is None else http_context(tls),
        )
    except BaseException:
        await rpc.stop(0)
        raise
    return RunningRouter(
        frontend=frontend,
        rpc=rpc,
        http=http,
        health=health,
        lingering=app,
        linger_s=router.linger_s,
    )
