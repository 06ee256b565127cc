"""History.lengths: sharp predictions are kept, hedged ones only lend their order."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.core.ledgers import history

POSITIVE = st.floats(1.0, 1e6)


@given(st.lists(POSITIVE, min_size=2, max_size=40))
def test_the_order_of_predictions_is_kept_whatever_becomes_of_their_sizes(predicted):
    lengths = history().lengths(predicted)
    assert len(lengths) == len(predicted)
    order = np.argsort(predicted, kind="stable")
    assert np.all(np.diff(lengths[order]) >= 0.0)


@given(st.lists(st.floats(100.0, 130.0), min_size=2, max_size=40))
def test_hedged_predictions_are_given_the_quantiles_of_history(predicted):
    past = history()
    lengths = np.sort(past.lengths(predicted))
    at = (np.arange(len(predicted)) + 0.5) / len(predicted)
    known = (np.arange(6) + 0.5) / 6
    assert np.allclose(lengths, np.interp(at, known, past.output_quantiles))
    assert lengths[-1] <= past.output_quantiles[-1]
    assert lengths[0] >= past.output_quantiles[0]


def test_as_many_means_as_quantiles_give_back_history_itself():
    past = history()
    assert past.lengths([1.0] * 6).tolist() == list(past.output_quantiles)
    assert past.lengths([3.0, 2.0, 1.0, 1.0, 2.0, 3.0]).tolist() == [
        8_000.0,
        2_000.0,
        500.0,
        1_000.0,
        4_000.0,
        20_000.0,
    ]


def test_predictions_that_spread_as_history_did_are_used():
    past = history()
    doubled = [2.0 * q for q in past.output_quantiles]
    assert past.lengths(doubled).tolist() == doubled


@pytest.mark.parametrize(
    ("factor", "known"), [(0.6, False), (0.8, True), (1.05, True), (1.2, False)]
)
def test_lengths_are_known_where_predictions_spread_as_history_did(factor, known):
    past = history()
    predicted = [100.0 * (q / 100.0) ** factor for q in past.output_quantiles]
    assert past.lengths_known(predicted) == known
    assert past.predictions_vary(predicted) == (factor > 0.7)


def test_one_prediction_alone_has_no_rank():
    assert history().lengths([77.0]).tolist() == [77.0]
    assert history().lengths([]).tolist() == []


def test_nothing_is_shorter_than_a_token_even_in_a_history_of_nothing():
    assert min(history().lengths([0.0, 0.0])) >= 1.0
    empty = history(output_quantiles=(0.0, 0.0, 10.0))
    assert min(empty.lengths([0.0, 0.0, 0.0])) >= 1.0
