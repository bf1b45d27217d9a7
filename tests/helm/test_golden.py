"""Presets render to what stands in golden/; after a change on purpose, `make helm-golden` writes it again."""

from __future__ import annotations

import pytest

from tests.helm.chart import PRESETS
from tests.helm.golden import GOLDEN, golden


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_renders_to_its_golden_file(name: str) -> None:
    assert golden(name) == (GOLDEN / f"{name}.yaml").read_text(), "if that is right: make helm-golden"


def test_every_golden_file_has_its_preset() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == PRESETS
