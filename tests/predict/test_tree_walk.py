"""A walk through each tree gives what the arrays give, to the last digit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_predict.artefact import read_artefact
from heddle_predict.forest import MOST_LEAVES, Forest
from heddle_predict.models import TreesModel, model_from
from heddle_predict.tree_walk import TreeWalk, WalkedQuantile

ALL = (1 << MOST_LEAVES) - 1
COLUMNS = 5
numbers = st.sampled_from([-2.5, -1.0, 0.0, 0.1, 0.7, 1.0, 3.0, float("nan"), float("inf")])


@st.composite
def forests(draw):
    """Random trees: each leaf is split in turn at random, as boosting does."""
    trees, nodes = draw(st.integers(1, 300)), draw(st.integers(1, MOST_LEAVES - 1))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    feature = np.zeros((trees, nodes), np.int32)
    threshold = np.full((trees, nodes), np.inf)
    mask = np.full((trees, nodes), ALL, np.uint16)
    leaf = rng.normal(size=(trees, nodes + 1)) * 10.0 ** rng.integers(-8, 9, (trees, nodes + 1))

    def grow(first, last, free, tree):
        if first == last:
            return
        middle = int(rng.integers(first, last))
        node = free.pop()
        feature[tree, node] = rng.integers(COLUMNS)
        threshold[tree, node] = rng.choice([-1.0, 0.0, 0.1, 1.0])
        mask[tree, node] = ALL & ~((2 << middle) - (1 << first))
        grow(first, middle, free, tree)
        grow(middle + 1, last, free, tree)

    for tree in range(trees):
        used = int(rng.integers(0, nodes + 1))
        grow(0, used, rng.permutation(nodes)[: used + 1].tolist(), tree)
    return Forest.of(feature=feature, threshold=threshold, mask=mask, leaf=leaf, columns=COLUMNS)


@given(forests(), st.lists(numbers, min_size=COLUMNS, max_size=COLUMNS), st.data())
def test_sums_of_a_walk_are_those_of_the_arrays(forest, row, data):
    values = forest.each(np.array([row]))[0]
    assert forest.one_row().each(row).tolist() == values.tolist()
    walk = TreeWalk.of(forest)
    assert walk is not None
    walk.read(row)
    first = data.draw(st.integers(0, len(forest)))
    count = data.draw(st.integers(0, len(forest) - first))
    assert walk.total(first, count) == float(np.add.reduce(values[first : first + count]))


@pytest.mark.parametrize("masks", [[0b1010, ALL], [ALL - 1, ALL - 1], [ALL - 0b110, ALL - 0b11]])
def test_masks_of_no_tree_are_refused(masks):
    forest = Forest.of(
        feature=np.zeros((1, 2), np.int32),
        threshold=np.zeros((1, 2)),
        mask=np.array([masks], np.uint16),
        leaf=np.zeros((1, 3)),
        columns=1,
    )
    assert TreeWalk.of(forest) is None


def test_quantiles_of_the_shipped_model_are_the_same_in_both_ways_and_in_a_batch():
    path = Path(__file__).parents[2] / "heddle_predict" / "shipped.heddle"
    model = model_from(read_artefact(path), path)
    assert isinstance(model, TreesModel)
    rows = np.random.default_rng(3).normal(size=(300, len(model.vocabulary.names()))) * 3.0
    batch = model.quantiles(rows)
    walk = TreeWalk.of(model.location.beside(model.log_spread))
    assert walk is not None
    for level, error in enumerate(model.errors.tolist()):
        walked = WalkedQuantile(walk, len(model.location), error)
        either = model.row_quantile(level)
        for row, expected in zip(rows.tolist(), batch[:, level].tolist(), strict=True):
            assert walked(row) == expected
            assert either(row) == expected
