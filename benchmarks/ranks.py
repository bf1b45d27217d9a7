"""One long prompt through workers of one rank and of two: the time it takes, and each process's peak memory.

A small random model, so what is measured is what cutting costs: sums over ranks, two senders, two halves of a handoff.
On a machine with as few cores as ranks, two ranks cannot be quicker than one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.cluster_up import cluster_up
from benchmarks.load import Load
from benchmarks.report import finish
from tandem.rpc.client import open_channel
from tandem.rpc.tandem.v1 import inference_pb2_grpc

BLOCK_SIZE = 16
MAX_TOKENS = 8
_RANKS = ("RayWorker", "RayRank")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one cluster did."""

    tokens: tuple[int, ...]
    request_s: float
    peak_rss_bytes: dict[str, int]
    """By process: worker id, with the rank where it is not 0."""


def save_model(directory: Path, max_tokens: int) -> Path:
    """A random Llama of 3 layers and 4 heads of 16, with a byte for each token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_tokens,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory


def config_of(model: Path, num_tokens: int, *, tp: int) -> dict[str, Any]:
    """A prefill worker of `tp` ranks and a decode worker of one, with room for one prompt."""
    num_blocks = num_tokens // BLOCK_SIZE + 64
    return {
        "model": {"source": str(model), "block_size": BLOCK_SIZE},
        "prefill": {"tensor_parallel": tp, "num_blocks": num_blocks, "num_threads": 1, "max_batch_tokens": 512},
        "decode": {"num_blocks": num_blocks, "num_threads": 1},
        "transfer": {"transport": "shm"},
    }


def peak_rss_bytes() -> dict[str, int]:
    """VmHWM of every worker's process."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        name = "".join(process.cmdline())
        if any(kind in name for kind in _RANKS):
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            found[f"{name.partition('.')[0]} {process.pid}"] = int(peak.split()[1]) * 1024
    return found


async def ask(endpoint: str, prompt: list[int]) -> tuple[tuple[int, ...], float]:
    """The prompt's answer, and how long it took. Raises RuntimeError."""
    async with open_channel(endpoint) as channel:
        load = Load(prompts={"long": prompt}, max_tokens=MAX_TOKENS)
        outcome = await load.send(inference_pb2_grpc.InferenceStub(channel), "long")
    if outcome.error:
        raise RuntimeError(outcome.error)
    return outcome.tokens, outcome.end_s - outcome.start_s


def run(model: Path, prompt: list[int], *, tp: int) -> Run:
    """One cluster from its start to its end."""
    config = config_of(model, len(prompt), tp=tp)
    with tempfile.TemporaryDirectory() as directory, cluster_up(Path(directory), config) as ready:
        tokens, request_s = asyncio.run(ask(ready["grpc"], prompt))
        return Run(tokens=tokens, request_s=request_s, peak_rss_bytes=peak_rss_bytes())


def main() -> int:
    """Exit status 0 when both gave the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4,096 tokens instead of 32,768")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    num_tokens = 4_096 if arguments.quick else 32_768
    draw = random.Random(1)
    prompt = [draw.randrange(256) for _ in range(num_tokens)]
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory), num_tokens + 256)
        started_s = time.monotonic()
        runs = {tp: run(model, prompt, tp=tp) for tp in (1, 2)}
    figures = {"total_s": time.monotonic() - started_s}
    for tp, each in runs.items():
        figures[f"tp{tp}_request_s"] = each.request_s
        for index, (name, peak) in enumerate(sorted(each.peak_rss_bytes.items())):
            figures[f"tp{tp}_{index}_{name.partition(' ')[0]}_peak_mb"] = peak / 1e6
    ratios = {
        "tp2_vs_tp1_request": runs[2].request_s / runs[1].request_s,
        "same_tokens": float(runs[1].tokens == runs[2].tokens),
    }
    finish(figures, ratios, arguments.json, f"ranks: a prompt of {num_tokens:,} tokens")
    return 0 if ratios["same_tokens"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
