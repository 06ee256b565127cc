"""The table of phases: what it allows, and that the documentation's drawing is made from it."""

import runpy
from pathlib import Path
from typing import get_args

import pytest

from heddle_core.ledger import Ledger, LedgerError
from heddle_core.trajectory import TRANSITIONS, Phase
from tests.core.ledgers import add_trajectory

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def test_every_phase_is_in_the_table_and_every_target_is_a_phase() -> None:
    assert set(TRANSITIONS) == set(get_args(Phase))
    for following in TRANSITIONS.values():
        assert set(following) <= set(TRANSITIONS)
        assert all(following.values())


def test_every_phase_but_the_last_may_end_and_nothing_follows_the_end() -> None:
    assert [p for p, following in TRANSITIONS.items() if "finished" not in following] == [
        "finished"
    ]
    assert not TRANSITIONS["finished"]


@pytest.mark.parametrize("start", TRANSITIONS)
@pytest.mark.parametrize("end", TRANSITIONS)
def test_the_ledger_makes_the_listed_moves_and_refuses_the_others(start: Phase, end: Phase) -> None:
    ledger = Ledger()
    t = add_trajectory(ledger, "t")
    t.phase = start
    if end in TRANSITIONS[start]:
        ledger.move(t, end)
        assert t.phase == end
    else:
        with pytest.raises(LedgerError, match=f"from '{start}' to '{end}'"):
            ledger.move(t, end)


def test_the_drawing_in_the_documentation_is_up_to_date() -> None:
    drawing = runpy.run_path(str(IMAGES / "phases.py"))["picture"]()
    assert (IMAGES / "phases.svg").read_text(encoding="utf-8") == drawing
