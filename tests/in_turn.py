"""Which parts of a large product are tests of every day."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(values: Iterable[object], every: int, *, always: Sequence[object] = ()) -> list[Any]:
    """One value in `every`, and those of `always`; the rest has mark soak."""
    return [
        value
        if number % every == 0 or value in always
        else pytest.param(value, marks=pytest.mark.soak)
        for number, value in enumerate(values)
    ]


def in_turn(
    rows: Iterable[str],
    columns: Sequence[object],
    *,
    kept: int = 1,
    every: int = 1,
    always: Sequence[object] = (),
) -> list[Any]:
    """Pairs: one row in `every` with `kept` columns in turn, and each with those of `always`.

    The rest has mark soak.
    """
    made = []
    for number, row in enumerate(rows):
        turns = range(kept) if number % every == 0 else ()
        mine = {columns[(number // every + 3 * n) % len(columns)] for n in turns} | {*always}
        for column in columns:
            marks = () if column in mine else (pytest.mark.soak,)
            made.append(pytest.param(row, column, marks=marks))
    return made
