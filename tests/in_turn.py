"""Which pairs of a large product are tests of every day."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(
    rows: Iterable[str], columns: Sequence[object], *, kept: int = 1, always: Sequence[object] = ()
) -> list[Any]:
    """Pairs: each row with `kept` columns in turn and those of `always`; the rest has mark soak."""
    made = []
    for number, row in enumerate(rows):
        mine = {columns[(number + 3 * n) % len(columns)] for n in range(kept)} | {*always}
        for column in columns:
            marks = () if column in mine else (pytest.mark.soak,)
            made.append(pytest.param(row, column, marks=marks))
    return made
