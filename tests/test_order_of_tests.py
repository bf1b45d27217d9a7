"""How tests are dealt out to several processes: what belongs together stays together, the longest come first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import place_in_order, scope_of

A_PAIR = "tests/e2e/test_one_pair.py::test_curl_works"
TWO_PAIRS = "tests/e2e/test_two_pairs.py::test_a_seed_gives_the_same_tokens_on_every_worker"
A_CLUSTER = "tests/e2e/test_ranks.py::test_two_ranks_give_the_tokens_of_one_engine_and_both_send"
ANOTHER_CLUSTER = "tests/cluster/test_up.py::test_a_model_that_does_not_exist_is_one_line_and_exit_status_1"
NODES = "tests/e2e/test_nodes.py::test_requests_are_served"
DEPLOYED = "tests/kube/test_live.py::test_an_uninstalled_chart_leaves_no_pod_and_no_process"
SHORT = "tests/router/test_slot.py::test_anything"


def test_clusters_of_one_kind_run_one_after_another_and_others_beside_them() -> None:
    assert scope_of(A_PAIR) == scope_of(TWO_PAIRS)
    assert scope_of(A_CLUSTER) == scope_of(ANOTHER_CLUSTER)
    assert len({scope_of(test) for test in (A_PAIR, A_CLUSTER, NODES, DEPLOYED, SHORT)}) == 5


def test_clusters_come_first_and_short_modules_last() -> None:
    tests = [SHORT, NODES, ANOTHER_CLUSTER, A_CLUSTER, DEPLOYED, TWO_PAIRS, A_PAIR]
    assert sorted(tests, key=place_in_order) == [TWO_PAIRS, A_PAIR, DEPLOYED, ANOTHER_CLUSTER, A_CLUSTER, NODES, SHORT]


CONFTEST = """
from tests.conftest import ByScope

def pytest_xdist_make_scheduler(config, log):
    return ByScope(config, log)
"""
SOME_TESTS = """
import pytest

@pytest.mark.parametrize("index", range(4))
def test_anything(index):
    pass
"""
A_TEST_THAT_ENDS_ITS_PROCESS = """
import os, signal

def test_before():
    pass

def test_that_ends_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""


def test_a_process_that_dies_costs_the_test_it_died_in_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for index in range(12):
        (tmp_path / f"test_{index:02}.py").write_text(A_TEST_THAT_ENDS_ITS_PROCESS if index == 8 else SOME_TESTS)
    options = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "1 failed, 46 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "test_08.py::test_that_ends_its_process" in ended.stdout
