"""Gradient-boosted trees with quantiles: LightGBM trains them, inference uses arrays alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import lightgbm
import numpy as np
from numpy.typing import NDArray

from heddle_predict.examples import Examples
from heddle_predict.forest import MOST_LEAVES, Forest
from heddle_predict.model import Floats, Vocabulary
from heddle_predict.models import Fitted, TreesModel
from heddle_predict.quantiles import LEVELS, weighted_quantiles

RISING: Final = (
    "survival",
    "ended_mean_total",
    "ended_longest_total",
    "ended_longer_share",
    "ended_mean_rest",
    "running_mean_made",
    "group_mean_output",
    "mean_output",
    "rollout_mean_total",
)
"""Columns that can only raise an estimate: their meaning implies it, and a few groups could
teach the opposite."""

FOLDS: Final = 4
MOST_ROUNDS = 160
_LEAST_ROUNDS: Final = 10
_SPREAD_ROUNDS: Final = 40
_LEAST_ERROR: Final = 0.05  # of a logarithm: an error of 0 gives no spread


def fit_trees(
    seen: Examples, augmented: Examples | None, vocabulary: Vocabulary, seed: int
) -> Fitted:
    """Learn from `seen`, and with little weight from `augmented`, other workloads' examples.

    The number of trees is the best one on held-out groups, a quarter in each of four folds. The
    errors there also determine the spread and the quantiles.
    """
    rising = [int(name in RISING) for name in vocabulary.names()]
    fold = folds(seen.group, seed)
    booster = Booster(seed, rising, len(seen))
    curves, outside = [], np.zeros((MOST_ROUNDS, len(seen)))
    for k in range(FOLDS):
        held = np.flatnonzero(fold == k)
        forest = booster.location(seen.where(fold != k), augmented, MOST_ROUNDS)
        outside[:, held] = _by_round(forest, seen.rows[held])
        wrong = np.square(seen.targets[held] - outside[:, held])
        curves.append((wrong * seen.weights[held]).sum(axis=1))
    curve = np.sum(curves, axis=0) / seen.weights.sum()
    rounds = max(_LEAST_ROUNDS, int(np.argmin(curve)) + 1)
    wrong = seen.targets - outside[rounds - 1]
    log_spread = booster.spread(seen.rows, np.log(np.maximum(np.abs(wrong), _LEAST_ERROR)), seen)
    columns = len(rising)
    spread = flat(log_spread, columns)
    errors = weighted_quantiles(wrong / np.exp(spread.sums(seen.rows)), seen.weights, LEVELS)
    model = TreesModel(
        vocabulary=vocabulary,
        levels=LEVELS,
        location=flat(booster.location(seen, augmented, rounds), columns),
        log_spread=spread,
        errors=errors,
    )
    return Fitted(model, rounds, float(np.sqrt(curve[rounds - 1])))


def folds(group: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Number of the fold that each line is left out in; a group is in one."""
    names = np.unique(group)
    number = np.random.default_rng([seed, 4]).permutation(len(names)) % FOLDS
    return np.asarray(number[np.searchsorted(names, group)], np.int64)


@dataclass(frozen=True, slots=True)
class Booster:
    """LightGBM with our parameters; `rising` marks columns that can only raise an estimate."""

    seed: int
    rising: list[int]
    rows: int

    def location(self, seen: Examples, augmented: Examples | None, rounds: int) -> lightgbm.Booster:
        """Learn where the logarithm of what remains lies."""
        rows, targets, weights = seen.rows, seen.targets, seen.weights
        if augmented is not None:
            rows = np.concatenate((rows, augmented.rows))
            targets = np.concatenate((targets, augmented.targets))
            weights = np.concatenate(
                (weights, augmented.weights * _augmented_weight(seen, augmented))
            )
        rising = {"monotone_constraints": self.rising}
        return self._train(rows, targets, weights, rounds, rising)

    def spread(self, rows: Floats, targets: Floats, seen: Examples) -> lightgbm.Booster:
        """Few and coarse trees: the spread of errors is harder to learn than their location."""
        coarse = {"num_leaves": 6, "min_data_in_leaf": max(50, self.rows // 50)}
        return self._train(rows, targets, seen.weights, _SPREAD_ROUNDS, coarse)

    def _train(
        self, rows: Floats, targets: Floats, weights: Floats, rounds: int, more: Mapping[str, Any]
    ) -> lightgbm.Booster:
        parameters: dict[str, Any] = {
            "objective": "regression",
            "boost_from_average": False,
            "learning_rate": 0.05,
            "num_leaves": MOST_LEAVES - 1,
            "min_data_in_leaf": max(20, self.rows // 200),
            "feature_fraction": 0.4,
            "bagging_fraction": 0.7,
            "bagging_freq": 1,
            "lambda_l2": 5.0,
            "use_missing": False,
            "seed": self.seed,
            "deterministic": True,
            "force_row_wise": True,
            # One thread: as quick on rows this few, and the same trees on any machine.
            "num_threads": 1,
            "verbosity": -1,
            **more,
        }
        data = lightgbm.Dataset(rows, targets, weight=weights, params={"verbosity": -1})
        return lightgbm.train(parameters, data, num_boost_round=rounds)


def _augmented_weight(seen: Examples, augmented: Examples) -> float:
    """Factor by which other workloads' examples weigh as much as a hundred own trajectories."""
    own = len(np.unique(seen.script))
    return float(seen.weights.sum() / augmented.weights.sum() * min(1.0, 100.0 / own))


def _by_round(booster: lightgbm.Booster, rows: Floats) -> Floats:
    """Sums of the first, the first two, the first three ... trees."""
    forest = flat(booster, rows.shape[1])
    return np.cumsum(forest.each(rows), axis=1).T


def flat(booster: lightgbm.Booster, columns: int) -> Forest:
    """Write a booster's trees as arrays."""
    trees = [tree["tree_structure"] for tree in booster.dump_model()["tree_info"]]
    shapes = [_Flat.of(tree) for tree in trees]
    nodes = max((len(shape.feature) for shape in shapes), default=0)
    nodes = max(nodes, 1)
    feature = np.zeros((len(shapes), nodes), np.int32)
    threshold = np.full((len(shapes), nodes), np.inf)
    mask = np.full((len(shapes), nodes), (1 << MOST_LEAVES) - 1, np.uint16)
    leaf = np.zeros((len(shapes), nodes + 1))
    for i, shape in enumerate(shapes):
        size = len(shape.feature)
        feature[i, :size] = shape.feature
        threshold[i, :size] = shape.threshold
        mask[i, :size] = shape.mask
        leaf[i, : len(shape.leaf)] = shape.leaf
    return Forest.of(feature=feature, threshold=threshold, mask=mask, leaf=leaf, columns=columns)


@dataclass(frozen=True, slots=True)
class _Flat:
    """One tree, its leaves from left to right."""

    feature: list[int]
    threshold: list[float]
    mask: list[int]
    leaf: list[float]

    @staticmethod
    def of(tree: Mapping[str, Any]) -> "_Flat":
        flat = _Flat([], [], [], [])
        flat._add(tree)
        return flat

    def _add(self, node: Mapping[str, Any]) -> None:
        if "leaf_value" in node:
            self.leaf.append(node["leaf_value"])
            return
        first = len(self.leaf)
        self._add(node["left_child"])
        left = ((1 << (len(self.leaf) - first)) - 1) << first
        self._add(node["right_child"])
        self.feature.append(node["split_feature"])
        self.threshold.append(node["threshold"])
        self.mask.append(((1 << MOST_LEAVES) - 1) & ~left)
