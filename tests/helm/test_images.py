"""The Dockerfiles: pinned bases, only the runtime inside, the user that the chart runs as."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.helm.chart import ROOT, pods, render

FILES = ("Dockerfile", "Dockerfile.cuda")


def lines(name: str) -> list[str]:
    """A Dockerfile's instructions, continued lines joined, comments left out."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE))
    return [line for line in text.splitlines() if line.strip()]


def packages() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}


@pytest.mark.parametrize("name", FILES)
def test_bases_are_arguments_with_pinned_defaults(name: str) -> None:
    bases = [line for line in lines(name) if line.startswith("ARG") and "IMAGE" in line]
    assert bases[0].startswith("ARG BASE_IMAGE=")
    assert all(re.search(r":\d+\.\d+\.\d+[\w.-]*$", base) for base in bases)
    stages = {line.split(" AS ")[1] for line in lines(name) if " AS " in line}
    sources = {line.split()[1] for line in lines(name) if line.startswith("FROM")}
    assert sources - stages <= {"${BASE_IMAGE}", "${DEVEL_IMAGE}"}


def test_every_package_is_sent_to_the_build_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert sent == packages() | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"}


@pytest.mark.parametrize("name", FILES)
def test_installs_are_held_to_the_constraints(name: str) -> None:
    installs = [part for line in lines(name) for part in line.split("&&") if "pip install" in part]
    assert installs
    assert all("-c constraints.txt" in part or "-c pins.txt" in part or "--no-deps" in part for part in installs)


@pytest.mark.parametrize("name", FILES)
def test_the_last_stage_runs_as_the_chart_s_user_and_takes_the_result_alone(name: str) -> None:
    last = lines(name)[max(i for i, line in enumerate(lines(name)) if line.startswith("FROM")) :]
    users = {
        f"{pod['spec']['securityContext']['runAsUser']}:{pod['spec']['securityContext']['runAsGroup']}"
        for _, pod in pods(render())
    }
    assert [line.removeprefix("USER ") for line in last if line.startswith("USER")] == list(users)
    assert all("--from=" in line for line in last if line.startswith("COPY"))
    assert not any("pip install" in line for line in last)


@pytest.mark.parametrize("name", FILES)
def test_that_user_may_read_all_of_it(name: str) -> None:
    build = [line for line in lines(name) if "pip uninstall" in line]
    opened = "&& find /opt/tandem ! -perm -o=r -exec chmod a+rX {} +"
    assert build[0].endswith(opened), "a prepared tokenizer is its maker's alone"


@pytest.mark.parametrize("name", FILES)
def test_an_image_without_the_kernels_in_c_is_not_built(name: str) -> None:
    """A base without OpenMP's library had them compiled, and torch did their work."""
    found = lines(name)
    last = max(i for i, line in enumerate(found) if line.startswith("FROM"))
    (check,) = [i for i, line in enumerate(found) if "why_missing" in line]
    assert check > max(i for i, line in enumerate(found) if line.startswith("COPY --from=build")) > last
    assert any("apt-get install" in line and "libgomp1" in line for line in found[: check + 1])
