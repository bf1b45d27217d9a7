"""GPUs and the links between them, as nvidia-smi sees them. torch is loaded only where there is a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from cluster.checks.finding import Finding, Reporter, Settings

_TIMEOUT_S = 15.0
_QUERY = "name,memory.total,memory.used,driver_version"
_NO_DEVICE = "no NVIDIA device here (no /dev/nvidia* and no nvidia-smi)"


def _nvidia_smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )


def has_nvidia(settings: Settings) -> bool:
    """Whether there is a device or its tool."""
    return shutil.which("nvidia-smi") is not None or any(Path(settings.dev_dir).glob("nvidia[0-9]*"))


def check_gpu(settings: Settings) -> list[Finding]:
    """GPUs, their memory, and whether torch can use them."""
    report = Reporter("gpu")
    if not has_nvidia(settings):
        return report.skipped(f"{_NO_DEVICE}: models run on the CPU")
    if shutil.which("nvidia-smi") is None:
        return report.warning("NVIDIA devices, but no nvidia-smi", "install the driver's tools to see what they do")
    answer = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    if answer.returncode:
        return report.problem(
            f"nvidia-smi fails: {(answer.stderr or answer.stdout).strip()}", "reinstall or reload the NVIDIA driver"
        )
    gpus = [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    if not gpus:
        return report.skipped("nvidia-smi lists no GPU")
    found = "; ".join(f"{name} ({used} of {total} MiB used)" for name, total, used, _ in gpus)
    return _with_torch(report, f"{len(gpus)} GPUs, driver {gpus[0][3]}: {found}")


def _with_torch(report: Reporter, found: str) -> list[Finding]:
    import torch

    if torch.version.cuda is None:
        return report.warning(
            f"{found}; torch {torch.__version__} is built without CUDA", "install a CUDA build of the same torch"
        )
    if not torch.cuda.is_available():
        return report.warning(
            f"{found}; torch {torch.__version__} for CUDA {torch.version.cuda} cannot use them",
            "compare the driver's version with what this CUDA needs, and look at CUDA_VISIBLE_DEVICES",
        )
    return report.ok(f"{found}; torch {torch.__version__} sees {torch.cuda.device_count()}")


def nvlink_pairs(topology: str) -> tuple[int, int]:
    """(pairs of GPUs with NVLink, all pairs) out of `nvidia-smi topo -m`."""
    lines = [line.split() for line in topology.splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words[1:]]
    linked = sum(
        bool(re.fullmatch(r"NV\d+", words[column + 1]))
        for row, words in enumerate(rows)
        for column in range(row)
        if column + 1 < len(words)
    )
    return linked, len(rows) * (len(rows) - 1) // 2


def check_nvlink(settings: Settings) -> list[Finding]:
    """Whether all GPUs of this host are joined by NVLink."""
    report = Reporter("nvlink")
    if not has_nvidia(settings) or shutil.which("nvidia-smi") is None:
        return report.skipped(_NO_DEVICE)
    answer = _nvidia_smi("topo", "-m")
    if answer.returncode:
        return report.warning(f"nvidia-smi topo fails: {answer.stderr.strip()}", "look at the driver's state")
    linked, pairs = nvlink_pairs(answer.stdout)
    if not pairs:
        return report.skipped("one GPU: there is nothing to link")
    if linked < pairs:
        return report.warning(
            f"{linked} of {pairs} pairs of GPUs have NVLink",
            "keep the ranks of one worker, and pairs of workers that exchange KV, on linked GPUs",
        )
    return report.ok(f"all {pairs} pairs of GPUs have NVLink")
