"""The process of a trainer: a causal language model, AdamW, and a checkpoint after each batch.

With `experiments.real_training.grpo`, the only file that uses torch.
"""

import json
import os
import random
import select
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from experiments.real_training.checkpoints import checkpoint, newest, partial
from experiments.real_training.grpo import group_advantages, policy_loss
from experiments.real_training.messages import (
    BatchTrained,
    PartDone,
    TrainBatch,
    TrainerBoot,
    TrainerOrder,
    TrainerReady,
    TrainerSettings,
    TrainMetrics,
    TrainPart,
    TrainSample,
)
from heddle_runtime.process.connection import connect
from heddle_runtime.process.fatal_error import fatal_error
from heddle_runtime.process.wire import Channel, ClosedError, Stop, unpack_floats, unpack_ids

_METRICS, _OPTIMIZER = "metrics.json", "optimizer.pt"


class GrpoTrainer:
    """A model, its optimizer, and the number of batches that it was trained on."""

    def __init__(self, settings: TrainerSettings, folder: Path) -> None:
        """Go on from the newest checkpoint in `folder`; without one, from the settings' model."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.threads)
        self.torch, self._settings, self._folder = torch, settings, folder
        last = newest(folder)
        self.batches = 0 if last is None else last + 1
        source = Path(settings.model_dir) if last is None else checkpoint(folder, last)
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.model.train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )
        if last is not None:
            state = torch.load(source / _OPTIMIZER, weights_only=True)
            self._optimizer.load_state_dict(state)
        self._sums = _Sums()
        """Of the parts of the batch in collection."""

    @property
    def parameters(self) -> int:
        """Size of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def accumulate(self, order: TrainPart) -> PartDone:
        """Add the gradients of a part, not yet divided by the tokens of the batch.

        Raises:
            ValueError: a batch or a part is missing before this one.
        """
        if (order.batch, order.part) != (self.batches, self._sums.parts):
            raise ValueError(
                f"part {order.part} of batch {order.batch} came after {self.batches} batches and "
                f"{self._sums.parts} parts"
            )
        if not order.part:
            self._optimizer.zero_grad()
        self._add(order.samples)
        self._sums.parts += 1
        return PartDone(order.batch, order.part)

    def _add(self, samples: Sequence[TrainSample]) -> None:
        """Sum gradients over whole groups."""
        sums, size = self._sums, self._settings.micro_batch
        advantages = group_advantages([s.reward for s in samples], [s.group for s in samples])
        for begin in range(0, len(samples), size):
            part = samples[begin : begin + size]
            found = self._loss(part, advantages[begin : begin + size])
            found.loss.backward()
            sums.loss += float(found.loss.detach())
            sums.clipped += float(found.clipped)
            sums.gap += float(found.gap)
        sums.reward += sum(s.reward for s in samples)
        sums.samples += len(samples)
        sums.tokens += sum(len(unpack_ids(s.tokens)) for s in samples)
        sums.generated += sum(map(_generated, samples))

    def train(self, order: TrainBatch) -> BatchTrained:
        """Train on a batch and write its checkpoint, unless that is there already.

        Raises:
            ValueError: a batch or parts of it are missing before this one, or it has been trained
                long ago.
        """
        if order.batch == self.batches - 1:
            path = checkpoint(self._folder, order.batch) / _METRICS
            metrics = msgspec.json.decode(path.read_bytes(), type=TrainMetrics)
            return BatchTrained(order.batch, metrics)
        if order.batch != self.batches:
            raise ValueError(f"batch {order.batch} came after {self.batches} batches")
        if order.parts != self._sums.parts:
            raise ValueError(f"batch {order.batch} has {order.parts} parts, not {self._sums.parts}")
        began_s = time.monotonic()
        metrics = self._last_step(order) if order.parts else self._step(order)
        self._sums = _Sums()
        metrics = self._save(order.batch, metrics, began_s)
        self.batches += 1
        return BatchTrained(order.batch, metrics)

    def _step(self, order: TrainBatch) -> TrainMetrics:
        """Make the optimizer steps of a batch."""
        settings, samples = self._settings, order.samples
        advantages = group_advantages([s.reward for s in samples], [s.group for s in samples])
        indices = list(range(len(samples)))
        random.Random(f"{settings.seed}/{order.batch}").shuffle(indices)
        steps = min(settings.optimizer_steps, len(indices))
        losses, norms, clipped, gap = [], [], 0.0, 0.0
        for step in range(steps):
            chosen = indices[step::steps]
            generated = sum(_generated(samples[i]) for i in chosen)
            self._optimizer.zero_grad()
            loss = step_gap = 0.0
            for begin in range(0, len(chosen), settings.micro_batch):
                part = chosen[begin : begin + settings.micro_batch]
                sums = self._loss([samples[i] for i in part], [advantages[i] for i in part])
                (sums.loss / generated).backward()
                loss += float(sums.loss.detach()) / generated
                clipped += float(sums.clipped)
                step_gap += float(sums.gap) / generated
            norm = self.torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), settings.max_grad_norm
            )
            self._optimizer.step()
            losses.append(loss)
            norms.append(float(norm))
            gap = step_gap if step == 0 else gap
        generated = sum(map(_generated, samples))
        return TrainMetrics(
            loss=sum(losses) / steps,
            reward=sum(s.reward for s in samples) / len(samples),
            clipped=clipped / generated,
            grad_norm=sum(norms) / steps,
            logprob_gap=gap,
            tokens=sum(len(unpack_ids(s.tokens)) for s in samples),
            generated=generated,
            seconds=0.0,
        )

    def _last_step(self, order: TrainBatch) -> TrainMetrics:
        """Add what is left of a batch to its parts, and make its one optimizer step."""
        self._add(order.samples)
        sums = self._sums
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= sums.generated
        norm = self.torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._settings.max_grad_norm
        )
        self._optimizer.step()
        return TrainMetrics(
            loss=sums.loss / sums.generated,
            reward=sums.reward / sums.samples,
            clipped=sums.clipped / sums.generated,
            grad_norm=float(norm),
            logprob_gap=sums.gap / sums.generated,
            tokens=sums.tokens,
            generated=sums.generated,
            seconds=0.0,
        )

    def _loss(self, samples: Sequence[TrainSample], advantages: Sequence[float]) -> Any:
        """Forward pass and loss of a micro-batch."""
        torch = self.torch
        contexts = [unpack_ids(sample.tokens) for sample in samples]
        longest = max(map(len, contexts))
        tokens = torch.zeros(len(samples), longest, dtype=torch.long)
        attention = torch.zeros(len(samples), longest, dtype=torch.long)
        mask = torch.zeros(len(samples), longest)
        old = torch.zeros(len(samples), longest)
        for row, (sample, context) in enumerate(zip(samples, contexts, strict=True)):
            tokens[row, : len(context)] = torch.tensor(context)
            attention[row, : len(context)] = 1
            logprobs = unpack_floats(sample.logprobs)
            for begin, end in sample.spans:
                mask[row, begin:end] = 1.0
                old[row, begin:end] = torch.tensor(logprobs[: end - begin])
                del logprobs[: end - begin]
        # The logits at a position are of the token after it.
        logits = self.model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
        each = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return policy_loss(
            each, old[:, 1:], torch.tensor(advantages), mask[:, 1:], self._settings.clip
        )

    def _save(self, batch: int, metrics: TrainMetrics, began_s: float) -> TrainMetrics:
        """Write a checkpoint: a folder that gets its name when all is in it."""
        path = partial(self._folder, batch)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self.model.save_pretrained(path)
        self.torch.save(self._optimizer.state_dict(), path / _OPTIMIZER)
        metrics = msgspec.structs.replace(metrics, seconds=time.monotonic() - began_s)
        (path / _METRICS).write_text(json.dumps(msgspec.to_builtins(metrics)) + "\n")
        path.rename(checkpoint(self._folder, batch))
        return metrics


