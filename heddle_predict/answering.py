"""One interface to the inference of any kind of model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from heddle_predict.artefact import Artefact
from heddle_predict.corpus import Source
from heddle_predict.errors import PredictError
from heddle_predict.examples import Examples, answers, examples
from heddle_predict.model import Floats
from heddle_predict.models import model_from
from heddle_predict.play import Pace

Answer: TypeAlias = Callable[[Source, Pace], tuple[Examples, Floats]]
"""Plays a source; returns its questions with quantiles of the remaining tokens."""


def answering(artefact: Artefact, label: Path, texts: Sequence[Path] = ()) -> Answer:
    """Load a model for inference.

    Raises:
        PredictError: its file is damaged, texts are given to a model that reads none, or a library
            that it needs is not installed.
    """
    if artefact.header.kind == "llm":
        from heddle_predict.language import answering_language

        return answering_language(artefact, label, texts)
    if texts:
        raise PredictError(f"{label}: a model of kind {artefact.header.kind} reads no text")
    model = model_from(artefact, label)

    def answer(source: Source, pace: Pace) -> tuple[Examples, Floats]:
        questions = examples(source.scripts, model.vocabulary, pace)
        return questions, answers(model, questions)

    return answer
