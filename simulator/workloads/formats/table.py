"""CSV files with a header line, read by column name."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simulator.workloads.formats.reading import lines
from simulator.workloads.workload import MOST_TOKENS, WorkloadError


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table; knows where it stands."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def number(self, column: str, *, least: float = 0) -> float:
        """A number of at least `least`, or WorkloadError."""
        try:
            value = float(self.cells[column])
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise self.error(column, f"a number from {least} is accepted")
        return value

    def count(self, column: str) -> int:
        """A number of tokens, at least 1: no request has an empty prompt, nor an empty answer. WorkloadError if none."""
        value = self.number(column)
        if value > MOST_TOKENS or value != int(value):
            raise self.error(column, f"a whole number up to {MOST_TOKENS} is accepted")
        return max(int(value), 1)

    def error(self, column: str, accepted: str) -> WorkloadError:
        """The error to raise for what stands in this column."""
        return WorkloadError.at(self.path, self.line, f"{column} is {self.cells[column]!r}; {accepted}")


def rows(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Row]:
    """The table's lines, with those of `columns` and `optional` that it has.

    Raises:
        WorkloadError: no header, a column that is missing, or a line that is too short.
    """
    header: dict[str, int] = {}
    for number, line in lines(path):
        try:
            cells = next(csv.reader([line.decode("utf-8-sig")], strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise WorkloadError.at(path, number, f"no line of a CSV table: {error}") from error
        if not header:
            header = {name.strip(): index for index, name in enumerate(cells)}
            if missing := [name for name in columns if name not in header]:
                raise WorkloadError.at(
                    path,
                    number,
                    f"the header has no {', '.join(missing)}; the columns {', '.join(columns)} are accepted, "
                    f"and there are {', '.join(header)}",
                )
            header = {name: index for name, index in header.items() if name in {*columns, *optional}}
            continue
        if len(cells) <= max(header.values()):
            raise WorkloadError.at(path, number, f"{len(cells)} cells, fewer than the header's")
        yield Row(path, number, {name: cells[index] for name, index in header.items()})
