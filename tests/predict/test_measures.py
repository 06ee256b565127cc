"""Figures by hand."""

import numpy as np
import pytest

from heddle_core.parts.predictor import NoPrediction
from heddle_predict.evaluate import judge, judge_quantiles
from heddle_predict.examples import answers, examples
from heddle_predict.measures import AFTER, FEWEST, correlation, figures, recall
from heddle_predict.play import Pace
from heddle_predict.quantiles import LEVELS
from heddle_trace.oracle import Oracle
from tests.predict.made import fitted, synthetic


def test_recall_counts_the_longest_fifth():
    truths = np.arange(10.0)
    assert recall(truths, truths) == 1.0
    assert recall(-truths, truths) == 0.0
    found = truths.copy()
    found[0] = 8.5  # takes the place of the second longest
    assert recall(found, truths) == 0.5


def test_equal_predictions_recall_by_chance():
    assert recall(np.zeros(20), np.arange(20.0)) == pytest.approx(0.2)
    # Four share the last two places: each has half a chance.
    truths = np.array([0.0] * 6 + [1.0] * 4)
    assert recall(np.arange(10.0), truths) == pytest.approx(0.5)


def test_correlation_is_nothing_where_a_side_does_not_vary():
    assert correlation(np.ones(5), np.arange(5.0)) == 0.0
    assert correlation(np.arange(5.0), 2 * np.arange(5.0)) == pytest.approx(1.0)


def test_too_few_trajectories_are_not_judged():
    few = np.arange(FEWEST - 1.0)
    assert figures(few, few) is None
    enough = np.arange(float(FEWEST))
    found = figures(enough + 3.0, enough)
    assert found is not None
    assert found.median_error_tokens == 3.0
    assert found.spearman == pytest.approx(1.0)


def test_an_oracle_is_exact_and_no_prediction_gives_no_rank():
    source = synthetic()
    right = judge(Oracle(source.scripts), source.scripts, Pace())
    nothing = judge(NoPrediction(), source.scripts, Pace())
    for step in AFTER[:4]:
        assert right[step].recall == right[step].spearman == pytest.approx(1.0)
        assert right[step].median_error_tokens == 0.0
        assert nothing[step].recall == pytest.approx(0.2, abs=0.03)
        assert nothing[step].pearson == 0.0


def test_a_model_is_judged_on_the_questions_of_each_step():
    asked = examples(synthetic().scripts, fitted().vocabulary, Pace())
    judged = judge_quantiles(asked, answers(fitted(), asked), LEVELS)
    assert list(judged) == list(AFTER)
    assert judged[0].trajectories == len(synthetic().scripts)
    assert judged[2].trajectories == int((asked.queued & (asked.step == 2)).sum())
    assert len(judged[0].coverage) == len(LEVELS)
    assert list(judged[0].coverage) == sorted(judged[0].coverage)
