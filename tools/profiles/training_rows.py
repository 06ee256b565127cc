"""Rows of published training steps: which count as training time, and what each says.

The rules are general and stated with each row that they leave out; none names a single row.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heddle_calibrate.serving.published_rows import LeftOut, Line, read_lines
from heddle_sim.trained_models import MODELS, TrainedModel, trained_model
from heddle_sim.training import (
    FORWARD_GATHERS,
    PEAK_TFLOPS,
    Backend,
    TrainingProfile,
    TrainLayout,
    pipeline_stretch,
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
Kind = Literal["train", "logprob"]
Use = Literal["rl", "other"]

NEMO_PROMPT_TOKENS = 120
"""NeMo-RL's published lengths leave the prompt out: about 110 to 130 tokens."""
DOUBTFUL = 1.5
LOGPROB_PASSES = 2
"""NeMo-RL's log-prob phase: old policy and reference model."""
MODEL_NAMES = (
    (r"llama-3(\.\d)?(-like)?[- ](8b|70b|405b)", r"llama-3.1-\3"),
    (r"qwen2\.5-(?:math-)?(1\.5b|7b|14b|32b|72b)", r"qwen2.5-\1"),
    (r"(qwen3-(?:235b-a22b|30b-a3b|0\.6b|1\.7b|4b|8b|14b|32b))", r"\1"),
    (r"(gpt-oss-120b|deepseek-v3)", r"\1"),
)


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
    """One published duration, or one published MFU."""

    line: int
    source: str
    use: Use
    kind: Kind
    model: str
    gpu: str
    gpus: int
    backend: str
    """Key of a profile's `mfu`: "megatron", "fsdp" or "megatron-fp8"."""
    layout: TrainLayout
    length: float
    """Mean tokens of a sample, prompt included."""
    tokens: float
    """Of the whole phase; 0 where only an MFU is published."""
    optimizer_steps: int
    seconds: float
    """0 where only an MFU is published."""
    mfu: float

    @property
    def group(self) -> str:
        """The class by which errors are shown."""
        dense = "dense" if MODELS[self.model].size_class.startswith("dense") else "MoE"
        return f"{dense} {self.backend}" + ("" if self.use == "rl" else ", not RL")


def document(source: str) -> str:
    """Return the document of a citation: without its commit and its remarks."""
    return source.partition("@")[0].partition(" (")[0].strip()


def predicted_over_published(row: TrainingRow, profile: TrainingProfile) -> float:
    """Return predicted seconds over published ones; for an MFU alone, published over fitted."""
    name, _, precision = row.backend.partition("-")
    fitted = profile.efficiency(
        row.model, gpu=row.gpu, backend=name, precision="fp8" if precision else "bf16"
    )
    if not row.seconds:
        return row.mfu / fitted
    m = MODELS[row.model]
    passes = LOGPROB_PASSES if row.kind == "logprob" else 0
    rate = row.gpus * PEAK_TFLOPS[row.gpu] * 1e12 * fitted
    work = row.tokens * flops_per_token(m, row.length) / rate
    fixed = profile.collectives_s(m, gpu=row.gpu, gpus=row.gpus, backend=_plain(name))
    batch = row.tokens / (1 if passes else row.optimizer_steps)
    stretch = pipeline_stretch(row.layout, gpus=row.gpus, tokens=batch, longest=row.length)
    if passes:
        forward = work / 3 / profile.forward_speedup.get(name, 1.0)
        return passes * (forward * stretch + FORWARD_GATHERS * fixed) / row.seconds
    return (work * stretch + fixed * row.optimizer_steps) / row.seconds


def _plain(name: str) -> Backend:
    return "fsdp" if name == "fsdp" else "megatron"


def doubtful_documents(rows: Sequence[TrainingRow]) -> set[str]:
    """Documents whose RL rows hold more than training.

    Their SFT rows of the same model, GPUs, back end and lengths have the same arithmetic and the
    same optimizer step, and are faster by more than DOUBTFUL. Their RL rows are shown and not
    fitted.
    """

    def key(row: TrainingRow) -> tuple[str, str, str, int, str, float]:
        return row.source, row.model, row.gpu, row.gpus, row.backend, row.length

    def pace(row: TrainingRow) -> float:
        return row.seconds / row.tokens

    sft = {key(row): pace(row) for row in rows if row.use == "other" and row.seconds}
    return {
        row.source
        for row in rows
        if row.use == "rl" and key(row) in sft and pace(row) > DOUBTFUL * sft[key(row)]
    }


