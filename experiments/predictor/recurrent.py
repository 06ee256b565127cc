"""A small recurrent network as arrays: inference with numpy alone."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from heddle_predict.model import Floats

FARTHEST: Final = 5.0
"""Standard deviations at which an input is clipped: values outside training stay bounded."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A gated recurrent unit over a trajectory's rows, and a head with increasing quantiles.

    Each tool call updates the state with one row. The inputs of the head are the state and the row
    of the question. Its first output is the lowest quantile; each further one adds a softplus.
    """

    centre: Floats
    spread: Floats
    input_weight: Floats
    """(3 * state, columns): reset, update and new gates, in this order."""
    input_bias: Floats
    state_weight: Floats
    state_bias: Floats
    hidden_weight: Floats
    """(hidden, state + columns)."""
    hidden_bias: Floats
    head_weight: Floats
    """(quantiles, hidden)."""
    head_bias: Floats

    @staticmethod
    def of(arrays: Mapping[str, Floats], *, columns: int, quantiles: int) -> "Recurrent":
        """Check that the arrays fit together, to rows of `columns` numbers and to the quantiles.

        Raises:
            ValueError: they do not.
        """
        state = arrays["state_weight"].shape[-1]
        hidden = arrays["hidden_bias"].shape[0] if arrays["hidden_bias"].ndim else 0
        shapes = {
            "centre": (columns,),
            "spread": (columns,),
            "input_weight": (3 * state, columns),
            "input_bias": (3 * state,),
            "state_weight": (3 * state, state),
            "state_bias": (3 * state,),
            "hidden_weight": (hidden, state + columns),
            "hidden_bias": (hidden,),
            "head_weight": (quantiles, hidden),
            "head_bias": (quantiles,),
        }
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} has shape {arrays[name].shape}, not {shape}")
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"{name} holds a value that is no number")
        if not (arrays["spread"] > 0.0).all():
            raise ValueError("spread holds a value that is not above 0")
        return Recurrent(*(arrays[name] for name in shapes))

    def initial_state(self) -> Floats:
        """State before the first row."""
        return np.zeros(self.state_weight.shape[1])

    def update(self, states: Floats, rows: Floats) -> Floats:
        """States, one a line, each updated with its row."""
        size = self.state_weight.shape[1]
        given = self._scaled(rows) @ self.input_weight.T + self.input_bias
        kept = states @ self.state_weight.T + self.state_bias
        gates = _sigmoid(given[:, : 2 * size] + kept[:, : 2 * size])
        reset, update = gates[:, :size], gates[:, size:]
        new = np.tanh(given[:, 2 * size :] + reset * kept[:, 2 * size :])
        return np.asarray((1.0 - update) * new + update * states)

    def quantiles(self, states: Floats, rows: Floats) -> Floats:
        """Rising outputs, (rows, quantiles)."""
        seen = np.concatenate((states, self._scaled(rows)), axis=1)
        hidden = np.maximum(seen @ self.hidden_weight.T + self.hidden_bias, 0.0)
        out = hidden @ self.head_weight.T + self.head_bias
        out[:, 1:] = np.logaddexp(0.0, out[:, 1:])
        return np.asarray(np.cumsum(out, axis=1))

    def _scaled(self, rows: Floats) -> Floats:
        return np.clip((rows - self.centre) / self.spread, -FARTHEST, FARTHEST)


NAMES: Final = tuple(field.name for field in fields(Recurrent))


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
