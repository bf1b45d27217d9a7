"""Every test module must leave the machine as it found it: no child process, shared memory or temporary directory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_UNHURRIED = [HealthCheck.too_slow]
"""How quickly examples are made says how busy the machine is."""
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=_UNHURRIED)
settings.register_profile("search", derandomize=False, deadline=None, print_blob=True, suppress_health_check=_UNHURRIED)
settings.load_profile("suite")  # the same examples each time; `make fuzz` looks for new ones

PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
if PARALLEL:  # temporary directories of its own, so that what is found there is ours, and its share of the cores
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t-")
    Finalize(None, shutil.rmtree, args=(tempfile.tempdir, True), exitpriority=-1000)  # after multiprocessing's own
    torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script: children must not be deaf
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Everywhere the same: tests compute on the CPU, but for those marked `gpu` when they are asked for (`-m gpu`)."""
    asked = str(config.getoption("markexpr"))
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_unconfigure() -> None:
    """xdist ends its processes without what they have for their exit."""
    if PARALLEL:
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


SCOPES = {
    "tests/e2e/test_nodes": "nodes",
    "tests/e2e/test_one_pair": "pairs",
    "tests/e2e/test_two_pairs": "pairs",
    "tests/e2e/": "clusters",
    "tests/cluster/test_hand_over": "clusters",
    "tests/cluster/test_launch": "clusters",
    "tests/cluster/test_ray": "clusters",
    "tests/cluster/test_up": "clusters",
    "tests/kube/": "kube",
}
"""Tests that start clusters of their own, by the beginnings of their modules, the first that fits. Those of one scope
run one after another, so that there are never many at once. Clusters beside each other take free ports."""
LONGEST_FIRST = (
    "pairs",
    "kube",
    "clusters",
    "tests/tandem/model/test_golden",
    "nodes",
    "tests/pools/test_chaos",
    "tests/pools/",
    "tests/tandem/model/",
    "tests/kv_transfer/",
)
"""Beginnings of scopes, in the order in which these are dealt out; all others come after. A long one that began last
would run alone in the end."""

SHARED_MEMORY = Path("/dev/shm")
OUR_DIRECTORY = re.compile(r"tandem-(ray|redis|run)-(\d+)-")
OUR_SEGMENT = re.compile(r"tandem-\w+-(\d+)")
GRACE_S = 5.0
"""How long a process that was told to end may take."""
LASTING_S = 5.0
"""How long a segment must be there: those of processes beside us come and go while we look for who maps them."""


def children() -> set[psutil.Process]:
    """Processes below this one, but for the helper that multiprocessing keeps until the interpreter ends."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if not any("multiprocessing.resource_tracker" in word for word in child.cmdline()):
                found.add(child)
        except psutil.NoSuchProcess:
            continue
    return found


def segments() -> set[str]:
    """Names in shared memory."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def directories() -> set[Path]:
    """Temporary directories of Tandem whose owner is one of us, or dead."""
    places = {Path(tempfile.gettempdir())} | (set() if PARALLEL else {Path("/tmp")})
    found = {path: OUR_DIRECTORY.match(path.name) for place in places if place.is_dir() for path in place.iterdir()}
    return {path for path, match in found.items() if match and not is_foreign(int(match[2]))}


def is_foreign(pid: int) -> bool:
    """Whether a living process outside our tree has this id."""
    return psutil.pid_exists(pid) and pid not in {os.getpid(), *(child.pid for child in children())}


def is_foreign_by_name(name: str) -> bool:
    """Whether the shared memory segment is named after a living process outside our tree."""
    named = OUR_SEGMENT.match(name)
    return named is not None and is_foreign(int(named[1]))


def mapped_by_others(name: str) -> bool:
    """Whether a process outside our tree uses the shared memory segment: then it is not ours."""
    for process in psutil.process_iter():
        try:
            if is_foreign(process.pid) and f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def lasting(names: set[str]) -> set[str]:
    """Of new segments those that stay, and that belong to no process outside our tree."""
    names = {name for name in names if not is_foreign_by_name(name)}
    give_up = time.monotonic() + LASTING_S
    while names := {name for name in names & segments() if not mapped_by_others(name)}:
        if time.monotonic() > give_up:
            return names
        time.sleep(0.1)
    return names


def left_over(before: tuple[set[psutil.Process], set[str], set[Path]]) -> list[str]:
    """What has come since `before` and is still there, in words."""
    old_children, old_segments, old_directories = before
    _, alive = psutil.wait_procs(children() - old_children, timeout=GRACE_S)
    found = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in alive if p.is_running()]
    found += [f"shared memory {name}" for name in lasting(segments() - old_segments)]
    found += [f"directory {path}" for path in directories() - old_directories]
    return found


def scope_of(nodeid: str) -> str:
    """Tests of one scope run in one process: a module's, for what they share, and those that start clusters."""
    module = nodeid.partition("::")[0]
    return next((scope for beginning, scope in SCOPES.items() if module.startswith(beginning)), module)


def place_in_order(nodeid: str) -> int:
    """The lower, the earlier."""
    places = (place for place, scope in enumerate(LONGEST_FIRST) if scope_of(nodeid).startswith(scope))
    return next(places, len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes begin with what takes longest; one has the order of the files."""
    if PARALLEL:
        items.sort(key=lambda item: place_in_order(item.nodeid))  # stable: a module's tests stay as they are


class ByScope(LoadScopeScheduling):
    """Deals out whole scopes."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Takes back what a process that ended had not run, but for the test it ended in, which is reported as failed.

        xdist's own way (3.8.0) puts back all scopes the process ever had. Those without a test left to run bring the
        process that draws them no word of it, and it waits for ever with its last test unrun.
        """
        scopes = self.assigned_work.pop(node)
        crashed = next((test for tests in scopes.values() for test, done in tests.items() if not done), None)
        if crashed is not None:
            scopes[scope_of(crashed)][crashed] = True
            self.workqueue.update({scope: tests for scope, tests in scopes.items() if not all(tests.values())})
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Gives a process what it may go on with: it runs a test only when it has the next one, or was told to end."""
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """How tests are dealt out to processes."""
    return ByScope(config, log)


@pytest.fixture(scope="session", autouse=True)
def keys_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keys of clusters that tests start are kept apart from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails the module that leaves something behind."""
    before = (children(), segments(), directories())
    yield
    if found := left_over(before):
        pytest.fail("left behind:\n" + "\n".join(found), pytrace=False)
