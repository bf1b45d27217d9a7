"""Mistakes that are found before anything is started."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.child import ReportingChild
from cluster.preflight import check_gpus, check_ports, check_start, gpus_here, warnings
from tandem.config import ClusterConfig, ModelConfig, RouterConfig, from_mapping
from tandem.errors import ClusterError, ConfigError, ModelLoadError
from tests.tiny_model import save_tiny_llama


def make_router(host: str = "127.0.0.1", grpc_port: int = 0, http_port: int = 0) -> RouterConfig:
    return RouterConfig(host=host, grpc_port=grpc_port, http_port=http_port)


def why_not(router: RouterConfig, *, has_port_options: bool = True) -> str:
    with pytest.raises(ClusterError) as caught:
        check_ports(router, has_port_options=has_port_options)
    return caught.value.message


def test_what_can_be_started_is_let_through() -> None:
    check_start(ClusterConfig(router=make_router()))


@pytest.mark.parametrize("chosen", ["avx512", "best", "Torch"])
def test_kernels_that_there_are_not_are_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("TANDEM_KERNELS", chosen)
    with pytest.raises(ConfigError, match=f"TANDEM_KERNELS must be torch, base, avx2 or not set, got '{chosen}'"):
        check_start(ClusterConfig(router=make_router()))


@pytest.mark.parametrize("chosen", ["torch", "base", "avx2", ""])
def test_kernels_that_there_are_are_let_through(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("TANDEM_KERNELS", chosen)
    check_start(ClusterConfig(router=make_router()))


@pytest.mark.parametrize(
    ("pool", "named"),
    [
        ({"prefill": {"tensor_parallel": 3}}, "4 attention heads"),
        ({"decode": {"pipeline_parallel": 4}}, "3 layers"),
        ({"decode": {"tensor_parallel": 4}}, ""),
    ],
)
def test_a_model_that_cannot_be_cut_as_configured_is_found(
    tmp_path: Path, pool: dict[str, dict[str, int]], named: str
) -> None:
    model = save_tiny_llama(tmp_path / "model", num_kv_heads=2)
    config = from_mapping(
        {"model": {"source": str(model)}, "router": {"grpc_port": 0, "http_port": 0}, **pool}
    )
    if not named:
        check_start(config)
        return
    with pytest.raises(ConfigError, match=named):
        check_start(config)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", ""])
def test_a_port_in_use_is_named_with_the_option_that_changes_it(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cure = f"port {port} is in use, perhaps by another cluster; give --{{}} (0 takes a free one)"
        assert why_not(make_router(host, grpc_port=port)) == cure.format("grpc-port")
        assert why_not(make_router(host, http_port=port)) == cure.format("http-port")


def test_a_head_is_told_the_field_of_its_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        router = make_router(http_port=other.getsockname()[1])
        assert "set router.http_port" in why_not(router, has_port_options=False)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "router.host 192.0.2.1 is not an address of this host"),
        ("no such host", "router.host 'no such host' is no address"),
    ],
)
def test_an_address_that_is_not_ours_is_named(host: str, message: str) -> None:
    assert why_not(make_router(host)).startswith(message)


def test_two_servers_cannot_have_one_port() -> None:
    with pytest.raises(ConfigError, match=r"router\.http_port must be another port than router\.grpc_port, got 8000"):
        from_mapping({"router": {"grpc_port": 8000, "http_port": 8000}})


def test_an_unknown_model_is_found_before_the_start() -> None:
    with pytest.raises(ModelLoadError, match="no model 'no-such-model'"):
        check_start(ClusterConfig(model=ModelConfig(source="no-such-model"), router=make_router()))


def test_a_model_of_a_kind_that_is_not_supported_is_found_before_the_start(tmp_path: Path) -> None:
    directory = save_tiny_llama(tmp_path, num_kv_heads=2)
    model = ModelConfig(source=str(directory))
    check_start(ClusterConfig(model=model, router=make_router()))
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "mlp_bias": True}))
    with pytest.raises(ModelLoadError, match="mlp_bias True is not supported"):
        check_start(ClusterConfig(model=model, router=make_router()))


@pytest.mark.parametrize("command", [("up", "--model", "gone"), ("demo", "--model", "gone")])
def test_the_command_line_says_it_in_one_line(command: tuple[str, ...]) -> None:
    line = [sys.executable, "-m", "cluster.cli", *command]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("tandem: no model 'gone'")


def make_devices(directory: Path, count: int) -> str:
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))]:
        (directory / name).touch()
    return str(directory)


def test_gpus_are_counted_without_torch_and_as_they_are_shown(tmp_path: Path) -> None:
    dev_dir = make_devices(tmp_path, 4)
    assert gpus_here(dev_dir=dev_dir) == 4
    assert [gpus_here(dev_dir=dev_dir, visible=visible) for visible in ("", "0", "1,3", "0,1,2,3,4")] == [0, 1, 2, 4]


def test_workers_that_would_wait_for_gpus_for_ever_are_not_started() -> None:
    config = from_mapping({"model": {"device": "cuda"}, "prefill": {"tensor_parallel": 2}})
    check_gpus(config, num_gpus=3)
    with pytest.raises(ConfigError, match="ask for 3 GPUs, this machine has 2: lower"):
        check_gpus(config, num_gpus=2)
    check_gpus(ClusterConfig(), num_gpus=0)


def test_a_gpu_that_is_left_out_is_a_warning() -> None:
    [warning] = [text for text in warnings(ClusterConfig(), num_gpus=1) if "GPU" in text]
    assert warning.startswith("2 GPUs would be needed, this machine has 1: workers compute on the CPU")
    assert not any("GPU" in text for text in warnings(ClusterConfig(), num_gpus=2))
    assert not any("GPU" in text for text in warnings(ClusterConfig()))


def test_checking_loads_none_of_the_heavy_libraries() -> None:
    code = "import sys, cluster.preflight; sys.exit(bool({'ray', 'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tandem router: the tokenizer is broken", "the tokenizer is broken"),
        ("Killed", "the router ended before it was ready: Killed"),
    ],
)
def test_what_a_child_reported_itself_is_said_once(tmp_path: Path, words: str, message: str) -> None:
    async def scenario() -> None:
        child = ReportingChild("router", log=tmp_path / "log")
        await child.start([sys.executable, "-c", f"import sys; print({words!r}, file=sys.stderr)"])
        with pytest.raises(ClusterError) as caught:
            await child.line()
        await child.stop(timeout_s=5.0)
        assert caught.value.message == message

    asyncio.run(scenario())
