"""Rows of published training steps: which count as training time, and what each says.

The rules are general and stated with each row that they leave out; none names a single row.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from heddle_calibrate.serving.published_rows import LeftOut, Line, read_lines
from heddle_sim.trained_models import TrainedModel, UnknownModelError, trained_model
from heddle_sim.training import (
    PEAK_TFLOPS,
    Backend,
    Precision,
    TrainingProfile,
    TrainLayout,
    peak_flops,
)

COLUMNS = (
    "model",
    "gpu",
    "gpus",
    "parallelism",
    "seq_len",
    "tokens_per_step",
    "step_s",
    "tok_s_per_gpu",
    "mfu",
    "phase",
    "precision",
    "framework",
    "source",
)
Kind = Literal["train", "logprob", "step"]
Use = Literal["rl", "other"]

NEMO_PROMPT_TOKENS = 120
"""NeMo-RL's published lengths leave the prompt out: about 110 to 130 tokens."""
LOGPROB_PASSES = 2
"""NeMo-RL's log-prob phase: old policy and reference model."""
UNKNOWN_TP, LARGE = 4, 20e9
"""TP of larger dense models where an RL row states none: NeMo-RL's of 32B and 70B."""
RECIPE_TP = {("deepseek-v3", "h100"): 2}
"""TP of Megatron-Bridge's recipes with experts where a row states no layout, 1 without an entry:
scripts/performance/configs at 0fa501a."""
MODEL_NAMES = (
    (r"llama-3(\.\d)?(-like)?[- ](8b|70b|405b)", r"llama-3.1-\3"),
    (r"llama-3\.2-like (8b)", r"llama-3.1-\1"),
    (r"qwen2\.5-(?:math-)?(1\.5b|7b|14b|32b|72b)", r"qwen2.5-\1"),
    (r"intellect-3-106b-a12b", "glm-4.5-air"),
    (r"glm-5(\.\d)?$", "glm-5"),
)
"""Names that the table of trained models does not know. INTELLECT-3 is trained from GLM-4.5-Air."""
PHASES: dict[str, tuple[Use, Kind] | str] = {
    "train": ("rl", "train"),
    "rl_train_full": ("rl", "train"),
    "update_actor": ("rl", "train"),
    "logprob": ("rl", "logprob"),
    "old_logprob": ("rl", "logprob"),
    "ref": ("rl", "logprob"),
    "fwd_logprob_ref": ("rl", "logprob"),
    "sft": ("other", "train"),
    "sft_full": ("other", "train"),
    "pretrain": ("other", "train"),
    "gen": "a phase of the rollout: latency profiles have its time",
    "exposed_gen": "a phase of the rollout: latency profiles have its time",
    "weight_sync": "a weight update: the other table has its kind",
    "rl_step_1_off": ("rl", "step"),
    "train_wait": "a wait of the trainer, not its work",
}
STEP_SHARE = 0.5
"""Part of a one-step-off run's GPUs that trains, in NeMo-RL's performance summaries."""
WHOLE_STEP = "a whole step with its rollout: heddle loop predicts it, not the trainer alone"


