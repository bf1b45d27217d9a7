"""`tandem simulate` as users call it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.simulator.report import print_splits
from cluster.simulator.splits import try_splits
from cluster.simulator.summary import Slo
from tests.published_configs import PUBLISHED
from tests.simulated import make_arrival, make_plant

FEW = ("--requests", "20", "--output-tokens", "20")


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def figures(*arguments: str) -> dict[str, Any]:
    status, out, err = invoke(*arguments, "--json")
    assert status == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_people_read_what_is_simulated_and_what_comes_of_it() -> None:
    status, out, _ = invoke(*FEW)
    assert status == 0
    assert "llama-3.1-8b: 16.1 GB of weights, 128 KiB of KV a token" in out
    for words in (
        "20 requests in",
        "time to first token",
        "transfer after prefill",
        "decode: busy",
        "messages a handoff",
    ):
        assert words in out


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    assert figures(*FEW, "--seed", "3") == figures(*FEW, "--seed", "3") != figures(*FEW, "--seed", "4")


def test_a_slower_link_is_exposed_for_longer() -> None:
    fast, slow = (figures(*FEW, "--link-gbps", gbps)["exposed_p90_s"] for gbps in ("50", "1"))
    assert slow > 10 * fast


def test_every_cut_of_some_workers_is_tried() -> None:
    answer = figures(*FEW, "--workers", "3")
    assert list(answer["splits"]) == ["1 + 2", "2 + 1", "colocated"]
    assert answer["best"] in answer["splits"]
    status, out, _ = invoke(*FEW, "--workers", "3")
    assert status == 0
    assert f"most requests within the promise: {answer['best']}" in out or answer["best"] == "colocated"


def test_a_cluster_is_simulated_as_it_is_configured(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-7B"]))
    config = tmp_path / "cluster.yaml"
    config.write_text(
        f"model: {{source: {model}}}\nprefill: {{num_workers: 2, num_blocks: 300}}\ndecode: {{num_blocks: 300}}\n"
    )
    status, out, _ = invoke(*FEW, "--config", str(config), "--prompt-tokens", "900")
    assert status == 0
    assert "model: 15.2 GB of weights, 56 KiB of KV a token" in out
    assert "300 and 300 a worker; 512 tokens a prefill iteration" in out


def test_defaults_that_a_configuration_leaves_out_are_named_with_what_would_suit_the_device(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("prefill: {num_blocks: 30000}\ndecode: {max_batch_sequences: 256}\ncluster: rack\n")
    status, _, err = invoke(*FEW, "--config", str(config), "--model", "llama-3.1-8b")
    assert status == 0
    [line] = [line for line in err.splitlines() if "leaves out" in line]
    assert f"{config} leaves out, and a live cluster takes too (in brackets what suits h100): " in line
    assert "prefill.max_batch_tokens 512 (2,048)" in line
    assert "decode.num_blocks 2,048 (" in line
    assert "prefill.num_blocks" not in line
    assert "decode.max_batch_sequences" not in line
    assert "leaves out" not in invoke(*FEW)[2]


def test_a_configuration_that_the_device_could_not_hold_is_simulated_with_a_word(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("decode: {tensor_parallel: 2}\n")
    status, out, err = invoke(*FEW, "--config", str(config), "--model", "llama-3.1-70b", "--json")
    assert status == 0
    assert json.loads(out)["requests"] == 20
    assert err.splitlines() == ["tandem: a prefill worker holds 147 GB of weights and KV, its devices have 80 GB"]


def test_a_trace_is_replayed_and_its_prefixes_are_found(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]}
    trace = tmp_path / "trace.jsonl"
    lines = (json.dumps({**row, "timestamp": 10_000 * number}) for number in range(4))
    trace.write_text("\ufeff" + "\n".join(lines) + "\n\n")  # some editors begin a file with a mark
    answer = figures("--trace", str(trace), "--prefill", "1", "--decode", "1")
    assert answer["requests"] == 4
    assert answer["cached_share"] == pytest.approx(0.75, abs=0.01)
    assert figures("--trace", str(trace), "--requests", "2")["requests"] == 2


def test_the_model_that_comes_with_tandem_is_described_by_its_file() -> None:
    status, out, _ = invoke(*FEW, "--model", "smollm2-135m-instruct", "--prompt-tokens", "100")
    assert status == 0
    assert "smollm2-135m-instruct: 0.269 GB of weights, 22 KiB of KV a token" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "changed by --tflops, --memory-gbps and --memory-gb, got 'abacus'"),
        (["--model", "nothing"], "no model 'nothing'"),
        (["--model", "llama-3.1-70b"], "leaves no room for KV"),
        (["--trace", "/nonexistent"], "/nonexistent cannot be read"),
        (["--workers", "1"], "--workers"),
        (["--rate", "0"], "--rate"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(arguments: list[str], message: str) -> None:
    status, _, err = invoke(*arguments)
    assert status == 2
    assert message in err


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, '{"timestamp": 1}', ""])
def test_a_trace_that_is_none_is_said_in_a_line(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    status, _, err = invoke("--trace", str(trace))
    assert status == 2
    assert "trace" in err or "requests" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "4", "--prefill", "2"], "--prefill says nothing with --workers"),
        (["--trace", "t.jsonl", "--rate", "2"], "--rate says nothing with --trace"),
        (["--trace", "t.jsonl", "--prompt-tokens", "2000"], "--prompt-tokens says nothing with --trace"),
        (["--speed", "2"], "--speed says nothing without --trace"),
    ],
)
def test_an_option_that_would_be_passed_over_is_refused(arguments: list[str], message: str) -> None:
    status, _, err = invoke(*arguments)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rate", "inf"),
        ("--prompt-tokens", "inf"),
        ("--output-tokens", "1e18"),
        ("--spread", "1e300"),
        ("--link-us", "inf"),
        ("--link-gbps", "nan"),
        ("--overhead-ms", "inf"),
        ("--memory-gb", "1e30"),
        ("--workers", "100000"),
        ("--requests", "100000000000"),
    ],
)
def test_numbers_beyond_all_reason_are_refused_by_their_option(option: str, value: str) -> None:
    status, _, err = invoke(option, value)
    assert status == 2
    assert option in err


def test_columns_of_cuts_are_whole_on_a_narrow_terminal() -> None:
    plant = make_plant()
    splits = list(try_splits(plant, [make_arrival()], num_workers=2, slo=Slo(ttft_s=1, tbt_s=1)))
    console = Console(width=60, file=io.StringIO(), force_terminal=True, no_color=True)
    print_splits(splits, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in ("prefill + decode", "1 + 1", "colocated", "within the promise", "goodput/s"):
        assert words in text
