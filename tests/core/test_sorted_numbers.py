"""A ranking in parts counts as one sorted list does."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from heddle_core import sorted_numbers
from heddle_core.sorted_numbers import SortedNumbers

values = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 7.0, 1e9])


@given(
    first=st.lists(values, max_size=40),
    ops=st.lists(st.tuples(st.booleans(), values), max_size=120),
    most=st.sampled_from([2, 3, 8, 2_000]),
)
def test_it_counts_as_a_sorted_list(first, ops, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_numbers, "_MOST", most)
        found, plain = SortedNumbers(first), sorted(first)
        for add, value in ops:
            if add or value not in plain:
                found.add(value)
                plain.append(value)
            else:
                found.remove(value)
                plain.remove(value)
            assert len(found) == len(plain)
            for threshold in (value, value - 0.5, value + 0.5):
                assert found.above(threshold) == sum(each > threshold for each in plain)
