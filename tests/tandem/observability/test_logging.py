"""Logs are one line each, on stderr, at the level that was asked for."""

from __future__ import annotations

import logging
import sys

import pytest

from tandem.errors import ConfigError
from tandem.observability.logging import LineFormatter, setup_logging


@pytest.fixture(autouse=True)
def _root_logger_restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def formatted(message: str, *, exc_info: object = None, **extra: object) -> str:
    record = logging.getLogger("a.b").makeRecord(
        "a.b",
        logging.INFO,
        "f.py",
        1,
        message,
        (),
        exc_info,
        extra=extra,  # type: ignore[arg-type]
    )
    return LineFormatter().format(record)


def test_a_record_is_time_level_logger_message_and_pairs():
    line = formatted("request ended", request_id="r1", note='two "words"', empty="")
    at, rest = line.split(" ", 1)
    assert at.endswith("Z")
    assert rest == 'INFO a.b request ended request_id=r1 note="two \\"words\\"" empty=""'


def test_line_breaks_and_traces_stay_on_one_line():
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        line = formatted("first\nsecond", exc_info=sys.exc_info())
    assert "\n" not in line
    assert "first\\nsecond" in line
    assert "ValueError: bad" in line


def test_the_level_comes_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "warning")
    setup_logging()
    logging.getLogger("a.b").info("hidden")
    logging.getLogger("a.b").warning("shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "WARNING a.b shown" in captured.err


def test_an_unknown_level_is_a_config_error(monkeypatch):
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="TANDEM_LOG_LEVEL"):
        setup_logging()
