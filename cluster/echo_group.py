"""A group of commands whose errors about an option say the value that was given, which typer leaves out."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class EchoGroup(TyperGroup):
    """Everything else is typer's."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Raises BadParameter with the value in its message."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as exc:
            from pydantic import ValidationError

            if isinstance(exc.__cause__, ValidationError):
                given = exc.__cause__.errors(include_url=False, include_context=False)[0]["input"]
                exc.message = f"{exc.message}; got {given!r}"
            raise
