"""Converts records to scripts: fills every gap by a stated rule, and counts it.

It also rebuilds the context of a trajectory: the prompt of each generation, and the part of it that
repeats the previous context. docs/trace-format.md states the rules in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args
from zlib import crc32

import numpy as np

from heddle_trace.errors import TraceError
from heddle_trace.schema import StepRecord, StepScript, Trace, TrajectoryRecord, TrajectoryScript

MissingRule: TypeAlias = Literal["error", "zero", "sample"]

# Delays by people reach hours and are unrelated to tools, so neither replaces the other.
USER: Final = "user"
_ANY_TOOL: Final = "any tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRules:
    """Rules for values that the source lacks. `cap_tool_s` cuts longer tool waits, in seconds.

    "error" refuses the trace, "zero" uses 0, "sample" draws from recorded values of the trace.
    """

    tool_s: MissingRule = "error"
    tool_tokens: MissingRule = "error"
    prompt_tokens: MissingRule = "error"
    output_tokens: MissingRule = "error"
    cap_tool_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("tool_s", "tool_tokens", "prompt_tokens", "output_tokens"):
            rule = getattr(self, name)
            allowed = [r for r in get_args(MissingRule) if (name, r) != ("output_tokens", "zero")]
            if rule not in allowed:
                raise TraceError(f"rule {rule!r} for missing {name}: use {' or '.join(allowed)}")
        if self.cap_tool_s is not None and not 0 < self.cap_tool_s < float("inf"):
            raise TraceError(f"cap_tool_s is {self.cap_tool_s}; give seconds above 0, or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFill:
    """How the gaps of one field were closed. missing = derived + zeroed + sampled."""

    missing: int
    derived: int
    zeroed: int
    sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FillReport:
    """Values that `complete` added to a trace."""

    fields: Mapping[str, FieldFill]
    capped_tool_s: int
    raised_output_tokens: int
    raised_prompt_tokens: int
    assumptions: tuple[str, ...]


def complete(
    trace: Trace, *, rules: MissingRules, seed: int
) -> tuple[tuple[TrajectoryScript, ...], FillReport]:
    """Scripts without gaps, in the order of the records, and counts of the filled values.

    Equal arguments give equal scripts; each field draws from a stream of its own, so a rule for one
    does not move the values of another. Raises TraceError where a rule is "error" and something is
    missing (naming all such fields at once), or where "sample" finds nothing to draw from.
    """
    filler = _Filler(trace, rules, seed)
    scripts = tuple(filler.script(record) for record in trace.records)
    refused = [gap for gap in filler.gaps if gap.rule == "error" and gap.missing > gap.derived]
    if refused:
        filler.learn(trace)
        raise TraceError(_refusal(trace, refused))
    return scripts, filler.report(seed)


def open_gaps(trace: Trace) -> dict[str, int]:
    """Per field the number of values for which `complete` needs a rule."""
    filler = _Filler(trace, MissingRules(), 0)
    for record in trace.records:
        filler.script(record)
    return {gap.name: gap.missing - gap.derived for gap in filler.gaps}


def shuffled(scripts: Sequence[TrajectoryScript], seed: int) -> tuple[TrajectoryScript, ...]:
    """The scripts with their groups in another order; the samples of a group adjacent, in order.

    Gives seeds a meaning when one trace is replayed several times. Seed 0 keeps the file's order.
    """
    if seed == 0:
        return tuple(scripts)
    return regrouped(scripts, _stream(seed, "shuffled"))


def regrouped(
    scripts: Sequence[TrajectoryScript], rng: np.random.Generator
) -> tuple[TrajectoryScript, ...]:
    """The scripts with their groups in an order drawn from `rng`; each group as it was."""
    groups: dict[str, list[TrajectoryScript]] = {}
    for script in scripts:
        groups.setdefault(script.group, []).append(script)
    members = list(groups.values())
    return tuple(script for index in rng.permutation(len(members)) for script in members[index])


def _stream(seed: int, part: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(part.encode())])


@dataclass(slots=True, kw_only=True)
class _Gap:
    """One field: its rule, what can be drawn, and the counts so far."""

    name: str
    rule: MissingRule
    rng: np.random.Generator
    trace: str
    pools: dict[str, list[float]] = field(default_factory=dict)
    missing: int = 0
    derived: int = 0
    zeroed: int = 0
    sampled: int = 0
    first: str = ""

    def learn(self, value: float | None, *keys: str) -> None:
        if value is not None:
            for key in keys:
                self.pools.setdefault(key, []).append(value)

    def derive(self, value: int) -> int:
        self.missing += 1
        self.derived += 1
        return value

    def fill(self, where: tuple[str, int], *keys: str) -> float:
        """A stand-in by the rule; "sample" takes the first key that has recorded values."""
        self.missing += 1
        self.first = self.first or _at(where)
        if self.rule != "sample":
            self.zeroed += 1
            return 0.0
        pool = next((self.pools[key] for key in keys if key in self.pools), None)
        if pool is None:
            raise TraceError(
                f"{self.trace}: {self.name} is missing ({_at(where)}) and nothing is recorded to "
                f"sample from, for {' or '.join(keys)}; use another rule for missing {self.name}"
            )
        self.sampled += 1
        return pool[int(self.rng.random() * len(pool))]


class _Filler:
    """One pass over a trace."""

    def __init__(self, trace: Trace, rules: MissingRules, seed: int) -> None:
        def gap(name: str, rule: MissingRule) -> _Gap:
            return _Gap(name=name, rule=rule, rng=_stream(seed, name), trace=trace.name)

        self.tool_s = gap("tool_s", rules.tool_s)
        self.tool_tokens = gap("tool_tokens", rules.tool_tokens)
        self.prompt_tokens = gap("prompt_tokens", rules.prompt_tokens)
        self.output_tokens = gap("output_tokens", rules.output_tokens)
        self.gaps = (self.tool_s, self.tool_tokens, self.prompt_tokens, self.output_tokens)
        self.cap_s = rules.cap_tool_s if rules.cap_tool_s is not None else float("inf")
        self.capped = self.raised_outputs = self.raised_prompts = self.measured_prompts = 0
        self.group_prompt: dict[str, int] = {}
        if any(gap.rule == "sample" for gap in self.gaps):
            self.learn(trace)

    def learn(self, trace: Trace) -> None:
        """Collect the values for "sample"."""
        for record in trace.records:
            self.prompt_tokens.learn(
                _first_prompt(record), f"group {record.group_id}", f"workload {record.workload}"
            )
            for step in record.steps:
                keys = _pool_keys(step.tool)
                if step.tool is not None:
                    self.tool_s.learn(step.tool_s, *keys)
                    self.tool_tokens.learn(step.tool_tokens, *keys)
                self.output_tokens.learn(step.output_tokens, keys[0], "any step")

    def script(self, record: TrajectoryRecord) -> TrajectoryScript:
        steps: list[StepScript] = []
        end = 0  # of the context, after the step before and without its tool's answer
        added = self._prompt(record)
        for index, step in enumerate(record.steps):
            where = (record.trajectory_id, index)
            after = record.steps[index + 1] if index + 1 < len(record.steps) else None
            prompt = end + added
            if index and step.input_tokens is not None:
                prompt = step.input_tokens
                self.measured_prompts += 1
            if prompt < 1:
                prompt, self.raised_prompts = 1, self.raised_prompts + 1
            shared = min(end, prompt)
            if prompt < end and step.cached_tokens is not None:
                shared = min(shared, step.cached_tokens)
            output = self._output(step, where)
            end = prompt + output
            added = self._added(step, after, end, where)
            tool, tool_s = self._tool(step, where)
            steps.append(StepScript(prompt, shared, output, tool, tool_s, step.tool_ok, added))
        return TrajectoryScript(
            id=record.trajectory_id,
            group=record.group_id,
            task=record.workload,
            arrival_s=record.arrival_s or 0.0,
            steps=tuple(steps),
            truncated=bool(record.truncated),
        )

    def _prompt(self, record: TrajectoryRecord) -> int:
        if record.prompt_tokens is not None:
            return record.prompt_tokens
        first = record.steps[0].input_tokens
        if first is not None:
            return self.prompt_tokens.derive(first)
        group, workload = f"group {record.group_id}", f"workload {record.workload}"
        filled = int(self.prompt_tokens.fill((record.trajectory_id, 0), group, workload))
        # The samples of a group answer one prompt: what was drawn for one holds for all.
        return self.group_prompt.setdefault(record.group_id, filled)

    def _output(self, step: StepRecord, where: tuple[str, int]) -> int:
        output = step.output_tokens
        if output is None:
            output = int(self.output_tokens.fill(where, _pool_keys(step.tool)[0], "any step"))
        if output < 1:
            self.raised_outputs += 1
            return 1
        return output

    def _added(
        self, step: StepRecord, after: StepRecord | None, end: int, where: tuple[str, int]
    ) -> int:
        """Tokens that the tool appends; after a last step no generation reads them."""
        if step.tool_tokens is not None:
            return step.tool_tokens
        if after is None:
            return 0
        if after.input_tokens is not None:
            return self.tool_tokens.derive(max(0, after.input_tokens - end))
        if step.tool is None:
            return 0
        return int(self.tool_tokens.fill(where, *_pool_keys(step.tool)))

    def _tool(self, step: StepRecord, where: tuple[str, int]) -> tuple[str | None, float]:
        tool, tool_s = step.tool, step.tool_s
        if tool is None:
            if not tool_s:
                return None, 0.0
            tool = "unspecified"  # something took time, whatever it was
        elif tool_s is None:
            tool_s = self.tool_s.fill(where, *_pool_keys(tool))
        if tool_s > self.cap_s:
            self.capped += 1
            return tool, self.cap_s
        return tool, tool_s

    def report(self, seed: int) -> FillReport:
        fields = {
            gap.name: FieldFill(
                missing=gap.missing, derived=gap.derived, zeroed=gap.zeroed, sampled=gap.sampled
            )
            for gap in self.gaps
        }
        return FillReport(
            fields=fields,
            capped_tool_s=self.capped,
            raised_output_tokens=self.raised_outputs,
            raised_prompt_tokens=self.raised_prompts,
            assumptions=tuple(self._assumptions(seed)),
        )

    def _assumptions(self, seed: int) -> list[str]:
        lines = []
        for gap in self.gaps:
            if gap.zeroed:
                lines.append(f"{gap.zeroed:,} missing {gap.name} taken as 0")
            if gap.sampled:
                lines.append(
                    f"{gap.sampled:,} missing {gap.name} drawn from recorded ones (seed {seed})"
                )
            if gap.derived:
                lines.append(f"{gap.derived:,} missing {gap.name} derived from input_tokens")
        if self.measured_prompts:
            lines.append(f"{self.measured_prompts:,} contexts taken from input_tokens, not summed")
        if self.capped:
            lines.append(f"{self.capped:,} tool waits cut at {self.cap_s:g} s")
        if self.raised_outputs:
            lines.append(f"{self.raised_outputs:,} generations of 0 tokens taken as 1")
        if self.raised_prompts:
            lines.append(f"{self.raised_prompts:,} empty prompts taken as 1 token")
        return lines


def _at(where: tuple[str, int]) -> str:
    return f"{where[0]!r}, step {where[1]}"


def _first_prompt(record: TrajectoryRecord) -> int | None:
    return (
        record.prompt_tokens if record.prompt_tokens is not None else record.steps[0].input_tokens
    )


def _pool_keys(tool: str | None) -> tuple[str, ...]:
    """Keys to draw from for a tool: its own records, then those of any tool but a person."""
    if tool is None or tool == USER:
        return (f"tool {tool}",)
    return (f"tool {tool}", _ANY_TOOL)


def _refusal(trace: Trace, refused: Sequence[_Gap]) -> str:
    parts = [
        f"{gap.name} in {gap.missing - gap.derived:,} places (first: {gap.first})"
        for gap in refused
    ]
    flags = " ".join(
        f"--missing-{gap.name.replace('_', '-')} {'sample' if gap.pools else 'zero'}"
        for gap in refused
    )
    return (
        f"{trace.name}: the trace lacks {'; '.join(parts)}. A gap is never taken as 0 "
        f"unasked: choose what to do, such as {flags}"
    )