def is_doubtful(row: TrainingRow, documents: set[str]) -> bool:
    """Whether a row is an RL row of one of these documents."""
    return row.use == "rl" and row.source in documents


def read_training_rows(path: Path) -> tuple[list[TrainingRow], list[LeftOut]]:
    """Read a table of published training steps, in its order.

    Raises PublishedRowsError with file and line for a table that cannot be read.
    """
    rows: list[TrainingRow] = []
    out: list[LeftOut] = []
    for line in read_lines(path, COLUMNS):
        rule = _rule(line)
        if rule is None:
            rows.append(_row(line))
        else:
            out.append(LeftOut(line.number, rule))
    return rows, out


def model_name(text: str) -> str | None:
    """Name of a published model in the table of trained models, None if it is not there."""
    for pattern, name in MODEL_NAMES:
        found = re.search(pattern, text.lower())
        if found:
            return found.expand(name)
    return None


def _kind(phase: str) -> tuple[Use, Kind] | None:
    first = phase.split()[0].rstrip(":") if phase else ""
    match first:
        case "train" | "rl_train_full":
            return "rl", "train"
        case "logprob":
            return "rl", "logprob"
        case "sft" | "sft_full" | "pretrain":
            return "other", "train"
        case _:
            return None


def _rule(line: Line) -> str | None:
    """Why a row is no training time that the formula can be held against; None if it is."""
    text = f"{line['phase']} {line['parallelism']}".lower()
    measured = (line["tokens_per_step"] and line["step_s"]) or line["tok_s_per_gpu"]
    # Only rows of training time are read further, so that remarks elsewhere are no errors.
    kind = _kind(line["phase"])
    if "lora" in text:
        return "an adapter is trained, not the model"
    if kind is None:
        return "the phase is not training time"
    if not (measured or line["mfu"]):
        return "neither tokens nor MFU are published"
    if line["gpu"].lower() not in PEAK_TFLOPS:
        return "the GPU is not named, or has no peak rate"
    if model_name(line["model"]) is None:
        return "the shape of the model is not in the table"
    if "token drop" in text:
        return "tokens are dropped, so the work is not known"
    if measured and line.positive("seq_len") is None:
        return "the length of samples is not published"
    return None


def _backend(line: Line) -> str:
    text = f"{line['framework']} {line['parallelism']}".lower()
    # Megatron-Bridge shards with its own FSDP in some recipes; its kernels are Megatron's.
    megatron = "megatron" in line["framework"].lower() or (
        "fsdp" not in text and "dtensor" not in text
    )
    if not megatron:
        return "fsdp"
    return "megatron-fp8" if "fp8" in line["precision"] else "megatron"


def _degree(text: str, name: str) -> int:
    found = re.search(rf"(?<![A-Za-z]){name}(\d+)|(?<=\d){name}(\d+)", text)
    return int(found.group(1) or found.group(2)) if found else 1


def _row(line: Line) -> TrainingRow:
    kind = _kind(line["phase"])
    model = model_name(line["model"])
    assert kind is not None
    assert model is not None
    nemo = "NeMo-RL" in line["framework"] and kind[0] == "rl"
    length = line.positive("seq_len") or 0.0
    tokens, seconds = line.positive("tokens_per_step"), line.positive("step_s")
    gpus = line.positive("gpus") or 1
    rate = line.positive("tok_s_per_gpu")
    if not (tokens and seconds) and rate:
        # A rate: over the tokens of one sample for each GPU, as the benchmarks of rates do.
        tokens, seconds = length * gpus, length / rate
    if not (tokens and seconds):
        tokens = seconds = 0.0
    if nemo and tokens:
        tokens, length = tokens * (1 + NEMO_PROMPT_TOKENS / length), length + NEMO_PROMPT_TOKENS
    steps = re.search(r"(\d+) optimizer steps", line["parallelism"])
    text = line["parallelism"]
    layout = TrainLayout(tp=_degree(text, "TP"), pp=_degree(text, "PP"), cp=_degree(text, "CP"))
    if not nemo:
        # Recipes of pretraining run enough micro-batches, interleaved, to fill their pipelines.
        layout = TrainLayout()
    return TrainingRow(
        line=line.number,
        source=document(line["source"]),
        use=kind[0],
        kind=kind[1],
        model=model,
        gpu=line["gpu"].lower(),
        gpus=int(gpus),
        backend=_backend(line),
        layout=layout,
        length=length,
        tokens=tokens,
        optimizer_steps=int(steps.group(1)) if steps else 1,
        seconds=seconds,
        mfu=line.positive("mfu") or 0.0,
    )