def flops_per_token(model: str | TrainedModel, length: float) -> float:
    """FLOPs of forward and backward for each token of a sample of `length` tokens.

    ``6 * (active - input embedding) + 6 * layers * heads * head_dim * length``; the second term is
    causal attention. Against token and FLOP rates that Megatron-Bridge publishes side by side
    (docs/performance-summary.md), Llama-3 8B and 70B agree to 0.1 %, Qwen3 MoE to 0.3 %.
    A forward pass alone is a third. Recomputed activations are not counted.
    """
    m = trained_model(model)
    return 6 * m.multiplied + 6 * m.layers * m.heads * m.head_dim * length


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One published duration, or one published rate."""

    line: int
    source: str
    use: Use
    kind: Kind
    model: str
    gpu: str
    gpus: int
    backend: Backend
    precision: Precision
    layout: TrainLayout | None
    length: float
    """Mean tokens of a sample, prompt included."""
    tokens: float
    """Of the whole phase; 0 where only a rate is published."""
    optimizer_steps: int
    seconds: float
    """0 where only a rate is published."""
    rate: float
    """Tokens/s of one GPU; 0 where a duration is published."""
    written: bool
    """The trainer writes its weights to files in the step."""
    doubt: str
    """Why the row is shown and not fitted; empty if it is fitted."""

    @property
    def group(self) -> str:
        """The class by which errors are shown."""
        name = "MoE" if trained_model(self.model).moe else "dense"
        return name + ("" if self.precision == "bf16" else " FP8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFit:
    """A profile, and what trainers do in a step that it does not have."""

    profile: TrainingProfile
    written_s_per_billion: float
    """Weights written to files, 1e9 parameters."""


def document(source: str) -> str:
    """Return the document of a citation: without its commit and its remarks."""
    return source.partition("@")[0].partition(" (")[0].strip()


def predicted_over_published(row: TrainingRow, fit: TrainerFit) -> float:
    """Return predicted seconds over published ones."""
    profile, m = fit.profile, trained_model(row.model)
    if row.rate:
        one = profile.token_s(
            m,
            row.length,
            gpu=row.gpu,
            backend=row.backend,
            layout=row.layout,
            precision=row.precision,
        )
        return one * row.rate
    samples = max(1, round(row.tokens / row.length))
    time = profile.step_time(
        np.full(samples, row.tokens / samples),
        model=m,
        gpu=row.gpu,
        gpus=row.gpus,
        backend=row.backend,
        layout=row.layout,
        optimizer_steps=row.optimizer_steps,
        logprob_passes=LOGPROB_PASSES,
        precision=row.precision,
    )
    if row.kind == "logprob":
        return time.logprob_s / row.seconds
    if row.kind == "step":
        return time.total_s / row.seconds
    written = fit.written_s_per_billion * m.parameters / 1e9 if row.written else 0.0
    return (time.train_s + time.fixed_s + written) / row.seconds


def read_training_rows(*paths: Path) -> tuple[list[TrainingRow], list[LeftOut]]:
    """Read tables of published training steps, in their order.

    Raises PublishedRowsError with file and line for a table that cannot be read.
    """
    rows: list[TrainingRow] = []
    out: list[LeftOut] = []
    for path in paths:
        for line in read_lines(path, COLUMNS):
            rule = _rule(line)
            if rule is None:
                rows.append(_row(line))
            else:
                out.append(LeftOut(line.number, rule))
    return rows, out


def model_name(text: str) -> str | None:
    """Name of a published model in the table of trained models, None if it is not there."""
    first = text.lower().partition(" ")[0]
    for pattern, name in MODEL_NAMES:
        found = re.search(pattern, text.lower())
        if found:
            return found.expand(name)
    try:
        return trained_model(first).name
    except UnknownModelError:
        return None


def _phase(text: str) -> tuple[Use, Kind] | str:
    """What a phase is, or why it is no training time."""
    first = text.split()[0].rstrip(":") if text else ""
    if first.startswith("train_lora"):
        return "other", "train"
    if first in PHASES:
        return PHASES[first]
    whole = first.startswith(("rl_step", "compute_step"))
    return WHOLE_STEP if whole else "the phase is not training time"


def _rule(line: Line) -> str | None:
    """Why a row is no training time that the formula can be held against; None if it is."""
    phase = _phase(line["phase"])
    # Only rows of training time are read further, so that remarks elsewhere are no errors.
    if isinstance(phase, str):
        return phase
    if phase[1] == "step" and "train TP" not in line["parallelism"]:
        return f"{WHOLE_STEP}; its layout is not published"
    measured = (line["tokens_per_step"] and line["step_s"]) or line["tok_s_per_gpu"]
    if not (measured or line["mfu"]):
        return "neither tokens nor MFU are published"
    if line["gpu"].lower() not in PEAK_TFLOPS:
        return "the GPU is not named, or has no peak rate"
    if model_name(line["model"]) is None:
        return "the shape of the model is not in the table"
    if "token drop" in line["parallelism"].lower():
        return "tokens are dropped, so the work is not known"
    if measured and line.positive("seq_len") is None:
        return "the length of samples is not published"
    return None


def _doubt(line: Line) -> str:
    text = f"{line['phase']} {line['parallelism']}".lower()
    if "lora" in text:
        return "an adapter is trained, not the model"
    if text.startswith("rl_step"):
        return "a whole step, at least its trainer's part"
    if "upper bound" in text:
        return "its tokens are an upper bound"
    if "prime-rl" in line["framework"] and line["gpu"].lower() == "b200":
        return "FlashAttention 2 on Blackwell"
    return ""


def _backend(line: Line) -> Backend:
    text = f"{line['framework']} {line['parallelism']}".lower()
    # Megatron-Bridge shards with its own FSDP in some recipes; its kernels are Megatron's.
    megatron = "megatron" in line["framework"].lower() or (
        "fsdp" not in text and "dtensor" not in text and "prime-rl" not in text
    )
    return "megatron" if megatron else "fsdp"


def _degree(text: str, name: str) -> int:
    found = re.search(rf"(?<![A-Za-z]){name}(\d+)|(?<=\d){name}(\d+)", text)
    return int(found.group(1) or found.group(2)) if found else 1


def _layout(line: Line, model: TrainedModel, use: Use, backend: Backend) -> TrainLayout | None:
    """The degrees that take time.

    Recipes of pretraining run enough micro-batches, interleaved, to fill their pipelines, and hide
    collectives of TP behind products; experts' host time is on every GPU of TP.
    """
    text = line["parallelism"].rpartition("train ")[2]
    tp = _degree(text, "TP")
    if use == "rl" and backend == "megatron":
        if "TP" not in text and "DP" not in text and not model.moe and model.parameters > LARGE:
            tp = UNKNOWN_TP
        return TrainLayout(tp=tp, pp=_degree(text, "PP"), cp=_degree(text, "CP"))
    if text == "-" and "Megatron-Bridge" in line["framework"]:
        tp = RECIPE_TP.get((model.name, line["gpu"].lower()), 1)
    return TrainLayout(tp=tp) if model.moe else None


def _precision(text: str) -> Precision:
    for one in ("nvfp4", "mxfp4", "mxfp8", "fp8"):
        if one in text.lower():
            return one
    return "bf16"


def _row(line: Line) -> TrainingRow:
    phase, name = _phase(line["phase"]), model_name(line["model"])
    assert not isinstance(phase, str)
    assert name is not None
    use, kind = phase
    gpu = line["gpu"].lower()
    nemo = "NeMo-RL" in line["framework"] and use == "rl"
    length = line.positive("seq_len") or 0.0
    tokens, seconds = line.positive("tokens_per_step"), line.positive("step_s")
    gpus = int(line.positive("gpus") or 1)
    rate = line.positive("tok_s_per_gpu") or 0.0
    if tokens and seconds:
        rate = 0.0
    else:
        tokens = seconds = 0.0
        mfu = line.positive("mfu") or 0.0
        rate = rate or mfu * peak_flops(gpu) / flops_per_token(name, length)
    if nemo and tokens:
        tokens, length = tokens * (1 + NEMO_PROMPT_TOKENS / length), length + NEMO_PROMPT_TOKENS
    if kind == "step":
        gpus = max(1, round(STEP_SHARE * gpus))
    steps = re.search(r"(\d+) optimizer steps", line["parallelism"])
    backend = _backend(line)
    return TrainingRow(
        line=line.number,
        source=document(line["source"]),
        use=use,
        kind=kind,
        model=name,
        gpu=gpu,
        gpus=gpus,
        backend=backend,
        precision=_precision(line["precision"]),
        layout=_layout(line, trained_model(name), use, backend),
        length=length,
        tokens=tokens,
        optimizer_steps=int(steps.group(1)) if steps else 1,
        seconds=seconds,
        rate=rate,
        written="prime-rl" in line["framework"] and line["phase"].startswith("rl_train"),
        doubt=_doubt(line),
    )
