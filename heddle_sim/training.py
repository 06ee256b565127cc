"""Seconds that one RL step spends in the trainer, for given sample lengths, model and GPUs.

    GPU-seconds of a token = FLOPs of products and attention at their rates
                             + collectives of TP + dispatch and host time of its experts
    seconds = GPU-seconds / GPUs * pipeline bubble + collectives of each optimizer step

`docs/training-time.md` has the formula, the errors on published steps, and what is not modelled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heddle_core.bounds import Bounds
from heddle_sim.trained_models import TrainedModel, trained_model

Backend = Literal["megatron", "fsdp"]
Precision = Literal["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
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
"""Dense bf16 TFLOP/s of one GPU, NVIDIA data sheets."""
SPEED_UP: Final[Mapping[str, float]] = MappingProxyType(
    {"fp8": 2.0, "mxfp8": 2.0, "mxfp4": 4.0, "nvfp4": 4.0}
)
"""Peak rate of products in a format over bf16's, data sheets. The recipes of FP8 (scales of a
tensor or of blocks) have one peak; GB300's 6 for NVFP4 is not counted."""
BLACKWELL = ("b200", "gb200", "gb300")
"""These have the formats of `SPEED_UP`."""
FP8_GPUS = ("l40s", "h20", "h100", "h800", "h200", "gh200")
"""These have FP8 alone; others bf16 alone."""

LINK_BYTES_PER_S: Final[Mapping[str, float]] = MappingProxyType(
    {"a100": 300e9, "l40s": 32e9, "h800": 200e9, "b200": 900e9, "gb200": 900e9, "gb300": 900e9}
)
"""NVLink (L40S: PCIe) of one GPU each way, data sheets; `HOPPER_LINK` for the others."""
HOPPER_LINK = 450e9
NETWORK_BYTES_PER_S = 50e9
"""Of one GPU to other nodes: a 400 Gb/s link."""
NODE_GPUS: Final[Mapping[str, int]] = MappingProxyType({"gb200": 72, "gb300": 72})
"""GPUs that one NVLink domain connects; 8 for the others."""
STEP_BYTES: Final[Mapping[str, int]] = MappingProxyType({"megatron": 6, "fsdp": 8})
"""Collectives of an optimizer step, bytes of a parameter: gradients in fp32, parameters in bf16.
FSDP gathers them twice."""
FORWARD_BYTES: Final[Mapping[str, int]] = MappingProxyType({"megatron": 0, "fsdp": 2})
"""Those of a forward pass alone; forward and backward without an optimizer step: twice that."""
TP_BYTES = 16
"""All-gathers and reduce-scatters of a layer under TP, bytes of a token and unit of the hidden
size: four pairs (two forward, two backward) in bf16 (Megatron-LM, arXiv 2205.05198)."""
DISPATCH_BYTES = 8
"""To experts and back, forward and backward, in bf16, of a token, chosen expert and unit."""
RING_BYTES = 12
"""Keys and values that pass all other ranks of CP, forward and backward, and the gradients of both,
in bf16, of a token and unit of one of the two (ring attention, arXiv 2310.01889)."""
ALL_TO_ALL_BYTES = 8
"""Queries, output (and likewise keys, values), forward and backward, in bf16, that FSDP's ranks of
CP exchange instead (Ulysses, arXiv 2309.14509)."""
RECOMPUTED = 4 / 3
"""Training over training without a second forward pass."""

DEFAULT_MICRO_BATCH_TOKENS = 4096


Rates: TypeAlias = Annotated[dict[str, float], Bounds(above=0)]
"""By back end or GPU class."""


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
    padded: bool = False
    """Samples are not packed: each takes as long as the longest."""
    expert_graphs: bool | None = None
    """CUDA graphs take the host's time off layers of experts. None: on GB200 and GB300 alone, as in
    published recipes."""

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
    """What optimizer steps take whatever their tokens: their collectives."""
    gathers_s: float = 0.0
    """The part of that which gradients without an optimizer step need."""

    @property
    def total_s(self) -> float:
        return self.train_s + self.logprob_s + self.fixed_s


