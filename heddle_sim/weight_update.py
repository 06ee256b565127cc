"""Seconds of a weight update: from trainer to engines, in all and with engines paused.

    total = setup + tensors * time of a tensor + bytes / rate

The rate is of gathering shards, renaming, bucketing and casting rather than of a link's, and does
not grow with GPUs. `docs/training-time.md` states the errors on published updates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final

from heddle_core.bounds import Bounds
from heddle_sim.model_names import known_model
from heddle_sim.trained_models import TrainedModel, trained_model

WEIGHT_BYTES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "bf16": 2.0,
        "fp8": 1.0 + 4 / 128**2,
        "int8": 1.0 + 2 / 128,
        "int4": 0.5 + 2 / 32,
        "mxfp4": 0.5 + 1 / 32,
        "nvfp4": 0.5 + 1 / 16,
    }
)
"""Of a parameter with its scales: FP8 with one in fp32 for a block of 128 x 128."""
GATHERED_IN_BF16: Final = ("colocated",)
"""Methods that quantize what trainers have gathered: GLM-4.5 in FP8 takes 77 s (THUDM/slime pull
374), 10 GB/s of its bf16 weights, the rate of bf16 engines."""
TENSORS_OF_LAYER, TENSORS_OF_EXPERT = 12, 3
"""Of a layer without its experts, at most (Qwen3: 11 with its norms and biases, counted on Hugging
Face); and gate, up and down of each expert."""

TO_RELAY_BYTES_PER_S: Final = 100e9
"""From a trainer to the first relay worker: 32B parameters in 0.64 s, 72B in 1.40 s (Laminar, arXiv
2510.12633, section 8.3)."""
RELAYED_PAUSE: Final = 0.63
"""Pause of engines that take weights from a relay on their host, over that of a broadcast between
GPUs: up to 37 % less in the mean (likewise)."""


class WeightUpdateError(ValueError):
    """An update by an unknown method, or of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateTime:
    """Seconds of one weight update."""

    total_s: float
    """From its begin to new weights on every engine."""
    pause_s: float
    """The part of it in which engines do not generate."""
    hand_over_s: float = 0.0
    """The part of it that the trainer gives to relay workers; without them it waits for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMethod:
    """One way to move weights, fitted."""

    setup_s: Annotated[float, Bounds(0)]
    tensor_s: Annotated[float, Bounds(0)]
    """Of each tensor that is gathered apart; 0 where they are not."""
    bytes_per_s: Annotated[float, Bounds(above=0)]
    pause_share: Annotated[float, Bounds(0, 1)]
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
        relayed: bool = False,
    ) -> WeightUpdateTime:
        """Seconds to bring the weights of a model to all engines.

        `model`: a name, a TrainedModel, or a number of parameters. `gpus`: trainer and engine GPUs
        that take part, 1 or more; published rates do not depend on them. Bytes are of the name's
        precision (`WEIGHT_BYTES`), 2 a parameter without one or gathered in bf16. A delta is given
        by its full size, since its method was fitted so. `relayed`: relay workers hold the weights
        for the engines. Raises WeightUpdateError for an unknown method.
        """
        one = self.methods.get(method)
        if one is None:
            known = ", ".join(sorted(self.methods))
            raise WeightUpdateError(f"unknown weight update method {method!r}; known: {known}")
        gathered = method in GATHERED_IN_BF16
        bytes_per_parameter = WEIGHT_BYTES["bf16"] if gathered else _bytes_of(model)
        tensors = 0
        if isinstance(model, str | TrainedModel):
            shape = trained_model(model)
            model, tensors = shape.parameters, tensors_of(shape)
        size = model * bytes_per_parameter
        if gpus < 1 or not (math.isfinite(size) and size > 0):
            raise WeightUpdateError(f"an update of {size} bytes over {gpus} GPUs is none")
        total = one.setup_s + tensors * one.tensor_s + size / one.bytes_per_s
        pause = total * one.pause_share
        if not relayed:
            return WeightUpdateTime(total_s=total, pause_s=pause)
        return WeightUpdateTime(
            total_s=total,
            pause_s=pause * RELAYED_PAUSE,
            hand_over_s=min(total, size / TO_RELAY_BYTES_PER_S),
        )


def tensors_of(model: TrainedModel) -> int:
    """Tensors of a model, as engines load them."""
    experts = model.expert_layers * model.experts * TENSORS_OF_EXPERT
    return model.layers * TENSORS_OF_LAYER + experts


def _bytes_of(model: str | TrainedModel | float) -> float:
    known = known_model(model) if isinstance(model, str) else None
    return WEIGHT_BYTES["bf16"] if known is None else WEIGHT_BYTES.get(known.precision, 2.0)
