"""One-line structured logs on stderr: time, level, logger, message, then key=value pairs given as `extra`."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from tandem.errors import ConfigError

LEVEL_VARIABLE = "TANDEM_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class LineFormatter(logging.Formatter):
    """Every record on one line; traces too, with their line breaks escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """`2026-01-31T12:00:00.123Z INFO router.frontend request ended code=ok request_id=r1`."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        pairs = {key: value for key, value in vars(record).items() if key not in _STANDARD and key[0] != "_"}
        if record.exc_info:
            pairs["trace"] = self.formatException(record.exc_info)
        message = record.getMessage().replace("\n", "\\n")
        parts = [at, record.levelname, record.name, message, *(f"{k}={_quoted(v)}" for k, v in pairs.items())]
        return " ".join(parts)


def setup_logging(level: str | None = None) -> None:
    """Sends the process's logs to stderr, one line each; replaces earlier handlers. Idempotent.

    `level` wins over $TANDEM_LOG_LEVEL; INFO where neither is set. Raises ConfigError for an unknown level.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "INFO").upper()
    if name not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} must be one of {', '.join(_LEVELS)}, got {name!r}", param=LEVEL_VARIABLE)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(name)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)
