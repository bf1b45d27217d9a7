"""`tandem start`: wrong options are one line and exit status 2."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.start import parse_labels
from tandem.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give either --head or --address HOST:PORT"),
        (["--head", "--address", "10.0.0.1:6390"], "give either --head or --address HOST:PORT"),
        (["--address", "10.0.0.1:6390", "--no-workers"], "--no-workers is a head's: leave it out with --address"),
        (["--address", "10.0.0.1:6390", "--no-router"], "--no-router is a head's: leave it out with --address"),
        (
            ["--address", "10.0.0.1:6390", "--sizes-file", "sizes.yaml", "--end-cluster"],
            "--hand-over and --sizes-file are a head's: leave them out with --address",
        ),
        (["--head", "--hand-over"], "a head that hands over needs a Redis that outlives it"),
        (["--address", "10.0.0.1"], "--address must be HOST:PORT"),
        (["--address", "10.0.0.1:6390"], "give --redis-url"),
        (["--head", "--node-ip", "127.0.0.1"], "127.0.0.2 stays inside"),
        (["--head", "--node-ip", "head.example"], "--node-ip must be an IP address"),
        (["--head", "--label", "rack"], "--label must be KEY=VALUE"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["start", *arguments])
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_head_for_other_machines_needs_a_redis_that_they_reach() -> None:
    result = CliRunner().invoke(app, ["start", "--head", "--node-ip", "10.0.0.1"])
    assert result.exit_code == 2
    assert "give --redis-url" in result.stderr


def test_labels_are_read_as_pairs() -> None:
    assert parse_labels(["rack=r7", "zone=a=b"]) == {"rack": "r7", "zone": "a=b"}
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_labels(["=r7"])
