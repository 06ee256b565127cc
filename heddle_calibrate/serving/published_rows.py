"""Tables of published figures: one row a line, errors with file and line."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")


class PublishedRowsError(ValueError):
    """A table that cannot be read; the message names file, line and column."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: its cells as text, and where it is."""

    path: Path
    number: int
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def positive(self, column: str) -> float | None:
        """Read a cell as a positive number: None for an empty one or "-"."""
        text = self.cells[column]
        if text in ("", "-"):
            return None
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise PublishedRowsError(
                f"{self.path.name}:{self.number}: {column} is {text!r}, not a positive number; "
                "mend it, or leave the line out"
            )
        return value


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is not used, and the rule that says so."""

    line: int
    rule: str


def read_rows(
    paths: Iterable[Path], columns: tuple[str, ...], row_of: Callable[[Line], Row | str]
) -> tuple[list[Row], list[LeftOut]]:
    """Read tables in their order; `row_of` makes a row of a line, or says why it is left out.

    Raises PublishedRowsError with file and line for a table that cannot be read.
    """
    rows: list[Row] = []
    out: list[LeftOut] = []
    for path in paths:
        for line in read_lines(path, columns):
            found = row_of(line)
            if isinstance(found, str):
                out.append(LeftOut(line.number, found))
            else:
                rows.append(found)
    return rows, out


def read_lines(path: Path, columns: tuple[str, ...]) -> Iterator[Line]:
    """Yield the lines of a CSV table with at least these columns.

    Raises PublishedRowsError for a file that cannot be read, a missing column, a line with another
    number of cells.
    """
    try:
        # Excel's "CSV UTF-8" begins with a mark of byte order.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PublishedRowsError(f"cannot read {path}: no such file") from None
    except UnicodeDecodeError as e:
        raise PublishedRowsError(
            f"cannot read {path}: not UTF-8 text (byte {e.start}); save the table as CSV in UTF-8"
        ) from None
    except OSError as e:
        raise PublishedRowsError(f"cannot read {path}: {e.strerror}; name a CSV file") from None
    reader = csv.reader(text.splitlines())
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as e:
        raise PublishedRowsError(f"{path.name}:{reader.line_num}: no line of CSV: {e}") from None
    header = [name.strip() for name in lines[0][1]] if lines else []
    if twice := [name for name in dict.fromkeys(header) if name and header.count(name) > 1]:
        raise PublishedRowsError(f"{path.name}:1: column {', '.join(twice)} is there twice")
    missing = [name for name in columns if name not in header]
    if missing:
        raise PublishedRowsError(
            f"{path.name}:1: no column {', '.join(missing)}; the first line names the columns, "
            f"with commas between: {', '.join(columns)}"
        )
    for number, cells in lines[1:]:
        if not cells:
            continue
        if len(cells) != len(header):
            raise PublishedRowsError(
                f"{path.name}:{number}: {len(cells)} cells under {len(header)} columns: "
                "write one for each, and quotes around a cell with a comma"
            )
        stripped = [cell.strip() for cell in cells]
        yield Line(path, number, dict(zip(header, stripped, strict=True)))
