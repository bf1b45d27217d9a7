"""Tables without lines that can be read in any terminal: one that is too wide is drawn as several, one below another.

Each of these begins with the columns that name a row, and only a cell that would not fit even so goes over several
lines: nothing is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Table

WIDE = 80
"""Columns from which there is air between those of a table."""


def make_table(width: int, *columns: str) -> Table:
    """An empty table without lines, for a console of this width."""
    return _table(columns, gap=_gap(width))


def fitting_tables(
    width: int, columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1
) -> list[Table]:
    """One table where it fits into `width`, else as many as it takes; each has the first `num_names` columns."""
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    everything = list(range(len(columns)))
    for gap in dict.fromkeys((_gap(width), 1)):
        if _width(widths, everything, gap) <= width:
            return [_filled(_table(columns, gap=gap), rows, everything)]
    parts = _parts(widths, width, num_names=num_names)
    return [_filled(_part_table(columns, part, width, num_names=num_names), rows, part) for part in parts]


def _part_table(columns: Sequence[str], part: Sequence[int], width: int, *, num_names: int) -> Table:
    table = _table([columns[column] for column in part], gap=_gap(width))
    for column in table.columns[num_names:]:
        column.no_wrap, column.overflow = False, "fold"
    return table


def _parts(widths: Sequence[int], width: int, *, num_names: int) -> list[list[int]]:
    """The columns of each table: as many beside the names as fit, but at least one."""
    names, gap = list(range(num_names)), _gap(width)
    parts: list[list[int]] = [[]]
    for column in range(num_names, len(widths)):
        if parts[-1] and _width(widths, [*names, *parts[-1], column], gap) > width:
            parts.append([])
        parts[-1].append(column)
    return [names + part for part in parts]


def _gap(width: int) -> int:
    return 2 if width >= WIDE else 1


def _width(widths: Sequence[int], columns: Sequence[int], gap: int) -> int:
    return sum(widths[column] for column in columns) + gap * (len(columns) - 1)


def _filled(table: Table, rows: Sequence[Sequence[str]], shown: Sequence[int]) -> Table:
    for row in rows:
        table.add_row(*(row[column] for column in shown))
    return table


def _table(columns: Sequence[str], *, gap: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
