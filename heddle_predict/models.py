"""Models as arrays, and their construction from a file; inference uses numpy alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import heddle_compiled
from heddle_predict.artefact import Arrays, Artefact, Header
from heddle_predict.errors import PredictError
from heddle_predict.forest import Forest
from heddle_predict.model import LOG_BOUND, Floats, RowQuantile, Vocabulary
from heddle_predict.tree_walk import TreeWalk, WalkedQuantile

_TYPES: Final[Mapping[str, Any]] = {
    "feature": np.int32,
    "threshold": np.float64,
    "mask": np.uint16,
    "leaf": np.float64,
}
"""Of a forest's arrays."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreesModel:
    """Two forests: location and log spread of the logarithm of the remaining tokens.

    Quantiles are ``location + exp(log_spread) * errors``, with `errors` the quantiles of the
    standardised errors on held-out groups. They cannot cross, and are calibrated on those groups.
    """

    vocabulary: Vocabulary
    levels: tuple[float, ...]
    location: Forest
    log_spread: Forest
    errors: Floats
    _both: Forest = field(init=False)
    """Both forests, evaluated at once: for one row the number of calls determines the time."""

    def __post_init__(self) -> None:
        """Put the two forests side by side."""
        object.__setattr__(self, "_both", self.location.beside(self.log_spread))

    def quantiles(self, rows: Floats) -> Floats:
        """Quantiles of ``log(remaining / survival)``, (rows, levels); see `Features.row`."""
        each, trees = self._both.each(rows), len(self.location)
        location, log_spread = each[:, :trees].sum(axis=1), each[:, trees:].sum(axis=1)
        spread = np.exp(np.minimum(np.maximum(log_spread, -LOG_BOUND), LOG_BOUND))
        return np.asarray(location[:, None] + spread[:, None] * self.errors)

    def row_quantile(self, level: int) -> RowQuantile:
        """A function for one row at a time and ``levels[level]``, for the calling thread."""
        return _row_quantile(self, level, get_ident())


@lru_cache(maxsize=8)
def _row_quantile(model: TreesModel, level: int, thread: int) -> RowQuantile:
    """Made once: to link the trees takes as long as 1,000 rows. It has arrays of its own."""
    trees, error, both = len(model.location), float(model.errors[level]), model._both
    walk = TreeWalk.of(both) if heddle_compiled.in_force() else None
    if walk is not None:
        return WalkedQuantile(walk, trees, error)
    each = both.one_row().each

    def quantile(row: Sequence[float]) -> float:
        values = each(row)
        location = float(np.add.reduce(values[:trees]))
        log_spread = float(np.add.reduce(values[trees:]))
        return location + float(np.exp(min(max(log_spread, -LOG_BOUND), LOG_BOUND))) * error

    return quantile


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model, and the results of its training."""

    model: TreesModel
    rounds: int
    """Trees of each forest."""
    error: float
    """Weighted root mean squared error of the logarithm, on groups left out."""


def arrays_of(model: TreesModel) -> dict[str, NDArray[Any]]:
    forests = {"location": model.location, "log_spread": model.log_spread}
    parts = {f"{f}.{part}": getattr(forests[f], part) for f in forests for part in _TYPES}
    return {"errors": model.errors, **parts}


def model_from(artefact: Artefact, label: str | Path) -> TreesModel:
    """Make a model for inference from a model file.

    Raises:
        PredictError: the arrays do not fit together.
    """
    try:
        return _trees(artefact.header, artefact.arrays)
    except KeyError as error:
        raise PredictError(f"{label}: damaged: it holds no array {error}") from None
    except ValueError as error:
        raise PredictError(f"{label}: damaged: {error}") from None


def _trees(header: Header, arrays: Arrays) -> TreesModel:
    def forest(name: str) -> Forest:
        parts = {part: _typed(arrays, f"{name}.{part}", kind) for part, kind in _TYPES.items()}
        return Forest.of(**parts, columns=len(header.features))

    return TreesModel(
        vocabulary=header.vocabulary(),
        levels=header.levels,
        location=forest("location"),
        log_spread=forest("log_spread"),
        errors=_rising(arrays, "errors", len(header.levels)),
    )


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
