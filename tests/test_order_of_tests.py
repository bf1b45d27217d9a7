"""How tests are dealt out to several processes: what belongs together stays together, the longest come first."""

from __future__ import annotations

from tests.conftest import place_in_order, scope_of

A_CLUSTER = "tests/e2e/test_one_pair.py::test_curl_works"
ANOTHER_CLUSTER = "tests/cluster/test_up.py::test_a_model_that_does_not_exist_is_one_line_and_exit_status_1"
OWN_ADDRESSES = "tests/e2e/test_nodes.py::test_requests_are_served"
DEPLOYED = "tests/kube/test_live.py::test_an_uninstalled_chart_leaves_no_pod_and_no_process"
SHORT = "tests/router/test_slot.py::test_anything"


def test_clusters_that_would_meet_at_addresses_are_of_one_scope_and_others_are_not() -> None:
    assert scope_of(A_CLUSTER) == scope_of(ANOTHER_CLUSTER)
    assert len({scope_of(test) for test in (A_CLUSTER, OWN_ADDRESSES, DEPLOYED, SHORT)}) == 4


def test_clusters_come_first_and_short_modules_last() -> None:
    tests = [SHORT, DEPLOYED, OWN_ADDRESSES, ANOTHER_CLUSTER, A_CLUSTER]
    assert sorted(tests, key=place_in_order) == [ANOTHER_CLUSTER, A_CLUSTER, DEPLOYED, OWN_ADDRESSES, SHORT]
