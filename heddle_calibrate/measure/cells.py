"""The cells to measure on an engine: a grid to fit, and cells off the grid to check.

Contexts and prompts go in even ratios up to the longest, batches in powers of two up to the slots.
Held-out cells lie between: no fit of the ground truth uses them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal, NamedTuple, TypeAlias

from heddle_trace.schema import StepScript, TrajectoryScript

SizeName: TypeAlias = Literal["quick", "small", "full"]

KV_SHARE = 0.8
"""Of an engine's KV: above it the engine may preempt a step in the middle of a measurement."""
SHORTEST = 16
"""Tokens of the shortest prompt and context."""
SPARE_OUTPUT = 16
"""Extra output tokens of a decoding batch for each prompt that joins it: more than the iterations
that the prompt takes, one before and one after. The rest is aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSize:
    contexts: int
    """Contexts of each batch on the grid."""
    repeats: int
    output: int
    """Tokens of a step that is timed while it decodes."""
    joiners: int
    """Prompts that join a decoding batch one after another, in one measurement."""
    starts: int
    """Starts of an engine at each TP degree."""
    loops: int
    ratio: int
    """Between two prompt lengths of the grid."""

    @property
    def least_tokens(self) -> int:
        """Least context and output of a sequence that can be measured."""
        return 4 * SHORTEST + self.output + SPARE_OUTPUT * self.joiners


SIZES: dict[SizeName, SweepSize] = {
    "quick": SweepSize(contexts=3, repeats=2, output=32, joiners=2, starts=1, loops=1, ratio=8),
    "small": SweepSize(contexts=3, repeats=3, output=48, joiners=3, starts=2, loops=2, ratio=4),
    "full": SweepSize(contexts=4, repeats=5, output=64, joiners=4, starts=3, loops=3, ratio=3),
}


class DecodeCell(NamedTuple):
    """A batch of sequences that start with `context` tokens each."""

    batch: int
    context: int
    held_out: bool


class PrefillCell(NamedTuple):
    """`prompt` tokens, of which `cached` are in the prefix cache, beside a decoding batch."""

    batch: int
    context: int
    prompt: int
    cached: int
    held_out: bool
    together: int = 1
    """Prompts that arrive at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_running: int
    max_context: int
    """Tokens of prompt and output together."""
    kv_capacity_tokens: int

    def longest(self, sequences: int, output: int) -> int:
        """The longest context at which so many sequences can still make `output` tokens."""
        space = int(self.kv_capacity_tokens * KV_SHARE) // sequences
        return min(self.max_context, space) - output

    def most(self, tokens: int) -> int:
        """Number of sequences of so many tokens that can run at once; 0 when none fits."""
        if tokens > self.max_context:
            return 0
        return min(self.max_running, int(self.kv_capacity_tokens * KV_SHARE) // tokens)


def decode_cells(size: SweepSize, limits: Limits) -> list[DecodeCell]:
    """Cells of the grid, then those held out."""
    grid = batches(limits.most(size.least_tokens))
    cells = [
        DecodeCell(batch, context, False)
        for batch in grid
        for context in contexts(size, limits, batch)
    ]
    # At the ends of the grid only the context is new: there is no batch beyond.
    for batch in _sorted([1, *between(grid), grid[-1]]):
        known = contexts(size, limits, batch)
        cells += [DecodeCell(batch, context, True) for context in between(known)]
    return cells


def prefill_cells(size: SweepSize, limits: Limits) -> list[PrefillCell]:
    """Prompts alone and beside a batch, without and with a cached prefix, one and several at
    once."""
    longest = limits.longest(1, 1)
    grid = prompts(longest, size.ratio)
    cells = [PrefillCell(0, 0, n, 0, False) for n in grid]
    cells += [PrefillCell(0, 0, n, 0, True) for n in between(grid)]
    quarters = [longest // 4, longest * 3 // 4]
    cells += _cached(0, 0, quarters, grid[1:3], longest, held_out=False)
    cells += _cached(0, 0, [longest // 2], between(grid[1:3]), longest, held_out=True)
    most = limits.most(size.least_tokens)
    seen = _sorted([min(2, most - 1), most // 4, most - 1])  # one slot is for the prompt
    for group, held_out in ((seen, False), (between([1, *seen]), True)):
        for batch in filter(None, group):
            known = contexts(size, limits, batch)
            # The batch has KV for one sequence more, which is for the prompt.
            space = limits.longest(batch + 1, 0)
            context = min(
                known[(len(known) - 1) // 2], space - size.output - SPARE_OUTPUT * size.joiners
            )
            # Longer prompts add in the same way and occupy an engine for seconds.
            lengths = [n for n in (between(grid) if held_out else grid) if n <= space // 4]
            cells += [PrefillCell(batch, context, n, 0, held_out) for n in lengths]
            cells += _cached(batch, context, [space // 2], lengths[1:2], space, held_out=held_out)
            cells += [
                PrefillCell(batch, context, n, 0, held_out, together)
                for together in ((3,) if held_out else (2, 4))
                for n in lengths[:2]
                if batch + together <= most and n * together <= space
            ]
    return cells


def _cached(
    batch: int,
    context: int,
    cached: Iterable[int],
    new: Iterable[int],
    longest: int,
    *,
    held_out: bool,
) -> list[PrefillCell]:
    lengths = list(new)
    return [
        PrefillCell(batch, context, kept + n, kept, held_out)
        for kept in cached
        for n in lengths
        if kept >= SHORTEST and kept + n <= longest
    ]


def batches(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return _sorted([*found, most])


def contexts(size: SweepSize, limits: Limits, batch: int) -> list[int]:
    """Contexts for a batch, in even ratios; as long as its KV allows."""
    longest = limits.longest(batch, size.output)
    shortest = max(SHORTEST, longest // 32)
    if longest <= shortest:
        return []
    steps = size.contexts - 1
    return _sorted(round(shortest * (longest / shortest) ** (i / steps)) for i in range(steps + 1))


def prompts(longest: int, ratio: int) -> list[int]:
    """Prompt lengths from the shortest to the longest."""
    found = [SHORTEST]
    while found[-1] * ratio < longest:
        found.append(found[-1] * ratio)
    return _sorted([*found, longest])


def between(values: Sequence[int]) -> list[int]:
    """The geometric means of neighbours, where they are neither of the two."""
    means = [(a, b, round((a * b) ** 0.5)) for a, b in pairwise(values)]
    return _sorted(mean for a, b, mean in means if a < mean < b)


def loop_scripts(seed: int, clients: int, limits: Limits) -> list[TrajectoryScript]:
    """Clients of three steps whose contexts grow, all of which fit into the KV at their ends."""
    rng = Random(f"{seed}/{clients}")
    longest = limits.longest(clients, 0)
    scripts = []
    for client in range(clients):
        context = rng.randint(longest // 16, longest // 3) + 1
        steps: list[StepScript] = []
        for index in range(3):
            output = rng.randint(8, max(9, min(64, longest // 16)))
            added = rng.randint(1, max(2, longest // 16))
            steps.append(
                StepScript(
                    prompt_tokens=context,
                    shared_tokens=steps[-1].prompt_tokens + steps[-1].output_tokens if steps else 0,
                    output_tokens=output,
                    tool="none" if index < 2 else None,
                    tool_s=0.0,
                    tool_ok=True,
                    tool_tokens=added if index < 2 else 0,
                )
            )
            context += output + added
        name = f"loop-{clients}/{client}"
        scripts.append(
            TrajectoryScript(
                id=name, group=name, task="loop", arrival_s=0.0, steps=tuple(steps), truncated=False
            )
        )
    return scripts


def _sorted(values: Iterable[int]) -> list[int]:
    return sorted(dict.fromkeys(values))
