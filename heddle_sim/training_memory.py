"""Does a training step fit into GPU memory? An estimate, refused with the number that would do.

Sources: ZeRO (arXiv 1910.02054) for the bytes of model states; activation bytes and the base are
from peaks that prime-rl publishes (benchmarks/results/BENCHMARKS.md, Qwen3-4B and 30B-A3B).
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from heddle_sim.trained_models import TrainedModel, trained_model
from heddle_sim.training import Backend, TrainingError, TrainLayout

GIB = 2.0**30
MEMORY_GIB: Final[Mapping[str, float]] = MappingProxyType(
    {
        "a100": 80.0,
        "l40s": 45.0,
        "h20": 95.6,
        "h100": 79.6,
        "h800": 79.6,
        "h200": 140.4,
        "gh200": 95.6,
        "b200": 179.0,
        "gb200": 185.0,
        "gb300": 270.0,
    }
)
"""Memory of one GPU as its driver reports it, GiB."""

STATE_BYTES = 16
"""Of a parameter: fp32 master weight and gradient, two Adam moments."""
OPTIMIZER_BYTES = 12
"""The part of them that an offloaded or distributed optimizer holds elsewhere."""
WEIGHT_BYTES = 6
"""Megatron with a distributed optimizer: bf16 weight and fp32 gradient, not sharded over DP."""
ACTIVATION_BYTES = 4.5
"""Of a token, layer and unit of the hidden size, all layers recomputed; measured peaks."""
MOE_ACTIVATION_BYTES = 6.7
LOGIT_BYTES = 4
LOGIT_CHUNK_TOKENS = 4096
"""The output head runs over so many tokens at once."""
BASE_GIB = 4.0
"""CUDA context, collectives' buffers, fragmentation: 4 to 8 GiB are published."""
MOST_GPUS = 1 << 15


class TrainingMemoryError(TrainingError):
    """A model, its layout and its samples do not fit on these GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """GiB on one GPU at the peak of a step."""

    states_gib: float
    """Weights, gradients, optimizer."""
    activations_gib: float
    logits_gib: float
    base_gib: float
    available_gib: float

    @property
    def needed_gib(self) -> float:
        return self.states_gib + self.activations_gib + self.logits_gib + self.base_gib


def training_memory(
    model: str | TrainedModel,
    *,
    gpu: str,
    gpus: int,
    longest: int,
    backend: Backend = "fsdp",
    layout: TrainLayout | None = None,
) -> TrainingMemory:
    """Estimate the peak of one GPU. `longest` is the longest sample, in tokens.

    Published peaks (prime-rl, FSDP on 8 GPUs, 16K and 64K tokens) are met to 3 GiB. Raises
    TrainingError for an unknown GPU class.
    """
    m = trained_model(model)
    memory_gib = MEMORY_GIB.get(gpu.lower())
    if memory_gib is None:
        raise TrainingError(f"no memory size of GPU {gpu!r}; known: {', '.join(MEMORY_GIB)}")
    if gpus < 1 or longest < 0:
        raise TrainingError(f"{gpus} GPUs and samples of {longest} tokens are no training step")
    on = layout or TrainLayout(micro_batch_tokens=1)
    on.data_parallel(gpus)
    tokens = max(longest, on.micro_batch_tokens) / on.cp
    if backend == "fsdp":
        states = STATE_BYTES * m.parameters / gpus
    else:
        shards = min(gpus, on.tp * on.pp * (on.ep if m.moe else 1))
        states = WEIGHT_BYTES * m.parameters / shards + OPTIMIZER_BYTES * m.parameters / gpus
    per_unit = MOE_ACTIVATION_BYTES if m.moe else ACTIVATION_BYTES
    # Stages hold a part of the layers, for as many micro-batches in flight: PP cancels.
    activations = per_unit * m.layers * m.hidden * tokens / on.tp
    logits = LOGIT_BYTES * m.vocabulary * min(tokens, LOGIT_CHUNK_TOKENS) / on.tp
    return TrainingMemory(
        states_gib=states / GIB,
        activations_gib=activations / GIB,
        logits_gib=logits / GIB,
        base_gib=BASE_GIB,
        available_gib=memory_gib,
    )


def check_memory(
    model: str | TrainedModel,
    *,
    gpu: str,
    gpus: int,
    longest: int,
    backend: Backend = "fsdp",
    layout: TrainLayout | None = None,
) -> TrainingMemory:
    """Return the estimate of `training_memory`, or raise TrainingMemoryError if it does not fit.

    The message names the model, the GPUs, GiB needed and available, and the smallest number of
    GPUs that works with the same layout.
    """
    m = trained_model(model)

    def at(number: int) -> TrainingMemory:
        return training_memory(
            m, gpu=gpu, gpus=number, longest=longest, backend=backend, layout=layout
        )

    peak = at(gpus)
    if peak.needed_gib <= peak.available_gib:
        return peak
    of_one = 1 if layout is None else layout.tp * layout.pp * layout.cp
    more = range((gpus // of_one + 1) * of_one, MOST_GPUS + 1, of_one)
    enough = more[bisect_left(more, True, key=lambda n: _fits(at(n))) :][:1]
    remedy = (
        f"{enough[0]} GPUs are the smallest number that works with this layout"
        if enough
        else "no number of GPUs works with this layout; take a higher TP degree, or shorter samples"
    )
    raise TrainingMemoryError(
        f"training {m.name} on {gpus} {gpu} GPUs needs "
        f"{peak.needed_gib:.1f} GiB on each and has {peak.available_gib:.1f} (states "
        f"{peak.states_gib:.1f}, activations {peak.activations_gib:.1f}, logits "
        f"{peak.logits_gib:.1f}, base {peak.base_gib:.1f}); {remedy}"
    )


def _fits(peak: TrainingMemory) -> bool:
    return peak.needed_gib <= peak.available_gib
