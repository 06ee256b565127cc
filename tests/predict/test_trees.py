"""Boosted trees as arrays: the same numbers as the library's, and better than not learning."""

import lightgbm
import numpy as np
import pytest

from heddle_predict.corpus import split, vocabulary_of
from heddle_predict.examples import answers, examples
from heddle_predict.fit import prepared
from heddle_predict.forest import MOST_LEAVES, Forest
from heddle_predict.measures import correlation
from heddle_predict.play import Pace
from heddle_predict.quantiles import LEVELS, weighted_quantiles
from heddle_predict.trees import FOLDS, fit_trees, flat, folds
from tests.predict.made import fitted, questions, synthetic


@pytest.mark.parametrize("leaves", [2, 7, 15])
def test_flattened_trees_give_what_the_library_gives(leaves):
    rng = np.random.default_rng(leaves)
    rows = rng.normal(size=(800, 6)).round(1)  # ties with thresholds
    targets = rows[:, 0] * rows[:, 1] + np.sin(rows[:, 2])
    parameters = {
        "num_leaves": leaves,
        "min_data_in_leaf": 5,
        "verbosity": -1,
        "use_missing": False,
        "num_threads": 1,
    }
    booster = lightgbm.train(parameters, lightgbm.Dataset(rows, targets), num_boost_round=40)
    new = np.concatenate((rows, rng.normal(size=(300, 6))))
    ours = flat(booster, 6)
    assert np.allclose(ours.sums(new), booster.predict(new), atol=1e-9)
    assert np.allclose(ours.each(new).cumsum(axis=1)[:, 9], booster.predict(new, num_iteration=10))
    assert ours.sums(np.zeros((0, 6))).shape == (0,)


def test_a_tree_that_is_one_leaf_adds_its_value():
    rows, targets = np.zeros((50, 2)), np.full(50, 3.0)
    booster = lightgbm.train(
        {"verbosity": -1, "num_threads": 1}, lightgbm.Dataset(rows, targets), num_boost_round=3
    )
    assert flat(booster, 2).sums(rows[:4]) == pytest.approx([3.0] * 4)


def arrays(**changes):
    good = {
        "feature": np.array([[1, 0]], np.int32),
        "threshold": np.array([[0.5, 0.5]]),
        "mask": np.array([[0b1111111111111100, 0b1111111111111110]], np.uint16),
        "leaf": np.array([[1.0, 2.0, 3.0]]),
    }
    return good | changes


@pytest.mark.parametrize(
    ("row", "leaf"), [((0, 0), 1.0), ((1, 0), 2.0), ((0, 1), 3.0), ((1, 1), 3.0)]
)
def test_a_tree_by_hand(row, leaf):
    """The root tests column 1; left of it a node tests column 0."""
    forest = Forest.of(**arrays(), columns=2)
    assert forest.sums(np.array([row], np.float64)) == [leaf]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"threshold": np.zeros((2, 2))}, "differ in shape"),
        ({"leaf": np.zeros((1, 2))}, "leaves of shape"),
        ({"feature": np.array([[2, 0]], np.int32)}, "beyond the 2"),
        ({"feature": np.array([[-1, 0]], np.int32)}, "beyond the 2"),
        ({"leaf": np.array([[1.0, np.nan, 0.0]])}, "no number"),
        ({"threshold": np.array([[np.nan, 0.0]])}, "no number"),
        ({"mask": np.array([[1, 2]], np.uint16)}, "all of its leaves"),
    ],
)
def test_arrays_that_are_no_forest_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        Forest.of(**arrays(**changes), columns=2)


def test_more_leaves_than_a_mask_has_bits_are_refused():
    nodes = MOST_LEAVES
    with pytest.raises(ValueError, match="leaves of shape"):
        Forest.of(
            feature=np.zeros((1, nodes), np.int32),
            threshold=np.zeros((1, nodes)),
            mask=np.full((1, nodes), 0xFFFF, np.uint16),
            leaf=np.zeros((1, nodes + 1)),
            columns=1,
        )


def test_a_group_is_in_one_fold():
    asked = questions()
    fold = folds(asked.group, 3)
    assert set(fold) == set(range(FOLDS))
    for group in np.unique(asked.group):
        assert len(set(fold[asked.group == group])) == 1


def test_trees_learn_from_siblings_and_steps():
    seen, held = split(synthetic("coding", 480), share=0.4, seed=1)
    vocabulary, asked, augmented = prepared([seen], 1)
    found = fit_trees(asked, augmented, vocabulary, 1)
    test = examples(held.scripts, vocabulary, Pace())
    quantiles = answers(found.model, test)
    assert (np.diff(quantiles, axis=1) >= 0).all()
    middle = quantiles[:, LEVELS.index(0.5)]
    late = test.queued & (test.step == 2)
    learned = correlation(np.log(middle[late]), np.log(test.remaining[late]))
    survival = correlation(test.survival[late], np.log(test.remaining[late]))
    assert learned > max(0.3, survival + 0.1)
    # A wide margin for 48 groups: quantiles hold about their share of what was never seen.
    shares = (test.remaining[:, None] <= quantiles).mean(axis=0)
    assert np.abs(shares - np.array(LEVELS)).max() < 0.15


def test_the_same_seed_grows_the_same_trees():
    vocabulary = vocabulary_of([synthetic()])
    one, two, other = (fit_trees(questions(), None, vocabulary, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.model.location.leaf, two.model.location.leaf)
    assert np.array_equal(one.model.errors, two.model.errors)
    assert not np.array_equal(one.model.errors, other.model.errors)


def test_more_siblings_ended_long_never_lower_an_estimate():
    names = fitted().vocabulary.names()
    rows = questions().rows[::50].copy()
    column = names.index("survival")
    estimates = []
    for value in (-2.0, -1.0, 0.0, 1.0, 2.0):
        rows[:, column] = value
        estimates.append(fitted().location.sums(rows))
    assert (np.diff(estimates, axis=0) >= -1e-12).all()


def test_weighted_quantiles_by_hand():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 1.0])
    assert weighted_quantiles(values, weights, [0.1, 0.5, 0.6, 1.0]).tolist() == [1, 1, 2, 3]
