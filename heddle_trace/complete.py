"""Converts records to scripts: fills every gap by a stated rule, and counts it.

It also rebuilds the context of a trajectory: the prompt of each generation, and the part of it that
repeats the previous context. docs/traces.md states the rules in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args
from zlib import crc32

import numpy as np

from heddle_trace.columns import NONE, Bools, Floats, Ints, TraceColumn, Words, carried
from heddle_trace.errors import GapError, TraceError
from heddle_trace.filling import FieldFill, Gap, MissingRule, Pool
from heddle_trace.schema import Trace, TrajectoryScript
from heddle_trace.step_table import StepTable
from heddle_trace.table import Records, Scripts
from heddle_trace.tool_rules import read_tool_rule, stated_waits

# Delays by people reach hours and are unrelated to tools, so neither replaces the other.
USER: Final = "user"
UNNAMED: Final = "unspecified"
"""The tool of a wait whose source names none."""


_KEPT: Final = {
    "group": "group_id",
    "task": "workload",
    "reward": "reward",
    "reward_s": "reward_s",
    "env_start_s": "env_start_s",
    "rl_step": "step",
}
"""Fields of scripts that are those of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRules:
    """Rules for values that the source lacks. `cap_tool_s` cuts longer tool waits, in seconds.

    "error" refuses the trace, "zero" uses 0, "sample" draws from recorded values of the trace.
    `tool_s` may also be "typical", seconds, or seconds of tools (`tool_rules.read_tool_rule`).
    """

    tool_s: str = "error"
    tool_tokens: MissingRule = "error"
    prompt_tokens: MissingRule = "error"
    output_tokens: MissingRule = "error"
    cap_tool_s: float | None = None

    def __post_init__(self) -> None:
        read_tool_rule(self.tool_s)
        for name in ("tool_tokens", "prompt_tokens", "output_tokens"):
            rule = getattr(self, name)
            allowed = [r for r in get_args(MissingRule) if (name, r) != ("output_tokens", "zero")]
            if rule not in allowed:
                raise TraceError(f"rule {rule!r} for missing {name}: use {' or '.join(allowed)}")
        if self.cap_tool_s is not None and not 0 < self.cap_tool_s < float("inf"):
            raise TraceError(f"cap_tool_s is {self.cap_tool_s}; give seconds above 0, or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillReport:
    """Values that `complete` added to a trace."""

    fields: Mapping[str, FieldFill]
    capped_tool_s: int
    raised_output_tokens: int
    raised_prompt_tokens: int
    assumptions: tuple[str, ...]


def complete(trace: Trace, *, rules: MissingRules, seed: int) -> tuple[Scripts, FillReport]:
    """Scripts without gaps, in the order of the records, and counts of the filled values.

    Equal arguments give equal scripts; each field draws from a stream of its own, so a rule for one
    does not move the values of another. Raises TraceError where a rule is "error" and something is
    missing (naming all such fields at once), or where "sample" finds nothing to draw from.
    """
    filler = _Filler(trace, rules, seed)
    scripts = filler.scripts()
    filler.check_gaps()
    return scripts, filler.report(seed)


def open_gaps(trace: Trace) -> dict[str, int]:
    """Per field the number of values for which `complete` needs a rule."""
    filler = _Filler(trace, MissingRules(), 0)
    return {gap.name: gap.open for gap in filler.gaps}


def shuffled(scripts: Sequence[TrajectoryScript], seed: int) -> Scripts:
    """The scripts with their groups in another order; the samples of a group adjacent, in order.

    Gives seeds a meaning when one trace is replayed several times. Seed 0 keeps the file's order.
    """
    if seed == 0:
        return Scripts.of(scripts)
    return regrouped(scripts, _stream(seed, "shuffled"))


def regrouped(scripts: Sequence[TrajectoryScript], rng: np.random.Generator) -> Scripts:
    """The scripts with their groups in an order drawn from `rng`; each group as it was."""
    columns = Scripts.of(scripts)
    members = list(columns.trajectory("group").occurring().values())
    order = [members[index] for index in rng.permutation(len(members))]
    return columns.take(np.concatenate(order)) if order else columns


def _stream(seed: int, part: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(part.encode())])


