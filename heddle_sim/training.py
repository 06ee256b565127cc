"""Seconds that one RL step spends in the trainer, for given sample lengths, model and GPUs.

    seconds = FLOPs / (GPUs * peak * MFU) * pipeline bubble + fixed part of each optimizer step

`docs/training-time.md` has the formula, the errors on published steps, and what is not modelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from heddle_sim.trained_models import TrainedModel, trained_model

Backend = Literal["megatron", "fsdp"]
Precision = Literal["bf16", "fp8"]
Lengths = Sequence[int] | NDArray[Any]

PEAK_TFLOPS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "a100": 312.0,
        "l40s": 362.0,
        "h20": 148.0,
        "h100": 989.0,
        "h800": 989.0,
        "h200": 989.0,
        "gh200": 989.0,
        "b200": 2250.0,
        "gb200": 2500.0,
        "gb300": 2500.0,
    }
)
"""Dense bf16 TFLOP/s of one GPU, NVIDIA data sheets. MFU of FP8 is relative to these, too."""

FORWARD_GATHERS = 1 / 3
"""Collectives of a forward pass, relative to those of an optimizer step. With sharded parameters
a step gathers them twice and scatters gradients once; a forward gathers once."""
NODE_GPUS: Final[Mapping[str, int]] = MappingProxyType({"gb200": 72, "gb300": 72})
"""GPUs that one NVLink domain connects; 8 for the others."""
NVLINK_OVER_NETWORK = 9
"""Rate of NVLink on Hopper (450 GB/s each way) over that of a GPU's 400 Gb/s link."""

DEFAULT_MICRO_BATCH_TOKENS = 4096


class TrainingError(ValueError):
    """A training step that cannot be: unknown GPU, or a layout that does not divide the GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """Parallelism of a Megatron trainer; the rest of the GPUs is data-parallel."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Expert parallelism; it shares GPUs with data parallelism."""
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
    """Packed tokens of one micro-batch; a longer sample is a micro-batch of its own."""

    def data_parallel(self, gpus: int) -> int:
        """Ranks of data parallelism on so many GPUs; TrainingError if they do not divide."""
        if min(self.tp, self.pp, self.cp, self.ep, self.micro_batch_tokens) < 1:
            raise TrainingError(f"every degree of a layout is 1 or more: {self}")
        of_one = self.tp * self.pp * self.cp
        if gpus % of_one:
            raise TrainingError(
                f"{gpus} GPUs do not divide by TP {self.tp} x PP {self.pp} x CP {self.cp} = "
                f"{of_one}; give a multiple of {of_one}"
            )
        return gpus // of_one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """Seconds of one RL step in the trainer."""

    train_s: float
    """Forward and backward over all samples."""
    logprob_s: float
    """Forward passes for old and reference log-probabilities."""
    fixed_s: float
    """What optimizer steps take whatever their tokens: collectives and the update."""

    @property
    def total_s(self) -> float:
        return self.train_s + self.logprob_s + self.fixed_s


def step_flops(model: str | TrainedModel, lengths: Lengths) -> float:
    """FLOPs of forward and backward over samples of these lengths (tokens, prompt included).

    Packed samples do not attend to each other, so each has its own length in the attention term.
    Raises TrainingError for a length that is negative or not finite.
    """
    n = np.asarray(lengths, dtype=np.float64)
    if not np.isfinite(n).all() or (n < 0).any():
        raise TrainingError("lengths of samples are finite numbers of tokens, 0 or more")
    m = trained_model(model)
    attention = 6 * m.layers * m.heads * m.head_dim * float(n @ n)
    return 6 * m.multiplied * float(n.sum()) + attention


def peak_flops(gpu: str) -> float:
    """Dense bf16 FLOP/s of one GPU; TrainingError names the known classes."""
    peak = PEAK_TFLOPS.get(gpu.lower())
    if peak is None:
        raise TrainingError(f"no peak FLOP rate of GPU {gpu!r}; known: {', '.join(PEAK_TFLOPS)}")
    return peak * 1e12