def _checked(lengths: Lengths) -> NDArray[np.float64]:
    n = np.asarray(lengths, dtype=np.float64)
    if not np.isfinite(n).all() or (n < 0).any():
        raise TrainingError("lengths of samples are finite numbers of tokens, 0 or more")
    return n


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

    matmul: Rates
    """Share of the peak FLOP rate that products with weights reach in bf16, by back end; a second
    forward pass (FSDP recomputes activations) counts as lost."""
    attention: Rates
    """Likewise of attention, which is in bf16 whatever the precision."""
    low_precision_share: Annotated[float, Bounds(0, 1)]
    """Part of the time of products in bf16 that a low precision shortens by its peak."""
    gpu_efficiency: Rates
    """Shares on a GPU class relative to Hopper; a class without an entry counts as 1."""
    link_efficiency: Annotated[float, Bounds(above=0)]
    """Part of the data sheets' rates that collectives reach."""
    expert_layer_s: Annotated[float, Bounds(0)]
    """Host time of a layer of experts (routing, permuting, launches, waits for counts), for each
    token, on each GPU of TP."""
    colocated_efficiency: Rates
    """Speed of training beside sleeping engines, relative to GPUs of its own, by back end."""
    errors: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    def token_s(
        self,
        model: str | TrainedModel,
        length: float,
        *,
        gpu: str,
        backend: Backend = "megatron",
        layout: TrainLayout | None = None,
        precision: Precision = "bf16",
    ) -> float:
        """GPU-seconds of forward and backward of one token of a sample of `length` tokens."""
        token, pair, ring = self._costs(trained_model(model), gpu, backend, layout, precision)
        return token + max(pair * length, ring)

    def _costs(
        self,
        m: TrainedModel,
        gpu: str,
        backend: str,
        layout: TrainLayout | None,
        precision: str,
    ) -> tuple[float, float, float]:
        """GPU-seconds of a token; of a token and token of its sample, in attention; and those of a
        token's exchange between ranks of CP, which attention hides."""
        if backend not in self.matmul:
            raise TrainingError(
                f"no rate of trainer {backend!r}; known: {', '.join(sorted(self.matmul))}"
            )
        kind, tp = gpu.lower(), 1 if layout is None else layout.tp
        rate = peak_flops(gpu) * self.gpu_efficiency.get(kind, 1.0)
        link = _link(kind) * self.link_efficiency
        slower = 1.0 - self.low_precision_share * (1.0 - 1.0 / speed_up(gpu, precision))
        token = 6 * m.multiplied * slower / (rate * self.matmul[backend])
        token += TP_BYTES * (tp - 1) * m.layers * m.hidden / link
        if m.moe:
            token += DISPATCH_BYTES * m.expert_layers * m.chosen * m.hidden / link
            graphs = None if layout is None else layout.expert_graphs
            if not (kind in NODE_GPUS if graphs is None else graphs):
                token += tp * m.expert_layers * self.expert_layer_s
        keys, cp, ring = m.kv_heads or m.heads, 1 if layout is None else layout.cp, 0.0
        of_head = (cp - 1) * m.layers * m.head_dim
        if tp * cp > NODE_GPUS.get(kind, 8):
            of_head *= _link(kind) / _network(kind)
        if backend == "fsdp":
            token += ALL_TO_ALL_BYTES * of_head * (m.heads + keys) / (cp * link)
        else:
            ring = RING_BYTES * of_head * keys / link
        pair = 6 * m.layers * m.heads * m.head_dim / (rate * self.attention[backend])
        return token, pair, ring

    def collectives_s(
        self,
        model: str | TrainedModel,
        *,
        gpu: str,
        gpus: int,
        backend: Backend,
        layout: TrainLayout | None = None,
    ) -> float:
        """Seconds of the collectives of one optimizer step, which its tokens do not hide."""
        kind = gpu.lower()
        link = _link(kind) if gpus <= NODE_GPUS.get(kind, 8) else _network(kind)
        of_one = 1 if layout is None or backend == "fsdp" else layout.tp * layout.pp
        size = STEP_BYTES[backend] * trained_model(model).parameters / of_one
        return size / (link * self.link_efficiency) if gpus > of_one else 0.0

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
        between host and GPU within the phase, as verl does. `precision`: of products with weights.
        Errors of the sums are in `errors`. Memory is checked apart
        (`heddle_sim.training_memory`). Raises TrainingError for a back end, GPU or precision
        without figures.
        """
        if gpus < 1 or optimizer_steps < 1 or logprob_passes < 0:
            raise TrainingError(
                f"a step needs GPUs ({gpus}) and optimizer steps ({optimizer_steps}) of 1 or more, "
                f"and log-prob passes ({logprob_passes}) of 0 or more"
            )
        m, on = trained_model(model), layout or TrainLayout()
        n = _checked(lengths)
        token, pair, ring = self._costs(m, gpu, backend, layout, precision)
        if not n.sum():
            return TrainingTime(train_s=0.0, logprob_s=0.0, fixed_s=0.0)
        longest = float(n.max())
        if on.padded:
            n = np.full_like(n, longest)
        tokens = float(n.sum())
        of_sample = n * (token + np.maximum(pair * n, ring))

        def seconds_of(parts: Sequence[NDArray[np.float64]]) -> float:
            """Of parts one after the other, each as long as its longest sample on one rank."""
            ranks = 0 if layout is None else on.data_parallel(gpus)
            work = sum(max(float(part.sum()), ranks * float(part.max())) for part in parts)
            return work / gpus / (self.colocated_efficiency.get(backend, 1.0) if colocated else 1.0)

        seconds = seconds_of(np.array_split(of_sample, min(optimizer_steps, len(n))))
        of_step = pipeline_stretch(on, gpus=gpus, tokens=tokens / optimizer_steps, longest=longest)
        of_pass = pipeline_stretch(on, gpus=gpus, tokens=tokens, longest=longest)
        fixed = self.collectives_s(m, gpu=gpu, gpus=gpus, backend=backend, layout=layout)
        gather = fixed * FORWARD_BYTES[backend] / STEP_BYTES[backend]
        forward = seconds_of([of_sample]) / 3 / (RECOMPUTED if backend == "fsdp" else 1.0)
        return TrainingTime(
            train_s=seconds * of_step,
            logprob_s=logprob_passes * (forward * of_pass + gather),
            fixed_s=fixed * optimizer_steps,
            gathers_s=2 * gather * optimizer_steps,
        )


def _link(kind: str) -> float:
    return LINK_BYTES_PER_S.get(kind, HOPPER_LINK)


def _network(kind: str) -> float:
    """Between nodes; a GPU's own link is on the way."""
    return min(_link(kind), NETWORK_BYTES_PER_S)


def speed_up(gpu: str, precision: str) -> float:
    """Peak rate of products in a precision over bf16's; TrainingError if a GPU has none."""
    kind = gpu.lower()
    formats = tuple(SPEED_UP) if kind in BLACKWELL else ("fp8",) if kind in FP8_GPUS else ()
    if precision not in ("bf16", *formats):
        raise TrainingError(
            f"GPU {gpu!r} does not train in {precision!r}, but in {', '.join(('bf16', *formats))}; "
            "take one of these"
        )
    return SPEED_UP.get(precision, 1.0)
