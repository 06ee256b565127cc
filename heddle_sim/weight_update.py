"""Seconds of a weight update: from trainer to engines, in all and with engines paused.

    total = setup + bytes / prepare bandwidth + bytes / wire bandwidth

Preparing is gathering shards, renaming, bucketing and casting. It dominates and grows with the
number of GPUs that take part. `docs/training-time.md` states the errors on published updates.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from heddle_sim.trained_models import TrainedModel, trained_model

REFERENCE_GPUS = 16
"""Number of GPUs at which the prepare bandwidth of a method is stated."""


class WeightUpdateError(ValueError):
    """An update by an unknown method, or of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateTime:
    """Seconds of one weight update."""

    total_s: float
    """From its begin to new weights on every engine."""
    pause_s: float
    """The part of it in which engines do not generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMethod:
    """One way to move weights, fitted."""

    setup_s: float
    prepare_bytes_per_s: float
    """At REFERENCE_GPUS trainer and engine GPUs together."""
    wire_bytes_per_s: float
    gpu_exponent: float
    """Prepare bandwidth grows with the number of GPUs to this power."""
    pause_share: float
    """Part of the total that engines are paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateProfile:
    """Fitted methods, from a profile file (`heddle_sim.training_files`)."""

    methods: dict[str, UpdateMethod]
    errors: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    def time(
        self,
        model: str | TrainedModel | float,
        method: str,
        *,
        gpus: int,
        bytes_per_parameter: float = 2.0,
    ) -> WeightUpdateTime:
        """Seconds to bring the weights of a model to all engines.

        `model`: a name, a TrainedModel, or a number of parameters. `gpus`: trainer and engine GPUs
        that take part; colocated GPUs count once. `bytes_per_parameter`: 2 for bf16, 1 for FP8;
        a delta is given by its full size, since its method was fitted so. Raises WeightUpdateError
        for an unknown method.
        """
        one = self.methods.get(method)
        if one is None:
            known = ", ".join(sorted(self.methods))
            raise WeightUpdateError(f"unknown weight update method {method!r}; known: {known}")
        if isinstance(model, str | TrainedModel):
            model = trained_model(model).parameters
        size = model * bytes_per_parameter
        if gpus < 1 or not (math.isfinite(size) and size > 0):
            raise WeightUpdateError(f"an update of {size} bytes over {gpus} GPUs is none")
        prepare = one.prepare_bytes_per_s * (gpus / REFERENCE_GPUS) ** one.gpu_exponent
        total = one.setup_s + size / prepare + size / one.wire_bytes_per_s
        return WeightUpdateTime(total_s=total, pause_s=total * one.pause_share)
