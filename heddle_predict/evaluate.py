"""Plays a trace to predictors and measures their errors."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from heddle_core.parts.predictor import GroupPredictor, ProgressivePredictor
from heddle_core.policy import Predictor, TrajectoryView
from heddle_predict.corpus import Source
from heddle_predict.examples import Examples, answers, examples
from heddle_predict.measures import AFTER, Figures, figures
from heddle_predict.model import Floats
from heddle_predict.models import TreesModel
from heddle_predict.play import Moment, Pace, play, total_tokens
from heddle_trace.schema import TrajectoryScript

ByStep = Mapping[int, Figures | None]


def judge(predictor: Predictor, scripts: Sequence[TrajectoryScript], pace: Pace) -> ByStep:
    """Play `scripts` to a predictor; its figures after each number of steps."""
    totals = [total_tokens(script) for script in scripts]
    found: dict[int, list[tuple[float, float]]] = {k: [] for k in AFTER}

    def on_question(t: TrajectoryView, index: int, moment: Moment) -> None:
        if moment == "queued" and t.step in found:
            truth = totals[index] - t.output_tokens
            found[t.step].append((predictor.remaining_tokens(t), truth))

    play(scripts, pace, predictor, on_question)
    judged: dict[int, Figures | None] = {}
    for step, pairs in found.items():
        estimates, truths = np.array(pairs).reshape(-1, 2).T
        judged[step] = figures(estimates, truths)
    return judged


def judge_quantiles(questions: Examples, quantiles: Floats, levels: Sequence[float]) -> ByStep:
    """Figures of a model from its quantiles of the remaining tokens for `questions`."""
    middle = levels.index(0.5)
    judged: dict[int, Figures | None] = {}
    for step in AFTER:
        chosen = questions.queued & (questions.step == step)
        found = quantiles[chosen]
        judged[step] = figures(found[:, middle], questions.remaining[chosen], quantiles=found)
    return judged


def judge_model(model: TreesModel, source: Source, pace: Pace) -> ByStep:
    """Play a source to a model; its figures after each number of steps."""
    questions = examples(source.scripts, model.vocabulary, pace)
    return judge_quantiles(questions, answers(model, questions), model.levels)


def untrained(source: Source, pace: Pace) -> dict[str, ByStep]:
    """Figures of the predictors that need no training, for comparison."""
    makers: Mapping[str, Callable[[], Predictor]] = {
        "group": GroupPredictor,
        "progressive": ProgressivePredictor,
    }
    return {name: judge(make(), source.scripts, pace) for name, make in makers.items()}
