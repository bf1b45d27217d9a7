"""Golden renders of the presets: `python -m tests.helm.golden` writes them again, `test_golden.py` compares."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.helm.chart import PRESETS, preset, render

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> str:
    """A preset's render as one stable text."""
    objects = render(preset(name), *([{"kuberay": {"authTokenSecret": {"name": "ray-token"}}}] if is_ray(name) else []))
    return yaml.safe_dump_all(objects, sort_keys=True, width=120, allow_unicode=True)


def is_ray(name: str) -> bool:
    """Whether the preset is for the operator; then Ray's token, which is drawn at random, is given."""
    return bool(preset(name).get("kuberay", {}).get("enabled"))


def main() -> None:
    """Writes every one."""
    GOLDEN.mkdir(exist_ok=True)
    for name in PRESETS:
        (GOLDEN / f"{name}.yaml").write_text(golden(name))


if __name__ == "__main__":
    main()
