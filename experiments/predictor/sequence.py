"""A recurrent network over a trajectory's steps: torch trains it, inference uses numpy alone."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.predictor.recurrent import FARTHEST, NAMES, Recurrent
from heddle_predict.examples import Examples
from heddle_predict.model import Floats, Vocabulary
from heddle_predict.quantiles import LEVELS, weighted_quantiles

STATE: Final = 24
HIDDEN: Final = 32
EPOCHS = 20
_PATIENCE: Final = 4
_BATCH: Final = 64
_MOST_STEPS: Final = 20_000
"""Updates in all, however large the data."""
_RATE: Final = 2e-3
_DECAY: Final = 1e-3
_DROPPED: Final = 0.15
_LEFT_OUT: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceModel:
    """A recurrent network over the rows of a trajectory."""

    vocabulary: Vocabulary
    levels: tuple[float, ...]
    network: Recurrent
    shifts: Floats
    """Added to each quantile: the correction found on held-out groups."""

    def answers(self, questions: Examples) -> Floats:
        """Quantiles of the remaining tokens, (questions, levels)."""
        states = self._states(questions)
        found = self.network.quantiles(states, questions.rows) + self.shifts
        logs = np.clip(found + questions.survival[:, None], -50, 50)
        return np.asarray(np.maximum(np.exp(logs), 1.0))

    def _states(self, questions: Examples) -> Floats:
        """The state of each question's trajectory, after the tool calls before it."""
        start, rows = self.network.initial_state(), questions.rows
        states = np.tile(start, (len(questions), 1))
        last = np.tile(start, (int(questions.run.max()) + 1, 1))
        for step in range(int(questions.step.max()) + 1):
            here = np.flatnonzero(questions.step == step)
            moved = here[questions.queued[here] & (questions.step[here] > 0)]
            run = questions.run[moved]
            last[run] = self.network.update(last[run], rows[moved])
            states[here] = last[questions.run[here]]
        return states


@dataclass(frozen=True, slots=True)
class FittedSequence:
    """A network, and the results of its training."""

    model: SequenceModel
    epochs: int
    error: float
    """Weighted root mean squared error of the logarithm, on groups left out."""


def fit_sequence(
    seen: Examples, augmented: Examples | None, vocabulary: Vocabulary, seed: int
) -> FittedSequence:
    """Learn from `seen`, and from `augmented` with the weight of a hundred trajectories.

    A fifth of the groups is held out. They determine when training stops, and the shift of each
    quantile.
    """
    rng = np.random.default_rng([seed, 5])
    groups = rng.permutation(np.unique(seen.group))
    apart = groups[: max(1, round(_LEFT_OUT * len(groups)))]
    held = np.isin(seen.group, apart)
    training, checking = seen.where(~held), seen.where(held)
    share = min(1.0, 100.0 / len(np.unique(training.script)))
    weights = training.weights
    if augmented is not None:
        augmented_weights = augmented.weights * (share * weights.sum() / augmented.weights.sum())
        weights = np.concatenate((weights, augmented_weights))
        training = Examples.joined([training, augmented])
    centre, spread = training.rows.mean(axis=0), training.rows.std(axis=0)
    spread = np.where(spread > 1e-6, spread, 1.0)
    trainer = _Trainer(seed, centre, spread)
    epochs = trainer.train(training, weights / weights.mean(), checking)
    found = trainer.answers(checking)
    shifts, error = shifted(checking.targets, found, checking.weights)
    model = SequenceModel(
        vocabulary=vocabulary, levels=LEVELS, network=trainer.network(), shifts=shifts
    )
    return FittedSequence(model, epochs, error)


def by_run(questions: Examples) -> list[Any]:
    """Numbers of each trajectory's questions, in order."""
    order = np.argsort(questions.run, kind="stable")
    cuts = np.flatnonzero(np.diff(questions.run[order])) + 1
    return list(np.split(order, cuts))


