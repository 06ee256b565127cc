"""Between model files and the models of the core: which arrays each kind is made of."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heddle_predict.artefact import Arrays, Artefact, Header
from heddle_predict.errors import PredictError
from heddle_predict.forest import Forest
from heddle_predict.learned import SequenceModel, TreesModel
from heddle_predict.model import Model
from heddle_predict.recurrent import NAMES, Recurrent

_FOREST: Final = ("feature", "threshold", "mask", "leaf")
_TYPES: Final[Mapping[str, Any]] = {
    "feature": np.int32,
    "threshold": np.float64,
    "mask": np.uint16,
    "leaf": np.float64,
}


def arrays_of(model: TreesModel | SequenceModel) -> dict[str, NDArray[Any]]:
    """Return everything that a model consists of, beside its header."""
    if isinstance(model, SequenceModel):
        return {"shifts": model.shifts, **{n: getattr(model.network, n) for n in NAMES}}
    forests = {"location": model.location, "log_spread": model.log_spread}
    parts = {f"{f}.{part}": getattr(forests[f], part) for f in forests for part in _FOREST}
    return {"errors": model.errors, **parts}


def model_from(artefact: Artefact, label: str | Path) -> Model:
    """Make the model of the core from a file that was read.

    Raises:
        PredictError: the arrays do not fit together, or it is a language model.
    """
    make = _MAKE.get(artefact.header.kind)
    if make is None:
        raise PredictError(
            f"{label}: a language model answers in a prediction service, not in the simulator; "
            "name a model of kind trees or sequence"
        )
    try:
        return make(artefact.header, artefact.arrays)
    except KeyError as error:
        raise PredictError(f"{label}: damaged: it holds no array {error}") from None
    except ValueError as error:
        raise PredictError(f"{label}: damaged: {error}") from None


def _trees(header: Header, arrays: Arrays) -> Model:
    def forest(name: str) -> Forest:
        parts = {part: _typed(arrays, f"{name}.{part}", _TYPES[part]) for part in _FOREST}
        return Forest.of(**parts, columns=len(header.features))

    return TreesModel(
        vocabulary=header.vocabulary(),
        levels=header.levels,
        location=forest("location"),
        log_spread=forest("log_spread"),
        errors=_rising(arrays, "errors", len(header.levels)),
    )


def _sequence(header: Header, arrays: Arrays) -> Model:
    parts = {name: _typed(arrays, name, np.float64) for name in NAMES}
    return SequenceModel(
        vocabulary=header.vocabulary(),
        levels=header.levels,
        network=Recurrent.of(parts, columns=len(header.features), quantiles=len(header.levels)),
        shifts=_per_level(arrays, "shifts", len(header.levels)),
    )


_MAKE: Final[Mapping[str, Callable[[Header, Arrays], Model]]] = {
    "trees": _trees,
    "sequence": _sequence,
}


def _rising(arrays: Arrays, name: str, count: int) -> NDArray[np.float64]:
    found = _per_level(arrays, name, count)
    if (np.diff(found) < 0.0).any():
        raise ValueError(f"{name} do not rise")
    return found


def _per_level(arrays: Arrays, name: str, count: int) -> NDArray[np.float64]:
    found = _typed(arrays, name, np.float64)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise ValueError(f"{name} are not {count} numbers, one for each level")
    return found


def _typed(arrays: Arrays, name: str, kind: Any) -> NDArray[Any]:
    if arrays[name].dtype != np.dtype(kind):
        raise ValueError(f"{name} holds {arrays[name].dtype}, not {np.dtype(kind)}")
    return arrays[name]
