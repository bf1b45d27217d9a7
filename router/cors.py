"""Which web pages may call the HTTP API (CORS): none, unless the configuration names their origins.

Outside the check of API keys, because a browser asks for leave without any.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp


def open_to_pages(app: ASGIApp, origins: str) -> ASGIApp:
    """The application, for pages of `origins` (with commas between them, or "*") too."""
    allowed = [origin.strip() for origin in origins.split(",") if origin.strip()]
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
