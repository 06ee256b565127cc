"""The rule for seconds of tools that a trace lacks: one for all tools, and constants for some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from heddle_trace.columns import Bools, Floats, Ints
from heddle_trace.errors import TraceError
from heddle_trace.limits import MAX_WAIT_S
from heddle_trace.typical import kind_of, typical_seconds

RestRule: TypeAlias = Literal["error", "zero", "sample", "typical"]

_REMEDY: Final = (
    "write error, zero, sample, typical, seconds such as 1.5, or seconds of tools or their kinds "
    "such as bash=2,search=1.4, with commas between"
)
_NAMED: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRule:
    """Rule `rest`, or that many seconds, for all tools but those that `named` has seconds of.

    `named` is by tool, or by kind of tool (`heddle_trace.typical`); a tool's own name wins.
    """

    rest: RestRule | float = "error"
    named: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def read_tool_rule(text: str) -> ToolRule:
    """Read a rule such as ``typical``, ``1.5`` or ``bash=2,search=1.4,typical``.

    Raises TraceError, naming the part, for what is no rule.
    """
    rest: RestRule | float | None = None
    named: dict[str, float] = {}
    for part in (part.strip() for part in text.split(",")):
        tool, equals, value = part.rpartition("=")
        if equals:
            tool = tool.strip()
            if not tool or tool in named:
                fault = "names no tool" if not tool else f"names {tool!r} twice"
                raise TraceError(f"missing tool_s: {part!r} {fault}; {_REMEDY}")
            named[tool] = _seconds(value)
            continue
        if rest is not None:
            raise TraceError(f"missing tool_s: {part!r} is a second rule for all tools; {_REMEDY}")
        rest = next((rule for rule in get_args(RestRule) if rule == part), None)
        rest = _seconds(part) if rest is None else rest
    return ToolRule(rest="error" if rest is None else rest, named=MappingProxyType(named))


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise TraceError(f"missing tool_s: {text!r} is no rule; {_REMEDY}") from None
    if not isfinite(found) or not 0.0 <= found <= MAX_WAIT_S:
        raise TraceError(f"missing tool_s: {text!r} is not from 0 to {MAX_WAIT_S:,.0f} seconds")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedWaits:
    """Seconds that a rule states. Arrays have an item for each step.

    `settled`: whether the rule states the step's. `typical`: whether any of it was drawn.
    `kinds` are those that were drawn, in order of the words.
    """

    seconds: Floats
    settled: Bools
    typical: Bools
    kinds: tuple[str, ...]


def stated_waits(
    rule: ToolRule, tools: Sequence[str], codes: Ints, rng: np.random.Generator
) -> StatedWaits:
    """Seconds of steps by the codes of their tools in `tools`, where the rule states them.

    Tools that ran in parallel, ``a+b``, take as long as the longest of them. Raises TraceError for
    a name in the rule that is neither a tool of `tools` nor a kind.
    """
    _check_names(rule, tools)
    size = len(codes)
    waits, settled, drawn = np.zeros(size), np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    kinds: dict[str, None] = {}
    for code in np.unique(codes).tolist():
        here = np.flatnonzero(codes == code)
        parts = [_constant(rule, tool) for tool in tools[code].split("+")]
        if any(part is None for part in parts) and rule.rest != "typical":
            continue
        settled[here] = True
        for tool, constant in zip(tools[code].split("+"), parts, strict=True):
            if constant is None:
                kind = kind_of(tool)
                kinds[kind] = None
                drawn[here] = True
                took = typical_seconds()[kind].drawn(rng.random(len(here)))
                waits[here] = np.maximum(waits[here], took)
            else:
                waits[here] = np.maximum(waits[here], constant)
    return StatedWaits(seconds=waits, settled=settled, typical=drawn, kinds=tuple(kinds))


def _constant(rule: ToolRule, tool: str) -> float | None:
    """The seconds that a rule has for a tool; None where it draws, or has none."""
    if tool in rule.named:
        return rule.named[tool]
    rest = None if isinstance(rule.rest, str) else rule.rest
    return rule.named.get(kind_of(tool), rest)


def _check_names(rule: ToolRule, tools: Sequence[str]) -> None:
    known = dict.fromkeys(part for tool in tools for part in (tool, *tool.split("+")))
    for name in rule.named:
        if name not in known and name not in typical_seconds():
            raise TraceError(
                f"missing tool_s, {name!r}: the trace has no such tool, and there is no such kind; "
                f"tools are {', '.join(list(known)[:_NAMED]) or 'none'}, "
                f"kinds {', '.join(typical_seconds())}"
            )
