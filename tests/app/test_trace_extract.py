"""A trace through a run and back."""

import json
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.config import MissingConfig, PolicyConfig, RunConfig
from heddle.simulation import simulate
from heddle_trace import MissingRules, complete, read_trace
from heddle_trace.schema import Trace, TrajectoryScript
from tests.app.conftest import ROOT
from tests.app.journals import Heddle

SHARED = ROOT.parent / "shared" / "traces"


def scripts(trace: Trace, rules: MissingRules) -> dict[str, TrajectoryScript]:
    return {script.id: script for script in complete(trace, rules=rules, seed=0)[0]}


def same(before: TrajectoryScript, after: TrajectoryScript, *, shared: bool = True) -> None:
    """Everything that a journal knows of a trajectory."""
    assert (before.group, before.task, before.truncated) == (
        after.group,
        after.task,
        after.truncated,
    )
    assert len(before.steps) == len(after.steps)
    for index, (a, b) in enumerate(zip(before.steps, after.steps, strict=True)):
        assert (a.prompt_tokens, a.output_tokens, a.tool) == (
            b.prompt_tokens,
            b.output_tokens,
            b.tool,
        )
        assert a.tool_s == pytest.approx(b.tool_s, abs=1e-6)
        if shared:
            assert a.shared_tokens == b.shared_tokens
        if index < len(before.steps) - 1:  # no generation reads the last tool's output
            assert (a.tool_ok, a.tool_tokens) == (b.tool_ok, b.tool_tokens)


@pytest.mark.parametrize("policy", ["verl", "heddle"])
@pytest.mark.parametrize("name", ["coding-512", "search-512"])
def test_a_shipped_trace_comes_back_from_a_run(heddle: Heddle, name: str, policy: str):
    original = ROOT / "traces" / f"{name}.jsonl.gz"
    config = RunConfig(
        trace=str(original), cluster=ClusterConfig(gpus=8), policy=PolicyConfig(preset=policy)
    )
    run = simulate(config, out=Path("runs"))
    done = heddle("trace", "extract", run.path, "-o", "back.jsonl.gz")
    assert done.exit_code == 0, done.output
    assert "512 trajectories" in done.stdout
    assert heddle("trace", "check", "back.jsonl.gz").exit_code == 0
    back = read_trace("back.jsonl.gz")
    before = scripts(read_trace(original), MissingRules())
    after = scripts(back, MissingRules(tool_tokens="zero"))
    assert list(after) == list(before)
    for script in before.values():
        same(script, after[script.id])
    assert {r.model for r in back.records} == {"qwen3-14b"}
    assert all(step.llm_s for record in back.records for step in record.steps)


def test_a_recorded_trace_with_compactions_comes_back_from_a_run(heddle: Heddle):
    original = SHARED / "tau2_retail.jsonl.gz"
    if not original.exists():
        pytest.skip("recorded traces are not at ../shared/traces")
    config = RunConfig(
        trace=str(original),
        cluster=ClusterConfig(gpus=4),
        missing=MissingConfig(tool_s="sample", tool_tokens="zero"),
    )
    run = simulate(config, out=Path("runs"))
    assert heddle("trace", "extract", run.path, "-o", "back.jsonl").exit_code == 0
    rules = MissingRules(tool_s="sample", tool_tokens="zero")
    before = scripts(read_trace(original), rules)
    after = scripts(read_trace("back.jsonl"), MissingRules(tool_tokens="zero"))
    assert list(after) == list(before)
    for script in before.values():
        # How much of a compacted prompt repeats the one before, no event records.
        same(script, after[script.id], shared=False)


def test_what_a_policy_preempts_does_not_change_what_comes_back(heddle: Heddle, trace: Path):
    made = {}
    for policy in ("verl", "heddle-paper"):
        config = RunConfig(
            trace=str(trace),
            cluster=ClusterConfig(gpus=1, max_running=1),
            policy=PolicyConfig(preset=policy),
        )
        run = simulate(config, out=Path("runs"))
        out = f"{policy}.jsonl"
        done = heddle("trace", "extract", run.path, "-o", out, "--json")
        answer = json.loads(done.stdout)
        assert answer["schema"] == "heddle.trace.extract/1"
        assert (answer["trajectories"], answer["left_out"]) == (6, {})
        made[policy] = scripts(read_trace(out), MissingRules(tool_tokens="zero"))
    assert made["verl"].keys() == made["heddle-paper"].keys()
    for name, script in made["verl"].items():
        same(script, made["heddle-paper"][name])


def test_runs_that_cannot_be_extracted_are_reported(heddle: Heddle, refused, trace: Path):
    assert "not a run directory" in refused("trace", "extract", "none", "-o", "t.jsonl")
    run = simulate(RunConfig(trace=str(trace)), out=Path("runs"))
    Path("t.jsonl").write_text("mine")
    assert "--force" in refused("trace", "extract", run.path, "-o", "t.jsonl")
    assert Path("t.jsonl").read_text() == "mine"
    manifest = run.path / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text(manifest.read_text().replace('"finished"', '"interrupted"'))
    done = heddle("trace", "extract", run.path, "-o", "u.jsonl")
    assert done.exit_code == 0
    assert "interrupted before it finished: the trajectories that have ended" in done.stderr
