"""Whether the engine's own kernels were built here, and for which processor."""

from __future__ import annotations

from cluster.checks.finding import Finding, Reporter, Settings
from tandem.errors import ConfigError


def check_kernels(settings: Settings) -> list[Finding]:
    """The kernels, or why torch does their work."""
    from tandem.model.native import CHOICES, VARIABLE, kernels, why_missing

    report = Reporter("kernels")
    try:
        found = kernels()
    except ConfigError as exc:
        return report.problem(exc.message, f"unset {VARIABLE}, or set it to {', '.join(CHOICES)}")
    if found is not None:
        return report.ok(f"our own, for {found.ISA}")
    reason = why_missing()
    if reason == f"{VARIABLE}=torch":
        return report.warning(f"switched off by {reason}: models run in torch, more slowly", f"unset {VARIABLE}")
    return report.warning(
        f"not built ({reason}): models run in torch, more slowly",
        "install a C compiler with OpenMP (gcc) and install Tandem again: make native, or pip install .",
    )
