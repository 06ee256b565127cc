"""Several loops on the same GPUs."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from heddle.cli import main as command_line
from heddle.loops.settings import LoopSettings
from heddle.loops.shared import _together
from heddle.runs.loop_batches import BatchFigures
from heddle_core.loop.presets import REGIMES
from heddle_core.loop.regime import BatchShape
from heddle_core.loop.regime_text import regime_named
from heddle_trace.files import write_trace
from heddle_trace.synth import synth

AT_ONCE = LoopSettings(lend_s=0.0, return_s=0.0)
CLUSTER = '[cluster]\nmodel = "qwen3-8b"\ngpus = 8\ntp = 2\n'
LOOP = "[loop]\ntrain_gpus = 4\ngroups = 3\nsamples = 4\nbatches = 4\n"


def batch(rollout_s: float, training_s: float, update_s: float = 0.0) -> BatchFigures:
    return BatchFigures(
        batch=0,
        end_s=0.0,
        step_s=rollout_s + training_s + update_s,
        rollout_s=rollout_s,
        reward_s=0.0,
        training_s=training_s,
        update_s=update_s,
        trajectories=1,
        tokens=1,
        longest_over_mean=1.0,
        mean_reward=None,
        mean_staleness=0.0,
        most_staleness=0,
        wasted_tokens=0,
    )


@pytest.mark.parametrize(
    ("one", "other", "step_s"),
    [
        (batch(10.0, 4.0), batch(10.0, 4.0), 20.0),
        (batch(4.0, 10.0), batch(4.0, 10.0), 20.0),
        (batch(10.0, 10.0), batch(10.0, 10.0), 20.0),
        (batch(10.0, 2.0), batch(3.0, 8.0), 13.0),
        (batch(9.0, 4.0, 1.0), batch(9.0, 4.0, 1.0), 20.0),
        (batch(2.0, 2.0), batch(2.0, 10.0), 12.0),
    ],
)
def test_two_loops_take_turns(one: BatchFigures, other: BatchFigures, step_s: float):
    """The period is that of the fuller side, or of the slower loop alone."""
    run = _together([[one], [other]], [AT_ONCE, AT_ONCE])
    assert run.step_s == pytest.approx((step_s, step_s))
    rollout_s = one.rollout_s + one.update_s + other.rollout_s + other.update_s
    assert run.rollout_busy == pytest.approx(rollout_s / step_s, abs=0.12)


def test_a_loop_beside_none_takes_as_long_as_alone():
    batches = [batch(7.0, 3.0, 1.0), batch(9.0, 4.0, 1.0)]
    (step_s,) = _together([batches], [LoopSettings()]).step_s
    assert step_s == pytest.approx(12.5)


def test_gpus_that_change_loops_take_their_time():
    settings = LoopSettings(lend_s=2.0, return_s=0.5)
    (step_s, _) = _together([[batch(10.0, 4.0)]] * 2, [settings] * 2).step_s
    assert step_s == pytest.approx(24.0)


def test_on_policy_regimes_alternate():
    shape = BatchShape(groups=4, samples=4, slots=8, colocated=False, train_gpus=8)
    assert {name for name in REGIMES if regime_named(name, shape).alternates} == {
        "sync",
        "rollpacker",
    }
    assert regime_named("areal:max_head_offpolicyness=0", shape).alternates


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two loops, one on shorter trajectories."""
    folder = tmp_path_factory.mktemp("shared")
    for name, workload in (("a", "search"), ("b", "coding")):
        trace = folder / f"{workload}.jsonl.gz"
        write_trace(trace, synth(workload, trajectories=48, samples_per_group=4, seed=1))
        (folder / f"{name}.toml").write_text(f'trace = "{trace}"\n{CLUSTER}{LOOP}')
    return folder


def run(files: Path, *words: str, names: Sequence[str] = ("a", "b")) -> Result:
    configs = [word for name in names for word in ("-c", str(files / f"{name}.toml"))]
    shared = ("--set", "loop.shared_gpus=true", "--jobs", "1")
    return CliRunner().invoke(command_line, ["loop", *configs, *shared, *words])


def test_what_two_loops_save(files: Path):
    found = json.loads(run(files, "--json", "--seeds", "2").stdout)
    assert (found["schema"], found["gpus"]) == ("heddle.shared-loops/1", 8)
    a, b = found["loops"]
    for each, name in ((a, "a"), (b, "b")):
        assert each["config"].endswith(f"{name}.toml")
        alone = CliRunner().invoke(
            command_line,
            ["loop", "-c", each["config"], "--regimes", "sync", "--seeds", "2", "--json"],
        )
        (row,) = json.loads(alone.stdout)["regimes"]
        assert row["step_s"] == each["alone_step_s"]
        assert each["shared_step_s"]["mean"] >= each["alone_step_s"]["mean"]
    parts = [each["alone_step_s"]["mean"] / each["shared_step_s"]["mean"] for each in (a, b)]
    assert found["gain"]["mean"] == pytest.approx(sum(parts), rel=1e-3)
    assert 0.0 < found["busy"]["train"] < found["busy"]["rollout"] <= 1.0
    text = run(files, "--seeds", "2").output
    assert text.startswith(("Share the 8 GPUs", "Run one loop after the other"))
    assert f"{parts[0] ** -1:.2f} times as long in {a['config']}" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "names", "said"),
    [
        ((), ("a",), "give a TOML file for each of two loops or more"),
        ((), ("a", "a"), "two loops or more, none twice"),
        (("--regimes", "areal"), ("a", "b"), "a.toml: areal: rollout and training overlap"),
        (("--set", "loop.colocated=true"), ("a", "b"), "loop.colocated already has rollout and"),
        (("--sweep", "loop.train_gpus=best"), ("a", "b"), "leave --sweep, --out and report.figure"),
        (("--regimes", "nothing"), ("a", "b"), "nothing"),
    ],
)
def test_what_cannot_be_shared(
    files: Path, words: tuple[str, ...], names: Sequence[str], said: str
):
    done = run(files, *words, names=names)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())


def test_other_gpus_are_named(files: Path):
    text = (files / "b.toml").read_text().replace("gpus = 8", "gpus = 12")
    (files / "c.toml").write_text(text)
    done = run(files, names=("a", "c"))
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", " ").split())
    assert "a.toml: 4 h100 for rollout, 4 h100 to train" in said
    assert "c.toml: 8 h100 for rollout, 4 h100 to train" in said


def test_one_loop_alone_has_no_shared_gpus(files: Path):
    trace = str(files / "search.jsonl.gz")
    words = ("plan", trace, "--gpus", "8", "--regimes", "sync", "--set", "loop.shared_gpus=true")
    done = CliRunner().invoke(command_line, words)
    assert done.exit_code == 2
    assert "loop.shared_gpus is of `heddle loop`" in " ".join(done.output.replace("│", " ").split())
