"""vLLM beside our engine: the same weights as a Hugging Face directory, a process on the same cores, asked in lines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tandem.model.files import ModelFiles

ENVIRONMENT = Path(__file__).resolve().parents[1] / ".venv-vllm"


def why_not() -> str | None:
    """Why vLLM cannot be measured here; None if it can."""
    return None if (ENVIRONMENT / "bin" / "python").exists() else "run `make bench-peers` first"


def _converted(files: ModelFiles) -> Path:
    """The same weights as transformers reads and writes them, fp32.

    Always in the same place, by which vLLM knows again what it has compiled.
    """
    directory = ENVIRONMENT / "models" / files.name
    if (directory / "config.json").exists():
        return directory
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    weights = files.weights[0]
    source = {"gguf_file": weights.name} if files.kind == "gguf" else {}
    read = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **source)
    if files.kind == "gguf":
        del read.config.quantization_config  # transformers does not write what it read as GGUF
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    for file in files.tokenizer_dir.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(file, directory)
    return directory


class VllmPeer:
    """One vLLM engine, bound to the cores of this process, one thread for each of `num_threads`."""

    def __init__(self, files: ModelFiles, num_threads: int, log: Path) -> None:
        """Compiles for minutes. Raises RuntimeError when it does not start; `log` has what it said."""
        directory = _converted(files)
        cores = sorted(os.sched_getaffinity(0))[-num_threads:]
        libraries = [*ENVIRONMENT.glob("deb/root/**/libtcmalloc_minimal.so.4"), ENVIRONMENT / "lib" / "libiomp5.so"]
        with log.open("w") as noise:
            self._process = subprocess.Popen(
                [
                    str(ENVIRONMENT / "bin" / "python"),
                    str(Path(__file__).with_name("vllm_engine.py")),
                    str(directory),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": "",
                    "LD_PRELOAD": ":".join(map(str, libraries)),
                    "OMP_NUM_THREADS": str(num_threads),
                    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                    "VLLM_CPU_KVCACHE_SPACE": "2",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "HF_HUB_OFFLINE": "1",
                },
            )
        self._answer()

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt to its first token, by its own process's clock."""
        return self._ask(f"prefill {num_tokens}")

    def hold(self, count: int, context: int) -> None:
        """From now on `step` is an iteration of `count` sequences with about `context` tokens each."""
        self._ask(f"hold {count} {context}")

    def step(self) -> float:
        """Seconds of one iteration."""
        return self._ask("step")

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate(timeout=60)

    def _ask(self, command: str) -> float:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise RuntimeError(f"vLLM: {answer['error']}")
        return float(answer["ok"])
