"""How tests are dealt out to several processes: what belongs together stays together, the longest come first."""

from __future__ import annotations

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