@dataclass(slots=True)
class _Sums:
    """Over the parts of a batch."""

    parts: int = 0
    samples: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    gap: float = 0.0
    reward: float = 0.0
    tokens: int = 0
    generated: int = 0


def _generated(sample: TrainSample) -> int:
    return sum(end - begin for begin, end in sample.spans)


def serve(trainer: GrpoTrainer, channel: Channel[TrainerOrder]) -> None:
    """Train what the driver sends, until it sends `Stop` or is gone."""
    while True:
        select.select([channel], [channel] if channel.clogged else [], [])
        channel.flush()
        for order in channel.receive():
            match order:
                case TrainPart():
                    channel.send(trainer.accumulate(order))
                case TrainBatch():
                    channel.send(trainer.train(order))
                case Stop():
                    return
                case TrainerBoot():
                    raise AssertionError("a trainer boots once")


def main(arguments: list[str]) -> None:
    """Run a trainer; `arguments` holds the descriptor of the socket to the driver."""
    try:
        channel, boot = connect(int(arguments[0]), TrainerOrder, TrainerBoot)
    except ClosedError:
        return
    try:
        began_s = time.monotonic()
        trainer = GrpoTrainer(boot.settings, Path(boot.folder))
        load_s = time.monotonic() - began_s
        channel.send(TrainerReady(trainer.batches, trainer.parameters, load_s))
        serve(trainer, channel)
    except ClosedError:
        return
    except Exception as error:
        fatal_error(channel, error)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
