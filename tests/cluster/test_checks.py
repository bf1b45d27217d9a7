"""The parts of checks that read what a kernel or a tool says, on trees and texts written for it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from cluster.checks.cgroup import cpu_limit, memory_available_bytes, memory_left_bytes
from cluster.checks.finding import Settings, State, size
from cluster.checks.gpu import check_gpu, check_nvlink, nvlink_pairs
from cluster.checks.model import judge_memory, needed_bytes, num_parameters
from cluster.checks.rdma import check_rdma, ports, uses_rdma
from tandem.config import ClusterConfig
from tandem.model.files import DEFAULT_MODEL, resolve_model
from tandem.model.loader import load_spec
from tests.published_configs import PUBLISHED, read

MIB = 1 << 20

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tSYS\tPXB\t0-63
GPU1\tNV18\t X \tNV18\tSYS\t0-63
GPU2\tSYS\tNV18\t X \tSYS\t64-127
NIC0\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def settings_at(root: Path) -> Settings:
    return Settings(config=ClusterConfig(), sys_dir=str(root), dev_dir=str(root), proc_dir=str(root))


# --- GPUs


def test_pairs_with_nvlink_are_counted_out_of_the_topology() -> None:
    assert nvlink_pairs(TOPOLOGY) == (2, 3)


def test_one_gpu_has_no_pairs() -> None:
    assert nvlink_pairs("\tGPU0\tNIC0\nGPU0\t X \tPXB\n") == (0, 0)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name that is alone in the path; what it prints is its file `answer`."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nread -r line < "{tmp_path}/status"\n/bin/cat "{tmp_path}/answer"\nexit "$line"\n')
    tool.chmod(0o755)
    (tmp_path / "status").write_text("0\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_without_a_gpu_its_checks_are_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for check in (check_gpu, check_nvlink):
        (finding,) = check(settings_at(tmp_path))
        assert finding.state is State.SKIPPED
        assert "no NVIDIA device" in finding.found


def test_gpus_that_torch_cannot_use_are_a_warning(nvidia_smi: Path) -> None:
    (nvidia_smi / "answer").write_text("NVIDIA H200, 143771, 12, 570.1\n")
    (finding,) = check_gpu(settings_at(nvidia_smi))
    assert "NVIDIA H200 (12 of 143771 MiB used)" in finding.found
    assert finding.state is State.WARNING


def test_a_driver_that_does_not_answer_is_a_problem(nvidia_smi: Path) -> None:
    (nvidia_smi / "answer").write_text("Failed to initialize NVML\n")
    (nvidia_smi / "status").write_text("9\n")
    (finding,) = check_gpu(settings_at(nvidia_smi))
    assert finding.state is State.PROBLEM
    assert "Failed to initialize NVML" in finding.found


def test_missing_nvlinks_are_a_warning(nvidia_smi: Path) -> None:
    (nvidia_smi / "answer").write_text(TOPOLOGY)
    (finding,) = check_nvlink(settings_at(nvidia_smi))
    assert (finding.state, finding.found) == (State.WARNING, "2 of 3 pairs of GPUs have NVLink")


# --- RDMA


def make_port(root: Path, *, state: str = "4: ACTIVE") -> Path:
    place = "class/infiniband/mlx5_0/ports/1"
    files = {"state": state, "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
    write(root, {f"{place}/{name}": text + "\n" for name, text in files.items()})
    return root


def test_a_port_is_read_with_state_layer_and_rate(tmp_path: Path) -> None:
    (port,) = ports(str(make_port(tmp_path)))
    assert str(port) == "mlx5_0:1 InfiniBand 400 Gb/sec (4X NDR) ACTIVE"
    assert port.is_active


def test_no_device_is_skipped(tmp_path: Path) -> None:
    (finding,) = check_rdma(settings_at(tmp_path))
    assert finding.state is State.SKIPPED


def test_a_port_without_a_link_is_a_problem(tmp_path: Path) -> None:
    (finding,) = check_rdma(settings_at(make_port(tmp_path, state="1: DOWN")))
    assert (finding.state, "DOWN" in finding.found) == (State.PROBLEM, True)


def test_a_device_that_may_not_be_opened_is_a_problem(tmp_path: Path) -> None:
    (finding,) = check_rdma(settings_at(make_port(tmp_path)))
    assert finding.state is State.PROBLEM
    assert "uverbs" in finding.found


def test_locked_memory_is_looked_at_before_what_ucx_is_told(tmp_path: Path) -> None:
    write(make_port(tmp_path), {"infiniband/uverbs0": ""})
    (finding,) = check_rdma(settings_at(tmp_path))
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    assert finding.state is (State.WARNING if unlimited else State.PROBLEM)
    assert ("UCX_TLS" if unlimited else "memlock") in finding.advice


@pytest.mark.parametrize(
    ("tls", "uses"), [("all", True), ("posix, rc", True), ("posix,sysv,cma,tcp", False), ("", False)]
)
def test_ucx_uses_rdma_only_when_it_is_told_to(tls: str, uses: bool) -> None:
    assert uses_rdma(tls.split(",")) is uses


# --- limits of containers


def test_the_tightest_limit_of_version_2_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self/cgroup": "0::/a/b\n",
            "fs/cgroup/a/memory.max": f"{100 * MIB}\n",
            "fs/cgroup/a/memory.current": f"{30 * MIB}\n",
            "fs/cgroup/a/b/memory.max": "max\n",
            "fs/cgroup/a/b/memory.current": f"{10 * MIB}\n",
            "fs/cgroup/a/b/cpu.max": "150000 100000\n",
        },
    )
    assert memory_left_bytes(proc_dir=str(tmp_path), sys_dir=str(tmp_path)) == 70 * MIB
    assert cpu_limit(proc_dir=str(tmp_path), sys_dir=str(tmp_path)) == 1.5


def test_limits_of_version_1_are_found_below_their_controllers(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self/cgroup": "4:memory:/pod\n2:cpu,cpuacct:/pod\n0::/\n",
            "fs/cgroup/memory/pod/memory.limit_in_bytes": f"{64 * MIB}\n",
            "fs/cgroup/memory/pod/memory.usage_in_bytes": f"{4 * MIB}\n",
            "fs/cgroup/cpu/pod/cpu.cfs_quota_us": "-1\n",
            "fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_left_bytes(proc_dir=str(tmp_path), sys_dir=str(tmp_path)) == 60 * MIB
    assert cpu_limit(proc_dir=str(tmp_path), sys_dir=str(tmp_path)) is None


def test_without_a_container_what_the_kernel_says_is_available(tmp_path: Path) -> None:
    write(tmp_path, {"meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n"})
    assert memory_available_bytes(proc_dir=str(tmp_path), sys_dir=str(tmp_path)) == MIB


def test_the_limits_of_this_host_can_be_read() -> None:
    assert memory_available_bytes() > 0
    assert cpu_limit() is None or cpu_limit() > 0


# --- the model's needs


def test_parameters_are_counted_as_the_model_has_them() -> None:
    spec = load_spec(resolve_model(DEFAULT_MODEL))
    assert num_parameters(spec) == 134_515_008


@pytest.mark.parametrize(
    ("model", "billions"), [("Mixtral-8x7B", 46.70), ("Qwen3-30B-A3B", 30.53), ("gemma-2-2b", 2.614)]
)
def test_parameters_of_experts_and_of_other_families_are_counted(model: str, billions: float) -> None:
    assert num_parameters(read(PUBLISHED[model])) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_worker_needs_weights_and_its_own_pool() -> None:
    spec = load_spec(resolve_model(DEFAULT_MODEL))
    needed = needed_bytes(spec, ClusterConfig())
    assert needed["weights"] == 2 * 134_515_008 * 4
    assert needed["KV pools"] == (1024 + 2048) * 30 * 24_576
    assert needed["swapped KV"] == 256 * 30 * 24_576


@pytest.mark.parametrize(("available", "state"), [(99, "problem"), (110, "warning"), (1000, "ok")])
def test_memory_is_judged_by_what_is_left(available: int, state: str) -> None:
    (finding,) = judge_memory({"weights": 60, "KV pools": 40}, available)
    assert finding.state == state


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (512, 1536, 3 << 20, 5 << 40)] == ["512 B", "1.5 KiB", "3.0 MiB", "5.0 TiB"]


def test_settings_cross_a_process_border_unchanged() -> None:
    settings = Settings(config=ClusterConfig(cluster="x"), shm_dir=os.sep)
    assert Settings.from_json(settings.to_json()) == settings
