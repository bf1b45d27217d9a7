"""How the command line looks: progress on stderr, tables, and plain text wherever the output is not a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.cluster_info import ClusterInfo
from cluster.events import WORKERS_PHASE, Phase


class ConsoleProgress:
    """Shows waits on stderr: spinners with their time on a terminal, a line at each end elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bars = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> ConsoleProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def pause(self) -> None:
        """Takes the spinners away while something else is shown."""
        self._bars.stop()

    def stopping(self, was_ready: bool) -> None:
        """A signal came: spinners end, and a line says what happens now."""
        self._bars.stop()
        text = "running requests may finish; once more to stop at once" if was_ready else "once more to stop at once"
        self._console.print(f"stopping: {text}", markup=False)

    def forced(self) -> None:
        """The process ends now, without unwinding: the terminal must be as it was."""
        self._console.show_cursor(True)

    def resume(self, name: str) -> None:
        """Shows the spinners of waits from here on, `name` first."""
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()
        self._bars.start()
        self.begin(name)

    def begin(self, name: str) -> None:
        """A wait began."""
        self._tasks[name] = self._bars.add_task(name, total=1)

    def done(self, phase: Phase) -> None:
        """A wait ended."""
        self._bars.update(self._tasks[phase.name], completed=1)
        if not self._console.is_terminal:
            self._console.print(f"{phase.name}: {phase.duration_s:.1f} s", markup=False)

    def note(self, text: str) -> None:
        """Something happened."""
        self._console.print(text, markup=False, style="dim")


def startup_table(info: ClusterInfo) -> Table:
    """Where the start-up time went; phases overlap."""
    table = Table("phase", "from", "to", "took", title=f"ready in {info.total_s:.1f} s (phases overlap)", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in sorted(info.startup, key=lambda phase: phase.start_s):
        table.add_row(phase.name, f"{phase.start_s:.1f} s", f"{phase.end_s:.1f} s", f"{phase.duration_s:.1f} s")
        for name, took_s in _inner_phases(info, phase.name):
            table.add_row(f"    {name}", "", "", f"{took_s:.1f} s", style="dim")
    return table


def _inner_phases(info: ClusterInfo, phase: str) -> Sequence[tuple[str, float]]:
    if phase.startswith("router: process"):
        return list(info.router_startup.items())
    if phase == WORKERS_PHASE:
        return [(f"{w.worker_id}: {name}", took_s) for w in info.workers for name, took_s in w.startup.items()]
    return []


class CheckProgress:
    """How many of `total` checks are over and which run now, as one line on a terminal; nothing elsewhere."""

    def __init__(self, console: Console, *, total: int) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"))
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._total = total
        self._num_done = 0
        self._running: list[str] = []
        self._task = self._bar.add_task(str(self))

    def __str__(self) -> str:
        running = f", now {' and '.join(self._running)}" if self._running else ""
        return f"{self._num_done} of {self._total} checks done{running}"

    def __enter__(self) -> CheckProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, name: str) -> None:
        """A check runs now."""
        self._running.append(name)
        self._bar.update(self._task, description=str(self))

    def done(self, name: str) -> None:
        """A check is over."""
        self._running.remove(name)
        self._num_done += 1
        self._bar.update(self._task, description=str(self))