class _Filler:
    """The steps of all trajectories, one after another, field by field."""

    def __init__(self, trace: Trace, rules: MissingRules, seed: int) -> None:
        def gap(name: str, rule: MissingRule) -> Gap:
            return Gap(name=name, rule=rule, rng=_stream(seed, name))

        self.name, self.records = trace.name, Records.of(trace.records)
        self.tool_rule = read_tool_rule(rules.tool_s)
        rest = self.tool_rule.rest
        self.tool_s = gap("tool_s", rest if rest in ("zero", "sample") else "error")
        self.kinds: tuple[str, ...] = ()
        self.tool_tokens = gap("tool_tokens", rules.tool_tokens)
        self.prompt_tokens = gap("prompt_tokens", rules.prompt_tokens)
        self.output_tokens = gap("output_tokens", rules.output_tokens)
        self.gaps = (self.tool_s, self.tool_tokens, self.prompt_tokens, self.output_tokens)
        self.cap_s = rules.cap_tool_s if rules.cap_tool_s is not None else float("inf")
        self.start = self.records.first
        self.stop = self.start + self.records.counts
        tool = self.records.step("tool")
        self.tool, self.tools = tool.ints, tool.words
        self.input = self.records.step("input_tokens").ints
        self.prompt = self._prompts()
        self.output = self._outputs()
        self.added = self._added()
        self.waits = self._waits()

    def scripts(self) -> Scripts:
        """Scripts of what was filled in. Raises TraceError where nothing could be drawn."""
        self._check_draws()
        columns = self._contexts() | self._calls()
        columns["output_tokens"] = TraceColumn("number", np.maximum(self.output, 1))
        columns["tool_tokens"] = TraceColumn("number", self.added)
        records = self.records
        arrival_s = np.nan_to_num(records.trajectory("arrival_s").values)
        truncated = records.trajectory("truncated").values == 1
        return Scripts(
            records.ids,
            self.start,
            self.stop,
            {
                **{
                    name: column
                    for name, recorded in _KEPT.items()
                    if (column := records.trajectory(recorded)).known.any()
                },
                "arrival_s": TraceColumn("real", arrival_s),
                "truncated": TraceColumn("flag", truncated.astype(np.int8)),
            },
            StepTable.made(columns),
        )

    def _prompts(self) -> Ints:
        """The first prompt of each trajectory."""
        gap, records = self.prompt_tokens, self.records
        prompts = records.trajectory("prompt_tokens").ints.copy()
        measured = self.input[self.start]
        derived = (prompts < 0) & (measured >= 0)
        prompts[derived] = measured[derived]
        gap.counts.derived = int(derived.sum())
        known = prompts >= 0
        gap.recorded = bool(known.any())
        lacking = np.flatnonzero(~known)
        if not len(lacking):
            return prompts
        group, task = records.trajectory("group_id"), records.trajectory("workload")
        own, of_task = group.ints[lacking], task.ints[lacking]
        filled = gap.fill(
            self.start[lacking],
            (Pool("group", group.words, group.values[known], prompts[known]), own),
            (Pool("workload", task.words, task.values[known], prompts[known]), of_task),
        )
        # The samples of a group answer one prompt: what was drawn for one holds for all.
        _, first, place = np.unique(own, return_index=True, return_inverse=True)
        prompts[lacking] = filled[first][place]
        return prompts

    def _outputs(self) -> Ints:
        gap = self.output_tokens
        output = self.records.step("output_tokens").ints.copy()
        known = output >= 0
        gap.recorded = bool(known.any())
        lacking = np.flatnonzero(~known)
        if len(lacking):
            words = Words(self.tools)
            own = np.where(self.tool < 0, words["None"], self.tool)
            anywhere = np.zeros(len(own), np.int64)
            output[lacking] = gap.fill(
                lacking,
                (Pool("tool", words.listed(), own[known], output[known]), own[lacking]),
                (Pool("any step", [""], anywhere[known], output[known]), anywhere[lacking]),
            )
        return output

    def _added(self) -> Ints:
        """Tokens that tools append; `NONE` where a measured prompt decides them."""
        gap = self.tool_tokens
        added = self.records.step("tool_tokens").ints.copy()
        lacking = added < 0
        last = np.zeros(len(added), np.bool_)
        last[self.stop - 1] = True
        measured = lacking & ~last
        measured[:-1] &= self.input[1:] >= 0
        gap.counts.derived = int(measured.sum())
        called = lacking & ~last & ~measured & (self.tool >= 0)
        filled = self._of_tools(gap, np.flatnonzero(called), added, ~lacking)
        added[lacking & ~measured] = 0  # no generation reads what comes after a last step
        added[called] = filled
        return added

    def _waits(self) -> Floats:
        """Seconds of each tool; 0 where there is none."""
        waits = self.records.step("tool_s").values.copy()
        lacking = np.isnan(waits)
        called = lacking & (self.tool >= 0)
        steps = np.flatnonzero(called)
        stated = stated_waits(self.tool_rule, self.tools, self.tool[steps], self.tool_s.rng)
        counts = self.tool_s.counts
        counts.typical = int(stated.typical.sum())
        counts.constant = int(stated.settled.sum()) - counts.typical
        self.kinds = stated.kinds
        left = steps[~stated.settled]
        filled = self._of_tools(self.tool_s, left, waits, ~lacking)
        waits[lacking] = 0.0
        waits[steps] = stated.seconds
        waits[left] = filled
        return waits

    def _of_tools(self, gap: Gap, steps: Ints, values: Any, known: Bools) -> Any:
        """Stand-ins for a field of tools: of the tool itself, then of any tool but a person."""
        recorded = known & (self.tool >= 0)
        gap.recorded = bool(recorded.any())
        if not len(steps):
            return np.zeros(0)
        people = self.tools.index(USER) if USER in self.tools else NONE
        anyone = np.where(self.tool == people, NONE, 0)
        return gap.fill(
            steps,
            (
                Pool("tool", self.tools, self.tool[recorded], values[recorded]),
                self.tool[steps],
            ),
            (Pool("any tool", [""], anyone[recorded], values[recorded]), anyone[steps]),
        )

    def _calls(self) -> dict[str, TraceColumn]:
        """Columns of tools; something took time where one is unnamed, whatever it was."""
        tool, waits = self.tool, self.waits
        unnamed = (tool < 0) & (waits != 0.0)
        if unnamed.any():
            words = Words(self.tools)
            tool = np.where(unnamed, words[UNNAMED], tool)
            self.tools = words.listed()
        over = waits > self.cap_s
        self.capped = int(over.sum())
        return {
            "tool": TraceColumn("word", tool, self.tools),
            "tool_ok": self.records.step("tool_ok"),
            "tool_s": TraceColumn("real", np.where(over, self.cap_s, waits)),
        }

    def _contexts(self) -> dict[str, TraceColumn]:
        """Columns of prompts: as measured, else the sum of what came before.

        It settles `added` where a measured prompt decides it.
        """
        first = np.zeros(len(self.tool), np.bool_)
        first[self.start] = True
        measured = (self.input >= 0) & ~first
        self.measured_prompts = int(measured.sum())
        self.raised_outputs = int((self.output < 1).sum())
        output = np.maximum(self.output, 1)
        prompt = np.where(measured, self.input, 0)
        prompt[self.start] = self.prompt
        known = measured | first
        self.raised_prompts = int((known & (prompt < 1)).sum())
        # A prompt that follows an undecided `added` is known.
        prompt = carried(known, np.maximum(prompt, 1), output + self.added)
        end = prompt + output
        unknown = np.flatnonzero(self.added < 0)
        self.added[unknown] = np.maximum(0, self.input[unknown + 1] - end[unknown])
        before = np.append(0, end[:-1])
        before[first] = 0
        shared = np.minimum(before, prompt)
        cached = self.records.step("cached_tokens").values
        held = (prompt < before) & (cached >= 0)
        shared[held] = np.minimum(shared[held], cached[held])
        return {
            "prompt_tokens": TraceColumn("number", prompt),
            "shared_tokens": TraceColumn("number", shared),
        }

    def _check_draws(self) -> None:
        """Raise TraceError for the first step where nothing could be drawn."""
        # The order in which a trajectory needs them.
        order = (self.prompt_tokens, self.output_tokens, self.tool_tokens, self.tool_s)
        failed = [(gap.failed, gap) for gap in order if gap.failed is not None]
        if failed:
            (step, sought), gap = min(failed, key=lambda each: each[0][0])
            raise TraceError(
                f"{self.name}: {gap.name} is missing ({self._at(step)}) and nothing is recorded to "
                f"sample from, for {sought}; use another rule for missing {gap.name}"
            )

    def _at(self, step: int) -> str:
        trajectory = int(np.searchsorted(self.stop, step, side="right"))
        return f"{self.records.ids[trajectory]!r}, step {step - self.start[trajectory]}"

    def check_gaps(self) -> None:
        """Raise GapError where a value lacks and its rule is "error"."""
        refused = [gap for gap in self.gaps if gap.rule == "error" and gap.open]
        if not refused:
            return
        parts = [
            f"{gap.name} in {gap.open:,} places (first: {self._at(gap.first)})" for gap in refused
        ]
        rules = {f"missing.{gap.name}": self._advice(gap) for gap in refused}
        raise GapError(
            f"{self.name}: the trace lacks {', '.join(parts)}; a gap is never taken as 0 unasked: "
            f"choose what to do, such as {' '.join(f'--set {k}={v}' for k, v in rules.items())}",
            rules,
        )

    def _advice(self, gap: Gap) -> str:
        """A rule for a gap that fits the trace."""
        if gap.recorded:
            return "sample"
        return "typical" if gap is self.tool_s else "zero"

    def report(self, seed: int) -> FillReport:
        return FillReport(
            fields={gap.name: gap.counts for gap in self.gaps},
            capped_tool_s=self.capped,
            raised_output_tokens=self.raised_outputs,
            raised_prompt_tokens=self.raised_prompts,
            assumptions=tuple(self._assumptions(seed)),
        )

    def _assumptions(self, seed: int) -> list[str]:
        ways = {
            "zeroed": "taken as 0",
            "sampled": f"drawn from recorded ones (seed {seed})",
            "typical": f"drawn from typical ones of {', '.join(self.kinds)} (seed {seed})",
            "constant": "as the rule says",
            "derived": "derived from input_tokens",
        }
        fills = (
            (getattr(gap.counts, way), f"missing {gap.name} {said}")
            for gap in self.gaps
            for way, said in ways.items()
        )
        others = (
            (self.measured_prompts, "contexts taken from input_tokens, not summed"),
            (self.capped, f"tool waits cut at {self.cap_s:g} s"),
            (self.raised_outputs, "generations of 0 tokens taken as 1"),
            (self.raised_prompts, "empty prompts taken as 1 token"),
        )
        return [f"{count:,} {what}" for count, what in (*fills, *others) if count]
