"""One check in its own process: `python -m cluster.checks PLACE NAME FD`, settings in $TANDEM_DOCTOR_SETTINGS.

Writes its findings to the descriptor as one JSON list; what libraries print goes elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from cluster.checks.finding import Settings
from cluster.checks.table import CheckSpec

SETTINGS_VARIABLE = "TANDEM_DOCTOR_SETTINGS"


def main(place: str, name: str, fd: int) -> None:
    """Lets through whatever the check raises: the doctor reports it."""
    settings = Settings.from_json(os.environ[SETTINGS_VARIABLE])
    findings = CheckSpec(name=name, place=place).load()(settings)
    with os.fdopen(fd, "w") as answer:
        json.dump([asdict(finding) for finding in findings], answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
