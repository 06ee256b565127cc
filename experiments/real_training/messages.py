"""Settings of a trainer, and the messages between it and the driver."""

from typing import TypeAlias

import msgspec

from heddle_runtime.process.wire import Broken, Stop, WireMessage


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """GRPO on a causal language model.

    Raises:
        ValueError: a value out of range, with its name.
    """

    model_dir: str
    """A model folder as transformers writes it, with the weights to begin with."""
    learning_rate: float = 3e-3
    """Of AdamW, constant."""
    clip: float = 0.2
    """The ratio of new and old probabilities counts from 1 - clip to 1 + clip."""
    optimizer_steps: int = 2
    """Of a batch, each on as large a part of it."""
    max_grad_norm: float = 1.0
    micro_batch: int = 32
    """Trajectories of one forward and backward pass."""
    threads: int = 1
    """CPU threads of torch."""
    seed: int = 0
    """Of the order in which a batch's trajectories are trained."""

    def __post_init__(self) -> None:
        """Check each value."""
        for name in ("learning_rate", "clip", "max_grad_norm"):
            value = getattr(self, name)
            if not 0.0 < value < 1e9:
                raise ValueError(f"{name} is {value}: it must be more than 0")
        for name in ("optimizer_steps", "micro_batch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")


# -- driver to trainer --------------------------------------------------------------------------


class TrainerBoot(WireMessage, frozen=True):
    """The first order. Ends in `TrainerReady` or `Broken`."""

    settings: TrainerSettings
    folder: str
    """Of the checkpoints; the trainer goes on from the newest."""
    parent: int
    """The driver's process id; the trainer ends with it."""


class TrainSample(WireMessage, frozen=True):
    """A finished trajectory."""

    group: str
    tokens: bytes
    """Its whole context: prompt, generations and observations."""
    spans: list[tuple[int, int]]
    """Begin and end of each generation in it."""
    logprobs: bytes
    """Of all generated tokens, in order, under the weights that made each."""
    reward: float


class TrainPart(WireMessage, frozen=True):
    """Compute the gradients of a part of a batch. Ends in `PartDone`."""

    batch: int
    part: int
    """Parts of the batch before it."""
    samples: list[TrainSample]


class TrainBatch(WireMessage, frozen=True):
    """Train on a batch, or on what is left of it after its parts. Ends in `BatchTrained`.

    A batch that is trained already is not trained again: sent once more, it is answered as before.
    """

    batch: int
    samples: list[TrainSample]
    parts: int = 0
    """Of the batch, sent before to this process."""


TrainerOrder: TypeAlias = TrainerBoot | TrainPart | TrainBatch | Stop


# -- trainer to driver --------------------------------------------------------------------------


class TrainerReady(WireMessage, frozen=True):
    """The trainer has loaded the model, or its newest checkpoint."""

    batches: int
    """Trained already."""
    parameters: int
    load_s: float


class TrainMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What the training of a batch was like."""

    loss: float
    """Mean of the optimizer steps."""
    reward: float
    """Mean of the trajectories."""
    clipped: float
    """Share of the generated tokens at which the clip held the gradient back."""
    grad_norm: float
    """Before it was limited; mean of the optimizer steps."""
    logprob_gap: float
    """Mean difference between engine's and trainer's log-prob of a token, before the first
    optimizer step, without sign. Near 0 for tokens of the newest weights."""
    tokens: int
    """Of all contexts."""
    generated: int
    """Tokens that were trained on."""
    seconds: float
    """From the order until the checkpoint was written."""


class PartDone(WireMessage, frozen=True):
    """Answer of `TrainPart`."""

    batch: int
    part: int


class BatchTrained(WireMessage, frozen=True):
    """Answer of `TrainBatch`: the checkpoint after it is complete."""

    batch: int
    metrics: TrainMetrics


TrainerReport: TypeAlias = TrainerReady | PartDone | BatchTrained | Broken
