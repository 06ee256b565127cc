"""Real training: refusals without engines, the prediction, and one loop on real engines."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner

from campaigns.processes import descendants, wait_until_gone
from experiments.real_training import setup as train_setup
from experiments.real_training.command import main
from experiments.real_training.config import TrainConfig
from experiments.real_training.echo import EchoTask
from experiments.real_training.messages import TrainMetrics
from experiments.real_training.prediction import LEAST_STEPS, fitted_line, predict
from experiments.real_training.setup import (
    TrainSetup,
    prepare_training,
    prompt_of,
    training_run_config,
)
from experiments.real_training.show import show_batch, show_train
from experiments.real_training.training import TrainedBatch, TrainResult, train
from heddle.runs import RunError, load_run
from heddle.runs.loop_batches import BatchFigures
from heddle.runs.replay import replay
from heddle_core.controller import Controller
from heddle_core.events import EngineFailed, StepFinished, Trained
from heddle_core.ids import GroupId
from heddle_core.journal import Entry, Handle, first_divergence
from heddle_sim.latency import LatencyTable
from heddle_sim.loop import LoopSimulation, LoopWorld
from heddle_trace.schema import StepScript, TrajectoryScript
from tests.runtime.vllm_bench import VLLM_GROUP, no_vllm

MISSING = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
needs_trainer = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed")
needs_engines, group = no_vllm(), pytest.mark.xdist_group(VLLM_GROUP)


TASK = EchoTask(letters=4, steps=3, step_tokens=12, tool_s=0.1, seed=3)


def config(out: Path, regime: str, **changes: Any) -> TrainConfig:
    run = training_run_config(
        out, task=TASK, policy="verl", engines=2, max_running=8, failures="", seed=3
    )
    values = {"steps": 8, "groups": 4, "samples": 4, "task": TASK} | changes
    return TrainConfig(run=run, regime=regime, **values)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "1"], "--steps must be 2 to"),
        (["--samples", "1"], "GRPO compares samples"),
        (["--regime", "nothing"], "nothing"),
        (["--policy", "verl+oracle"], "unknown"),
        (["--optimizer-steps", "1000"], "has only 64 trajectories"),
        (["--out", "missing/runs"], "no such directory"),
        (["--optimizer-steps", "0"], "--optimizer-steps must be 1 or more"),
        (["--failures", "e0"], "ENGINE@SECONDS"),
    ],
)
@needs_trainer
def test_bad_input_is_one_message_with_the_remedy(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_its_packages_one_message_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(train_setup, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 2
    assert "pip install 'heddle-rl[train]'" in done.stderr


# -- prediction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3], [3.0, 5.0, 7.0], (1.0, 2.0)),
        ([1, 2, 3], [3.0, 2.0, 1.0], (2.0, 0.0)),
        ([1, 2], [1.0, 3.0], (0.0, 1.4)),
        ([4, 4, 4], [1.0, 2.0, 3.0], (2.0, 0.0)),
    ],
)
def test_a_fitted_line_has_no_negative_part(x, y, expected):
    assert fitted_line(x, y) == pytest.approx(expected)


ITERATION_S, RUNNING_S, PREFILL_S = 0.004, 0.0003, 0.001


def simulated_run(setup: TrainSetup) -> list[Entry]:
    """A loop with known rates, in place of a run on engines."""
    entries: list[Entry] = []
    core = setup.core(Controller(setup.run.policy))

    class Recorded:
        deadline_s = None

        @property
        def over(self) -> bool:
            return core.over

        def handle(self, event: Any) -> Any:
            commands = tuple(core.handle(event))
            entries.append(Entry(event, commands))
            return commands

    def script(group: GroupId, sample: int) -> TrajectoryScript:
        prompt = prompt_of(TASK, group)
        steps, context = [], 2
        for index in range(len(prompt.letters)):
            last = index + 1 == len(prompt.letters)
            output = 5 + (sample * 7 + index * 3) % 8
            steps.append(
                StepScript(
                    prompt_tokens=context,
                    shared_tokens=max(0, context - 2) if index else 0,
                    output_tokens=output,
                    tool=None if last else "show",
                    tool_s=0.0 if last else prompt.tool_s[index],
                    tool_ok=None,
                    tool_tokens=0 if last else 2,
                )
            )
            context += output + 2
        return TrajectoryScript(f"{group}/{sample}", group, "echo", 0.0, steps, False)

    table = LatencyTable(
        model="",
        gpu="h100",
        tp=1,
        base_s=[ITERATION_S + RUNNING_S * b for b in range(64)],
        per_context_s=[0.0] * 64,
        prefill_tokens=(0.0, 1.0, 2.0),
        prefill_knots_s=(0.0, 0.0, 0.0),
        prefill_pair_s=0.0,
        host_per_prefill_s=PREFILL_S,
        kv_capacity_tokens=10_000,
        kv_bytes_per_token=1,
    )
    world = LoopWorld(
        script=script,
        train_s=lambda tokens, pool_trains: 0.2 + 1e-4 * sum(tokens),
        update_s=0.3,
        pause_s=0.3,
    )
    cluster = replace(setup.run.simulation, table=lambda shape: table, block_size=32)
    LoopSimulation(Recorded(), cluster, world).run()
    return entries


@needs_trainer
@pytest.mark.parametrize("regime", ["sync", "one-step-off", "areal:max_head_offpolicyness=1"])
def test_a_loop_of_known_rates_is_predicted_from_its_journal(regime, tmp_path):
    entries = simulated_run(prepare_training(config(tmp_path, regime)))
    found = predict(prepare_training(config(tmp_path, regime)), entries)
    assert found is not None
    assert found.fitted_steps == 4
    assert found.rates.update_s == pytest.approx(0.3)
    assert found.rates.training_s[0] == pytest.approx(0.2, rel=0.02)
    fixed_s, each_s = found.rates.iteration_s
    assert fixed_s + 6 * each_s == pytest.approx(ITERATION_S + 6 * RUNNING_S, rel=0.15)
    assert abs(found.error_pct) < 3.0
    ended_s = [entry.event.time_s for entry in entries if isinstance(entry.event, Trained)]
    assert sum(found.measured_s) == pytest.approx(ended_s[-1])


@needs_trainer
def test_the_text_has_the_prediction(tmp_path, capsys):
    setup = prepare_training(config(tmp_path, "sync"))
    metrics = TrainMetrics(
        loss=0.1,
        reward=0.5,
        clipped=0.0,
        grad_norm=1.0,
        logprob_gap=0.0,
        tokens=9,
        generated=5,
        seconds=0.1,
    )
    figures = BatchFigures(
        batch=0,
        end_s=2.0,
        step_s=2.0,
        rollout_s=1.5,
        reward_s=0.0,
        training_s=0.5,
        update_s=0.0,
        trajectories=1,
        tokens=5,
        longest_over_mean=1.0,
        mean_reward=None,
        mean_staleness=0.0,
        most_staleness=0,
        wasted_tokens=0,
    )
    batch = TrainedBatch(figures=figures, metrics=metrics)
    found = predict(setup, simulated_run(setup))
    result = TrainResult(
        setup=setup, path=tmp_path, batches=(batch,), update_s=(0.1,), restarts=0, prediction=found
    )
    show_batch(batch)
    show_train(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "2.00", "0.500", "0.00", "0.1000", "0.50", "0.0000"]
    assert any(line.startswith("mean of 5 to 8") for line in lines)
    assert any(line.startswith("4 (fitted)") for line in lines)


@needs_trainer
def test_too_few_steps_are_not_predicted(tmp_path):
    setup = prepare_training(config(tmp_path, "sync", steps=LEAST_STEPS - 1))
    assert predict(setup, simulated_run(setup)) is None


@needs_trainer
def test_generations_of_few_tokens_are_not_predicted(tmp_path):
    setup = prepare_training(config(tmp_path, "sync"))
    entries = [
        Entry(msgspec.structs.replace(e.event, output_tokens=3), e.commands)
        if isinstance(e.event, StepFinished)
        else e
        for e in simulated_run(setup)
    ]
    assert predict(setup, entries) is None


# -- real engines -------------------------------------------------------------------------------


def running(module: str) -> list[int]:
    """Processes of ours that run a module."""
    found = []
    for process in descendants():
        with suppress(OSError):  # it has just ended
            if module.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


def kill(module: str) -> None:
    os.kill(running(module)[0], signal.SIGKILL)


@pytest.mark.soak
@group
@pytest.mark.skipif(bool(needs_engines), reason=needs_engines)
@needs_trainer
def test_a_loop_learns_although_an_engine_and_the_trainer_are_killed(tmp_path):
    regime = "areal:max_head_offpolicyness=1:enforce=true"
    setup = prepare_training(config(tmp_path, regime, steps=30, groups=6, samples=8))
    seen: list[TrainedBatch] = []

    def on_batch(batch: TrainedBatch) -> None:
        seen.append(batch)
        if batch.figures.batch == 3:
            kill("heddle_runtime.vllm.process")
        elif batch.figures.batch == 7:
            kill("experiments.real_training.process")

    result = train(setup, out=tmp_path / "runs", on_batch=on_batch)
    assert wait_until_gone(running("heddle_runtime")) == []
    assert [batch.figures.batch for batch in seen] == list(range(30))
    assert result.restarts == 1
    assert {batch.figures.most_staleness for batch in seen} == {0, 1}
    # Each token's log-prob is of the weights that made it: without staleness it is the trainer's.
    assert seen[0].metrics.logprob_gap < 1e-3
    early = sum(batch.metrics.reward for batch in seen[:5]) / 5
    late = sum(batch.metrics.reward for batch in seen[-5:]) / 5
    assert late > 2 * early + 0.05, (early, late)
    run = load_run(result.path)
    with pytest.raises(RunError, match="it cannot be replayed"):
        replay(run)
    again = prepare_training(setup.config)
    core = again.core(again.run.controller())
    assert first_divergence(run.entries(), cast(Handle, core.handle)) is None
    failed = [e.event for e in run.entries() if isinstance(e.event, EngineFailed)]
    assert len(failed) == 1
    assert "SIGKILL" in failed[0].reason
    assert run.summary["trained_batches"] == 30
    assert result.prediction is not None
