"""The engine with the fewest steps in flight is the one that a scan would find."""

from hypothesis import given
from hypothesis import strategies as st

from heddle_core.tournament import Tournament


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9)), max_size=60),
)
def test_the_winner_is_the_first_of_the_least(
    loads: list[int], changes: list[tuple[int, int]]
) -> None:
    tournament = Tournament(range(len(loads)), loads)
    assert tournament.winner() == loads.index(min(loads))
    for place, load in changes:
        loads[place % len(loads)] = load
        tournament.change(place % len(loads), load)
        assert tournament.winner() == loads.index(min(loads))
