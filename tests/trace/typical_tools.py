"""Measures seconds of tools by kind, and prints the measured tables of `typical_tools.toml`.

Usage: python -m tests.trace.typical_tools [FOLDER], by default ../shared. Published tables stay as
they are in the file.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from heddle_trace import read_trace
from heddle_trace.importers.clocks import seconds
from heddle_trace.typical import LEVELS, kind_of

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
TRACES = ("tbench_mini", "tau2_retail")
"""With seconds and names of tools. Those of cc_weka include people who approve calls."""

_TESTS = re.compile(r"\b(pytest|tox|unittest|npm test|go test|cargo test)\b")
_PYTHON = re.compile(r"^\s*(cd \S+ && )?python[\d.]*\s")


def main() -> None:
    """Print a table for each kind that the folder has times of."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED
    for kind, (count, quantiles) in sorted(measured(folder).items()):
        print(f"[{kind}]\ncalls = {count}\nlevels = {LEVELS}\nseconds = {quantiles}\n")  # noqa: T201


def measured(folder: Path) -> dict[str, tuple[int, list[float]]]:
    """Calls and their quantiles at `LEVELS`, in seconds to three digits, by kind."""
    found: dict[str, list[float]] = defaultdict(list)
    for kind, time_s in (*_of_traces(folder / "traces"), *_of_logs(folder / "raw_samples")):
        found[kind].append(time_s)
    return {
        kind: (len(times), [float(f"{q:.3g}") for q in np.quantile(times, LEVELS)])
        for kind, times in found.items()
    }


def _of_traces(folder: Path) -> Iterator[tuple[str, float]]:
    for name in TRACES:
        for record in read_trace(folder / f"{name}.jsonl.gz").records:
            for step in record.steps:
                tool, time_s = step.tool, step.tool_s
                if tool is None or time_s is None or "+" in tool:
                    continue
                if tool not in ("Agent", "ToolSearch"):
                    yield kind_of(tool), time_s


def _of_logs(folder: Path) -> Iterator[tuple[str, float]]:
    """Claude Code's calls, of which shell commands show what they ran; words of tau2's users."""
    for path in sorted((folder / "claude-code").glob("*.trace.jsonl")):
        yield from _claude_code(path)
    for path in sorted((folder / "tau2").glob("*.json")):
        for simulation in json.loads(path.read_text())["simulations"]:
            yield from _users(simulation["messages"])


def _claude_code(path: Path) -> Iterator[tuple[str, float]]:
    calls: dict[str, tuple[str, float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        content = (row.get("message") or {}).get("content")
        time_s = seconds(row.get("timestamp"))
        for block in content if isinstance(content, list) and time_s is not None else ():
            if block.get("type") == "tool_use" and block["name"] != "Task":
                calls[block["id"]] = _kind(block["name"], block["input"]), time_s
            elif block.get("type") == "tool_result" and block["tool_use_id"] in calls:
                kind, began_s = calls.pop(block["tool_use_id"])
                yield kind, max(0.0, time_s - began_s)


def _kind(name: str, given: dict[str, object]) -> str:
    command = str(given.get("command", "")) if name == "Bash" else ""
    if _TESTS.search(command):
        return "tests"
    return "python" if _PYTHON.match(command) else kind_of(name)


def _users(messages: list[dict[str, object]]) -> Iterator[tuple[str, float]]:
    for before, message in pairwise(messages):
        if (before["role"], message["role"]) == ("assistant", "user"):
            first, then = (seconds(str(m["timestamp"])) for m in (before, message))
            if first is not None and then is not None:
                yield "user", then - first


if __name__ == "__main__":
    main()