class _Trainer:
    """The network in torch, its training, and its weights as arrays."""

    def __init__(self, seed: int, centre: Floats, spread: Floats) -> None:
        self._rng = np.random.default_rng([seed, 6])
        self._generator = torch.Generator().manual_seed(seed)
        self._centre, self._spread = centre, spread
        columns, nn = len(centre), torch.nn
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._gru = nn.GRU(columns, STATE, batch_first=True)
            self._hidden = nn.Linear(STATE + columns, HIDDEN)
            self._head = nn.Linear(HIDDEN, len(LEVELS))
        with torch.no_grad():  # begins at survival's estimate with quantiles a little apart
            self._head.weight.mul_(0.1)
            self._head.bias.copy_(torch.tensor([-1.5, *[-0.7] * (len(LEVELS) - 1)]))
        self._parts = [self._gru, self._hidden, self._head]
        self._levels = torch.tensor(LEVELS)

    def train(self, seen: Examples, weights: Floats, checking: Examples) -> int:
        """Train until the held-out loss stops falling; return the epochs of the best weights."""
        parameters = [p for part in self._parts for p in part.parameters()]
        optimiser = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
        runs = by_run(seen)
        best, best_epoch, kept = np.inf, 0, [p.detach().clone() for p in parameters]
        steps = 0
        for epoch in range(1, EPOCHS + 1):
            # Runs of similar length together, to reduce padding; their batches in any order.
            order = sorted(self._rng.permutation(len(runs)), key=lambda i: len(runs[i]))
            batches = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
            for chosen in self._rng.permutation(len(batches)):
                lines = [runs[i] for i in batches[chosen]]
                loss = self._loss(seen, lines, weights)
                optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
                steps += 1
            found = self._pinball(checking)
            if found < best - 1e-4:
                best, best_epoch = found, epoch
                kept = [p.detach().clone() for p in parameters]
            elif epoch - best_epoch >= _PATIENCE:
                break
            if steps >= _MOST_STEPS:
                break
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        return best_epoch

    def answers(self, questions: Examples) -> Floats:
        """Quantiles of the targets, one line for each question."""
        found = np.empty((len(questions), len(LEVELS)))
        runs = by_run(questions)
        with torch.no_grad():
            for i in range(0, len(runs), 256):
                lines = runs[i : i + 256]
                found[np.concatenate(lines)] = self._outputs(questions, lines).numpy()
        return found

    def network(self) -> Recurrent:
        """Return the weights as arrays for inference."""
        gru, hidden, head = self._gru, self._hidden, self._head
        found = {
            "centre": self._centre,
            "spread": self._spread,
            "input_weight": gru.weight_ih_l0,
            "input_bias": gru.bias_ih_l0,
            "state_weight": gru.weight_hh_l0,
            "state_bias": gru.bias_hh_l0,
            "hidden_weight": hidden.weight,
            "hidden_bias": hidden.bias,
            "head_weight": head.weight,
            "head_bias": head.bias,
        }
        arrays = {
            name: np.asarray(v if isinstance(v, np.ndarray) else v.detach().numpy(), np.float64)
            for name, v in found.items()
        }
        assert tuple(arrays) == NAMES
        return Recurrent.of(arrays, columns=len(self._centre), quantiles=len(LEVELS))

    def _outputs(self, questions: Examples, lines: list[Any], *, training: bool = False) -> Any:
        """Run a batch of trajectories; outputs in the order of the lines."""
        taken = [run[questions.queued[run] & (questions.step[run] > 0)] for run in lines]
        longest = max(len(run) for run in taken)
        inputs = torch.zeros((len(lines), max(longest, 1), len(self._centre)))
        for i, run in enumerate(taken):
            inputs[i, : len(run)] = self._scaled(questions.rows[run])
        states, _ = self._gru(inputs)
        first = torch.zeros((len(lines), 1, STATE))
        states = torch.cat((first, states), dim=1)
        which = torch.from_numpy(np.repeat(np.arange(len(lines)), [len(run) for run in lines]))
        every = np.concatenate(lines)
        seen = states[which, torch.from_numpy(questions.step[every])]
        rows = self._scaled(questions.rows[every])
        if training:  # dropout of whole columns of a question
            keep = torch.rand(rows.shape, generator=self._generator) >= _DROPPED
            rows = rows * keep / (1.0 - _DROPPED)
        hidden = torch.relu(self._hidden(torch.cat((seen, rows), dim=1)))
        out = self._head(hidden)
        rises = torch.nn.functional.softplus(out[:, 1:])
        return torch.cumsum(torch.cat((out[:, :1], rises), dim=1), dim=1)

    def _loss(self, seen: Examples, lines: list[Any], weights: Floats) -> Any:
        every = np.concatenate(lines)
        truths = torch.from_numpy(seen.targets[every].astype(np.float32))[:, None]
        wrong = truths - self._outputs(seen, lines, training=True)
        pinball = torch.maximum(self._levels * wrong, (self._levels - 1.0) * wrong).mean(dim=1)
        return (pinball * torch.from_numpy(weights[every].astype(np.float32))).mean()

    def _pinball(self, checking: Examples) -> float:
        wrong = checking.targets[:, None] - self.answers(checking)
        levels = np.array(LEVELS)
        loss = np.maximum(levels * wrong, (levels - 1.0) * wrong).mean(axis=1)
        return float(np.average(loss, weights=checking.weights))

    def _scaled(self, rows: Floats) -> Any:
        scaled = np.clip((rows - self._centre) / self._spread, -FARTHEST, FARTHEST)
        return torch.from_numpy(scaled.astype(np.float32))


def shifted(
    truths: NDArray[Any], found: NDArray[Any], weights: NDArray[Any]
) -> tuple[NDArray[np.float64], float]:
    """By how much to shift each quantile so that it holds its share of `truths`, and what is left.

    `found` are the answers, (truths, levels). Shifts keep quantiles in order: no upper one is
    shifted down by more than the one below it. The second number is the weighted root mean squared
    error of the median after its shift.
    """
    wrong = truths[:, None] - found
    each = [weighted_quantiles(wrong[:, i], weights, [level]) for i, level in enumerate(LEVELS)]
    shifts = np.concatenate(each)
    middle = LEVELS.index(0.5)
    shifts[middle:] = np.maximum.accumulate(shifts[middle:])
    shifts[: middle + 1] = np.minimum.accumulate(shifts[middle::-1])[::-1]
    square = np.square(wrong[:, middle] - shifts[middle])
    return shifts, float(np.sqrt(np.average(square, weights=weights)))
