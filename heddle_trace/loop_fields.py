"""Fills in what an RL loop reads of a trace: times of services, and the step of training."""

from typing import Final
from zlib import crc32

import numpy as np

from heddle_trace.columns import TraceColumn
from heddle_trace.errors import TraceError
from heddle_trace.table import Records

_SIGMA: Final = 0.5
"""Of natural logarithms: starts whose image is cached, and rewards; assumed."""
_MAX_MEDIAN_S: Final = 86_400.0


def with_loop_fields(
    records: Records,
    *,
    seed: int,
    steps: int | None = None,
    env_start_s: float | None = None,
    reward_s: float | None = None,
) -> Records:
    """The records with other values of these fields; None leaves a field as it is.

    `steps` numbers the prompts by step of training, evenly and in order. `env_start_s` and
    `reward_s` are medians of a lognormal distribution, drawn for every trajectory.

    Raises:
        TraceError: a number out of range.
    """
    columns: dict[str, TraceColumn | None] = {}
    for name, median_s in (("env_start_s", env_start_s), ("reward_s", reward_s)):
        if median_s is not None:
            if not 0.0 <= median_s <= _MAX_MEDIAN_S:
                raise TraceError(f"{name} is {median_s:g}; give 0 to {_MAX_MEDIAN_S:,.0f} seconds")
            rng = np.random.default_rng([seed, crc32(name.encode())])
            drawn = median_s * np.exp(_SIGMA * rng.standard_normal(len(records)))
            columns[name] = TraceColumn("real", np.round(drawn, 4))
    if steps is not None:
        _, first, own = np.unique(
            records.trajectory("group_id").ints, return_index=True, return_inverse=True
        )
        groups = len(first)
        if not 1 <= steps <= groups:
            raise TraceError(f"steps is {steps}; give 1 to {groups:,}, the number of prompts")
        place = np.argsort(np.argsort(first))
        columns["step"] = TraceColumn("number", place[own] * steps // groups)
    return records.changed(records.ids, columns)
