"""Digests of what a run decided, in a form that outlives changes of its types.

`python -m tests.golden.decisions` writes `decisions.json` anew. That is right only where a change
of decisions is intended and a decision record explains it.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from campaigns.faults.scenario import Scenario, play
from heddle import ClusterConfig, PolicyConfig, RunConfig, load_run, simulate
from heddle_core.events import EngineReady, RolloutStarted
from heddle_core.journal import Entry
from heddle_core.presets import PRESETS

HERE = Path(__file__).parent
GOLDEN = HERE / "decisions.json"
TRACES = HERE.parent.parent / "traces"

FIELDS: Mapping[str, tuple[str, ...]] = {
    "RolloutStarted": ("trajectories",),
    "TrajectoryArrived": ("trajectory", "group", "task", "prompt_tokens"),
    "StepFinished": (
        *("trajectory", "step", "engine", "output_tokens", "reason", "queued_s", "prefill_s"),
        *("decode_s", "cached_tokens", "recomputes"),
    ),
    "StepPreempted": (
        *("trajectory", "step", "engine", "output_tokens", "queued_s", "prefill_s"),
        *("decode_s", "cached_tokens", "recomputes"),
    ),
    "ToolStarted": ("trajectory", "step", "tool"),
    "ToolReturned": (
        *("trajectory", "step", "tool", "ok", "observation_tokens", "context_tokens"),
    ),
    "TrajectoryFinished": ("trajectory", "outcome"),
    "MigrationFinished": ("trajectory", "source", "target", "ok", "kv_tokens", "way"),
    "EngineJoined": ("engine", "tp", "gpu", "max_running"),
    "EngineRecalled": ("engine", "drain"),
    "EngineReady": ("engine", "tp", "gpu", "kv_capacity_tokens", "max_running"),
    "EngineReported": ("engine", "running", "waiting", "kv_used_tokens", "preemptions"),
    "EngineStopped": ("engine",),
    "EngineFailed": ("engine", "reason", "salvaged"),
    "PlanSolved": ("plan", "engines", "homes", "makespan"),
    "Predicted": ("trajectory", "step", "remaining_tokens"),
    "WeightsUpdated": ("version",),
    "Tick": (),
    "Dispatch": ("trajectory", "step", "engine", "priority"),
    "Preempt": ("trajectory", "step", "engine"),
    "Migrate": ("trajectory", "source", "target"),
    "SolvePlan": ("plan",),
    "Predict": ("trajectory", "step", "estimate"),
    "StartEngine": ("engine", "tp", "gpu", "max_running"),
    "StopEngine": ("engine", "drain"),
    "Cancel": ("trajectory", "reason"),
}
"""What is compared of each event and command."""

HEDDLE_BEFORE = ("heddle+headroom+portfolio+keep_engines", "heddle+headroom+portfolio")
"""What `heddle` and `heddle+consolidate` were before engines were widened by default."""

HEDDLE_WITHOUT = (
    "heddle+never",
    "heddle+fixed+keep_engines",
    "heddle+keep_engines",
    "heddle+fcfs",
    "heddle+sticky+never",
)
"""`heddle` without one mechanism each."""

POLICIES = (*PRESETS, *HEDDLE_WITHOUT, *HEDDLE_BEFORE, "verl+progressive+follow_rank+served")
SCENARIOS: Mapping[str, Scenario] = {
    "storm": Scenario(),
    "history": Scenario(workload="search", with_history=True, faults=()),
    "math": Scenario(workload="math", with_history=True),
}
SHIPPED: Mapping[str, tuple[str, ...]] = {
    "tiny.jsonl": (*PRESETS, *HEDDLE_WITHOUT),
    "coding-512.jsonl.gz": (*PRESETS, *HEDDLE_WITHOUT, *HEDDLE_BEFORE),
    "math-512.jsonl.gz": ("verl", "slime", "heddle", HEDDLE_BEFORE[0], "heddle-paper"),
    "search-512.jsonl.gz": ("verl", "slime-2026", "heddle", HEDDLE_BEFORE[0], "heddle-paper"),
}


def _value(thing: Any, field: str) -> object:
    match field:
        case "tp" | "gpu":
            return getattr(thing.shape, field)
        case "engines":
            return [
                (str(s.engine), s.shape.tp, s.shape.gpu, s.max_running)
                for s in thing.resource_plan.engines
            ]
        case "homes":
            return [(str(e), [str(t) for t in ts]) for e, ts in thing.resource_plan.homes]
        case "makespan":
            return _estimate(thing.resource_plan.estimated_makespan_s)
        case "priority" | "remaining_tokens":
            return _estimate(getattr(thing, field))
        case "salvaged":
            return [(str(t), tokens) for t, tokens in thing.salvaged]
    value = getattr(thing, field)
    return str(value) if isinstance(value, str) else value


def _estimate(value: float | None) -> str | None:
    """With 12 digits: powers and logarithms of numpy differ in the last where a CPU has AVX-512."""
    return value if value is None else f"{value:.12g}"


def line(thing: Any) -> str:
    """One event or command as text, to the last digit but for estimates."""
    name = type(thing).__name__
    return f"{name} {[_value(thing, field) for field in FIELDS[name]]!r}"


def digest(entries: Iterable[Entry]) -> str:
    """SHA-256 over every event with its time and every command, in order."""
    total = hashlib.sha256()
    for entry in entries:
        total.update(f"{entry.event.time_s!r} {line(entry.event)}\n".encode())
        for command in entry.commands:
            total.update(f"  {line(command)}\n".encode())
    return total.hexdigest()


def of_scenario(policy: str, scenario: str) -> str:
    """Digest of a small rollout in which engines die, tools queue and KV is scarce."""
    return digest(_with_whole_zeros(play(policy, SCENARIOS[scenario]).entries))


def _with_whole_zeros(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Write the time of engines that are ready first of all as it was written then: 0, not 0.0."""
    first = True
    for entry in entries:
        event = entry.event
        first &= isinstance(event, RolloutStarted | EngineReady)
        if first and isinstance(event, EngineReady):
            event = msgspec.structs.replace(event, time_s=int(event.time_s))
        yield Entry(event, entry.commands)


def of_trace(trace: str, policy: str) -> dict[str, Any]:
    """Digest and figures of a shipped trace on 8 H100."""
    config = RunConfig(
        trace=str(TRACES / trace),
        cluster=ClusterConfig(model="qwen3-14b", gpu="h100", gpus=8),
        policy=PolicyConfig(preset=policy),
        seed=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(config, out=Path(folder))
        decisions = digest(load_run(result.path).entries())
        figures = {
            key: value
            for key, value in sorted(result.summary.items())
            if isinstance(value, int | float | str)
        }
    return {"decisions": decisions, "figures": figures}


def everything() -> dict[str, Any]:
    """All golden results, by name."""
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        for policy in POLICIES:
            found[f"{scenario}/{policy}"] = of_scenario(policy, scenario)
    for trace, policies in SHIPPED.items():
        for policy in policies:
            found[f"{trace}/{policy}"] = of_trace(trace, policy)
    return found


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(everything(), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{GOLDEN} written\n")
