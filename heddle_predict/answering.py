"""The inference of a model on whole traces."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from heddle_predict.artefact import Artefact
from heddle_predict.corpus import Source
from heddle_predict.examples import Examples, answers, examples
from heddle_predict.model import Floats
from heddle_predict.models import model_from
from heddle_predict.play import Pace

Answer: TypeAlias = Callable[[Source, Pace], tuple[Examples, Floats]]
"""Plays a source; returns its questions with quantiles of the remaining tokens."""


def answering(artefact: Artefact, label: Path) -> Answer:
    """Load a model for inference.

    Raises:
        PredictError: its file is damaged.
    """
    model = model_from(artefact, label)

    def answer(source: Source, pace: Pace) -> tuple[Examples, Floats]:
        questions = examples(source.scripts, model.vocabulary, pace)
        return questions, answers(model, questions)

    return answer
