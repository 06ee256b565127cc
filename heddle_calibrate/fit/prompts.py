"""The cost of prompts in a step, from measured iterations with prompts.

The time of an iteration with prompts is the sum of a decode step of the batch beside it (or an
*idle* step without a batch), a curve over its prompt tokens, a time per (query, key) pair, and one
per prompt. The sum is linear in all unknowns, so one fit of least relative squares finds them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from heddle_calibrate.fit.curves import DecodeFit, Floats, PrefillFit
from heddle_calibrate.sweeps import PrefillTrial

LEAST_IDLE_S = 1e-6
"""No step is free, though a fit may leave nothing for one that only prefills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptIterations:
    """The iterations of one measurement, summed."""

    decode_s: float
    """Decoding beside."""
    idle: int
    """Iterations without decoding."""
    prompts: int
    """Prompts, counted in each iteration that computes some of them."""
    chunks: tuple[int, ...]
    """Prompt tokens of each iteration."""
    pairs: float
    """(query, key) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFit:
    """What prompts add to an iteration, and host time for each of them; seconds."""

    curve: PrefillFit
    """Above 0 at no tokens: the fixed cost of a prompt."""
    per_prompt_s: float

    def seconds(self, iterations: PromptIterations) -> float:
        """Seconds of the iterations of a measurement."""
        chunks = np.array(iterations.chunks, dtype=np.float64)
        return float(
            iterations.decode_s
            + iterations.idle * self.curve.idle_s
            + iterations.prompts * self.per_prompt_s
            + self.curve.pair_s * iterations.pairs
            + self.curve.added_s(chunks, np.zeros_like(chunks)).sum()
        )


def prompt_iterations(
    trial: PrefillTrial, decode: DecodeFit, max_batched_tokens: int
) -> PromptIterations:
    """Cut a measurement into iterations, as an engine does under its token budget."""
    chunks, prompts, pairs, decode_s = [], 0, 0.0, 0.0
    for iteration in _iterations(trial, max_batched_tokens - trial.batch):
        chunks.append(sum(n for _, n in iteration))
        prompts += len(iteration)
        pairs += sum(n * (start + n / 2) for start, n in iteration)
    if trial.batch:
        # Each iteration adds a token to each sequence beside.
        grown = trial.batch * (len(chunks) - 1) / 2
        context = (trial.mean_context + grown) / trial.batch
        step_s = decode.step_s(np.array([float(trial.batch)]), np.array([context]))
        decode_s = float(step_s[0]) * len(chunks)
    return PromptIterations(
        decode_s=decode_s,
        idle=0 if trial.batch else len(chunks),
        prompts=prompts,
        chunks=tuple(chunks),
        pairs=pairs,
    )


def _iterations(trial: PrefillTrial, budget: int) -> Iterator[list[tuple[int, int]]]:
    """For each iteration the prompts in it, as (tokens before, tokens now): in order, as far as
    the budget goes."""
    left = [trial.cached] * trial.together
    while left:
        tokens_left, now = max(budget, 1), []
        for i, start in enumerate(left):
            n = min(tokens_left, trial.prompt - start)
            if not n:
                break
            now.append((start, n))
            left[i] += n
            tokens_left -= n
        left = [start for start in left if start < trial.prompt]
        yield now


def fit_prompts(
    cells: Sequence[PrefillTrial],
    decode: DecodeFit,
    max_batched_tokens: int,
    *,
    per_prompt_s: float | None = None,
) -> PromptFit:
    """Least relative squares, nothing negative and the curve never falling; `per_prompt_s` given:
    around that."""
    iterations = [prompt_iterations(cell, decode, max_batched_tokens) for cell in cells]
    tokens = _knots(iterations, max_batched_tokens)
    spans = np.diff(tokens)
    seconds = np.array([cell.prefill_s for cell in cells])
    rest = seconds - np.array([each.decode_s for each in iterations])
    design = np.zeros((len(cells), 4 + len(spans)))
    for row, each in zip(design, iterations, strict=True):
        row[:4] = each.idle, each.prompts, each.pairs, len(each.chunks)
        for chunk in each.chunks:
            row[4:] += np.clip((chunk - tokens[:-1]) / spans, 0.0, 1.0)
            row[-1] += max(0.0, chunk - tokens[-1]) / spans[-1]
    if per_prompt_s is not None:
        rest = rest - design[:, 1] * per_prompt_s
        design[:, 1] = 0.0
    solution, _ = nnls(design / seconds[:, None], rest / seconds)
    idle_s, each_s, pair_s, any_s = (float(x) for x in solution[:4])
    knots_s = any_s + np.concatenate(([0.0], np.cumsum(solution[4:])))
    return PromptFit(
        curve=PrefillFit(
            tokens=tuple(int(n) for n in tokens),
            knots_s=tuple(float(knot_s) for knot_s in knots_s),
            pair_s=pair_s,
            idle_s=max(idle_s, LEAST_IDLE_S),
        ),
        per_prompt_s=each_s if per_prompt_s is None else per_prompt_s,
    )


def _knots(iterations: Sequence[PromptIterations], max_batched_tokens: int) -> Floats:
    """0, and the prompt lengths that were measured whole and alone, but for the shortest.

    The shortest prompt, against the straight line to the next, shows the fixed cost of a prompt.
    """
    whole = [s.chunks[0] for s in iterations if s.idle == len(s.chunks) == s.prompts == 1]
    known = sorted(dict.fromkeys(n for n in whole if n <= max_batched_tokens))
    knots = [0]
    for n in known[1:] or known:
        if n >= 2 * knots[-1]:  # closer ones, such as what a cache left over, are no knots
            knots.append(n)
    if len(knots) < 2:  # none was measured whole: a straight line
        knots.append(max(chunk for each in iterations for chunk in each.chunks))
    return np.array(knots, dtype=np.float64)
