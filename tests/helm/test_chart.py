"""The chart as a whole: lint, package, notes, and that what is generated is fresh."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import helm_python
import pytest
import yaml

from tests.helm.chart import CHART, FIXED, PRESETS, ROOT, merged, notes, preset
from tools.chart import SET_BY_CHART, config_fields, generated

INFO = 1
"""Of lint's severities: 2 is a warning, 3 an error."""
HELM = ROOT / ".tools" / "bin" / "helm"


@pytest.mark.parametrize("name", PRESETS)
def test_lint_finds_nothing(name: str) -> None:
    result = helm_python.lint(CHART, merged(FIXED, preset(name)), strict=True, namespace="llm")
    assert [m for m in result["messages"] if m["severity"] > INFO] == []


def run_helm(*arguments: str | Path) -> str:
    if not HELM.exists():
        pytest.skip("helm is not in .tools/bin: make helm-tools")
    return subprocess.run([HELM, *arguments], check=True, capture_output=True, text=True).stdout


def test_helm_itself_lints_every_preset_strictly() -> None:
    for name in PRESETS:
        run_helm("lint", "--strict", CHART, "--values", CHART / "presets" / f"{name}.yaml")


def test_helm_itself_refuses_old_clusters_for_nvlink_domains() -> None:
    preset_file = CHART / "presets" / "gb200.yaml"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_helm("template", "demo", CHART, "--values", preset_file, "--kube-version", "1.31.0")
    assert "write topology.mode: pool" in caught.value.stderr


def test_a_package_has_what_templates_read_and_no_more(tmp_path: Path) -> None:
    run_helm("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("tandem-*.tgz")
    loaded = helm_python.Chart.load(package)
    rendered = loaded.render(merged(FIXED, preset("production")), name="demo", namespace="llm")
    assert any("dashboard-requests" in text for text in rendered.values())
    assert package.stat().st_size < 200_000


def test_what_is_generated_is_fresh() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in generated().items() if path.read_text() != text]
    assert stale == [], "make chart"


def test_every_field_of_the_configuration_is_the_chart_s_or_the_user_s() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    for field in config_fields():
        section = schema["$defs"]["config"]
        for name in field.split("."):
            section = section["properties"].get(name, {}) if section else {}
        assert bool(section) is (field not in SET_BY_CHART), field


def test_defaults_and_schema_have_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    own = {name: section for name, section in schema["properties"].items() if "properties" in section}
    optional = {"node", "prefill", "decode"}
    for name, section in own.items():
        assert set(values[name]) <= set(section["properties"])
        if name not in optional:
            assert set(values[name]) == set(section["properties"]), name


def test_the_chart_s_app_version_is_tandem_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert metadata["appVersion"] == project["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[\w.]+)?", metadata["version"])


def test_ray_in_the_cluster_is_the_one_in_the_image() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert yaml.safe_load((CHART / "values.yaml").read_text())["kuberay"]["rayVersion"] == pins["ray"]


def test_notes_tell_the_first_request_the_test_and_the_next_size() -> None:
    text = notes(preset("one-node-cpu"))
    assert "curl http://127.0.0.1:8000/v1/completions" in text
    assert "helm -n llm test demo" in text
    assert "--set decode.replicas=2" in text


def test_notes_of_a_guarded_release_give_certificate_and_key() -> None:
    text = notes(preset("production"))
    assert "--cacert ca.crt --resolve demo-tandem-router:8000:127.0.0.1 https://demo-tandem-router:8000/" in text
    assert "Authorization: Bearer $TANDEM_API_KEY" in text
