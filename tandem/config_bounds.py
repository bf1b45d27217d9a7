"""What fields of a configuration may be; every error names field, value and bound. Pure."""

from __future__ import annotations

import re

from tandem.errors import ConfigError


def require(ok: bool, name: str, value: object, bound: str) -> None:
    """Raises ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{name} must be {bound}, got {value!r}", param=name)


def require_ranks(name: str, tp: int, pp: int) -> None:
    """Of a section: sizes of a worker."""
    for kind, size in (("tensor_parallel", tp), ("pipeline_parallel", pp)):
        require(1 <= size <= 64, f"{name}.{kind}", size, "1 to 64")


def require_gpus(name: str, share: float, num_ranks: int) -> None:
    """Of a section: NCCL does not join ranks on one GPU, so only workers of one rank may share one."""
    require(0 < share <= 1, f"{name}.gpus_per_rank", share, "more than 0 and at most 1")
    require(share == 1 or num_ranks == 1, f"{name}.gpus_per_rank", share, "1 for a worker of several ranks")


_LABEL = r"[\w./-]+=!?(?:in\([\w.-]+(?:,[\w.-]+)*\)|[\w.-]+)"
_LABELS = re.compile(rf"{_LABEL}(?:,{_LABEL})*")


def require_labels(value: str, name: str) -> None:
    """Labels and conditions in Ray's words, or nothing."""
    require(not value or _LABELS.fullmatch(value) is not None, name, value, 'like "zone=a,rack=in(r1,r2),gpu=!t4"')


def split_labels(value: str) -> tuple[tuple[str, str], ...]:
    """(label, condition) pairs of a `nodes` field."""
    pairs = (match[0].partition("=") for match in re.finditer(_LABEL, value))
    return tuple((label, condition) for label, _, condition in pairs)