def pipeline_stretch(layout: TrainLayout, *, gpus: int, tokens: float, longest: float) -> float:
    """How many times longer a pass takes because pipeline stages fill and drain: 1 without PP.

    With `m` micro-batches on `pp` stages, ``(m + pp - 1) / m`` (Megatron-LM, arXiv 2104.04473,
    without interleaving). `tokens` are those of one optimizer step or log-prob pass.
    """
    if layout.pp == 1:
        return 1.0
    size = max(layout.micro_batch_tokens, longest)
    batches = max(1.0, tokens / layout.data_parallel(gpus) / size)
    return (batches + layout.pp - 1) / batches


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProfile:
    """Fitted efficiency of trainers, from a profile file (`heddle_sim.training_files`)."""

    mfu: dict[str, dict[str, float]]
    """By "megatron", "fsdp" or "megatron-fp8", then size class; FP8 relative to the bf16 peak."""
    gpu_efficiency: dict[str, float]
    """MFU on a GPU class, relative to Hopper; a class without an entry counts as 1."""
    forward_speedup: dict[str, float]
    """MFU of a forward pass alone over that of training, by back end. Where activations are
    recomputed it is about 4/3, since MFU does not count the second forward pass."""
    fixed_s_per_billion: dict[str, float]
    """Collectives of an optimizer step over several nodes, by back end: seconds for each 1e9
    parameters. Gathering takes as long on more GPUs. A back end without an entry has none."""
    colocated_efficiency: dict[str, float]
    """Speed of training beside sleeping engines, relative to GPUs of its own, by back end."""
    errors: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    def efficiency(
        self, model: str | TrainedModel, *, gpu: str, backend: str, precision: Precision = "bf16"
    ) -> float:
        """MFU: the share of the bf16 peak that a trainer reaches, pipeline bubble apart.

        Raises TrainingError for a back end without an entry.
        """
        key = backend if precision == "bf16" else f"{backend}-{precision}"
        by_class = self.mfu.get(key)
        if by_class is None:
            raise TrainingError(f"no MFU of trainer {key!r}; known: {', '.join(sorted(self.mfu))}")
        return by_class[trained_model(model).size_class] * self.gpu_efficiency.get(gpu.lower(), 1.0)

    def collectives_s(
        self, model: str | TrainedModel, *, gpu: str, gpus: int, backend: Backend
    ) -> float:
        """Seconds of the collectives of one optimizer step, which its tokens do not hide."""
        fixed = self.fixed_s_per_billion.get(backend, 0.0) * trained_model(model).parameters / 1e9
        return fixed / (NVLINK_OVER_NETWORK if gpus <= NODE_GPUS.get(gpu.lower(), 8) else 1)

    def step_time(
        self,
        lengths: Lengths,
        *,
        model: str | TrainedModel,
        gpu: str,
        gpus: int,
        backend: Backend = "megatron",
        layout: TrainLayout | None = None,
        optimizer_steps: int = 1,
        logprob_passes: int = 1,
        colocated: bool = False,
        precision: Precision = "bf16",
    ) -> TrainingTime:
        """Seconds that one RL step spends in the trainer.

        `lengths`: tokens of each trained sample, prompt included. `optimizer_steps`: mini-batches
        that the samples are cut into. `logprob_passes`: 1 for old log-probabilities, 2 with a
        reference model, 0 if the engine's are used. `colocated`: the trainer moves its state
        between host and GPU within the phase, as verl does. `layout` matters by its pipeline
        bubble and its check alone. Errors of the sums are in `errors`. Memory is checked apart
        (`heddle_sim.training_memory`).
        """
        if gpus < 1 or optimizer_steps < 1 or logprob_passes < 0:
            raise TrainingError(
                f"a step needs GPUs ({gpus}) and optimizer steps ({optimizer_steps}) of 1 or more, "
                f"and log-prob passes ({logprob_passes}) of 0 or more"
            )
        m = trained_model(model)
        n = np.asarray(lengths, dtype=np.float64)
        tokens = float(n.sum())
        work = step_flops(m, n)
        if tokens == 0:
            return TrainingTime(train_s=0.0, logprob_s=0.0, fixed_s=0.0)
        rate = gpus * peak_flops(gpu)
        rate *= self.efficiency(m, gpu=gpu, backend=backend, precision=precision)
        if colocated:
            rate *= self.colocated_efficiency.get(backend, 1.0)
        train_stretch = logprob_stretch = 1.0
        if layout is not None:
            longest = float(n.max())
            work = max(work, layout.data_parallel(gpus) * step_flops(m, n.max(keepdims=True)))
            of_step = tokens / optimizer_steps
            train_stretch = pipeline_stretch(layout, gpus=gpus, tokens=of_step, longest=longest)
            logprob_stretch = pipeline_stretch(layout, gpus=gpus, tokens=tokens, longest=longest)
        fixed = self.collectives_s(m, gpu=gpu, gpus=gpus, backend=backend)
        forward = work / 3 / rate / self.forward_speedup.get(backend, 1.0)
        return TrainingTime(
            train_s=work / rate * train_stretch,
            logprob_s=logprob_passes * (forward * logprob_stretch + FORWARD_GATHERS * fixed),
            fixed_s=fixed * optimizer_steps,
        )
