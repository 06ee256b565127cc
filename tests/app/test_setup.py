"""Set-ups: what `prepare` finds, and that a workspace reads what runs share once."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle import policy_inputs, setup
from heddle.cluster import profiles
from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.config import MissingConfig, PolicyConfig, RunConfig
from heddle.setup import KEPT_INPUTS, Workspace, prepare
from heddle.simulation import simulate
from heddle_sim.config import SimulationConfig
from heddle_sim.profile_files import load_profile

READS = ((setup, "read_replayed"), (setup, "complete"), (profiles, "profile_by_name"))
READS += ((policy_inputs, "read_prior"), (policy_inputs, "read_artefact"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each input is read."""
    counts: Counter[str] = Counter()

    def counted(name: str, read: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return read(*args, **kwargs)

        return call

    for module, name in READS:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


def with_policy(config: RunConfig, preset: str) -> RunConfig:
    return replace(config, policy=PolicyConfig(preset=preset))


def test_a_comparison_reads_each_input_once(config: RunConfig, reads: Counter[str], tmp_path: Path):
    compare(config, ["verl", "slime", "heddle"], out=tmp_path / "runs", jobs=1)
    assert reads == {name: 1 for _, name in READS}


def test_seeds_of_a_comparison_share_all_but_the_completed_trace(
    config: RunConfig, reads: Counter[str], tmp_path: Path
):
    compare(config, ["verl", "heddle"], seeds=3, out=tmp_path / "runs", jobs=1)
    assert reads.pop("complete") == 3
    assert set(reads.values()) == {1}


def test_records_of_a_large_trace_are_read_again_for_each_seed(
    config: RunConfig, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
):
    cluster = replace(config.cluster, gpus=4)
    steps = sum(len(script.steps) for script in prepare(config).workload.scripts)
    made = {}
    for most in (steps, steps - 1):
        monkeypatch.setattr(setup, "MOST_STEPS_KEPT", most)
        reads.clear()
        shared, seeds = Workspace(), [replace(config, seed=seed) for seed in range(3)]
        configs = [*seeds, replace(config, cluster=cluster)]
        made[most] = [prepare(each, workspace=shared).workload for each in configs]
        assert reads["read_replayed"] == (1 if most == steps else 3)
        assert len(shared._kept["trace"]) == (most == steps)
    assert made[steps] == made[steps - 1]


def test_set_ups_without_a_workspace_share_nothing(config: RunConfig, reads: Counter[str]):
    prepare(config)
    prepare(config)
    assert set(reads.values()) == {2}


def test_a_workspace_does_not_grow_with_the_number_of_seeds(config: RunConfig):
    shared = Workspace()
    for seed in range(3 * KEPT_INPUTS):
        prepare(replace(config, seed=seed), workspace=shared)
    assert all(len(kept) <= KEPT_INPUTS for kept in shared._kept.values())


def test_two_set_ups_share_scripts_and_never_a_policy(config: RunConfig):
    shared = Workspace()
    one, other = (prepare(with_policy(config, "heddle"), workspace=shared) for _ in range(2))
    assert one.workload is other.workload
    assert one.policy.predictor is not other.policy.predictor


def test_a_workspace_distinguishes_what_configurations_distinguish(config: RunConfig):
    shared = Workspace()
    first = prepare(config, workspace=shared)
    cluster = replace(config.cluster, gpus=4)
    for other in (
        replace(config, seed=1),
        replace(config, cluster=cluster),
        replace(config, missing=MissingConfig(tool_s="zero")),
    ):
        assert prepare(other, workspace=shared).workload is not first.workload
    assert prepare(replace(config, cluster=cluster), workspace=shared).context.pools == {"h100": 4}


def test_a_policy_knows_the_longest_context_of_engines(config: RunConfig):
    assert prepare(config).context.max_context is None
    runtime = replace(config.runtime, max_context=4_096)
    limited = with_policy(replace(config, runtime=runtime), "prime-rl")
    few = replace(limited, runtime=replace(runtime, max_context=1 << 30))
    # All KV over the longest context start: of these, one after the other.
    ends_s = [simulate(prepare(each)).summary["makespan_s"] for each in (limited, few)]
    assert ends_s[0] < ends_s[1]


def test_a_run_prepared_before_is_the_run_of_its_configuration(config: RunConfig, tmp_path: Path):
    config_heddle = with_policy(config, "heddle")
    prepared = simulate(prepare(config_heddle), out=tmp_path / "runs")
    assert prepared.summary == simulate(config_heddle, out=tmp_path / "runs").summary


def test_a_set_up_names_the_history_that_it_found(config: RunConfig):
    found = prepare(config)
    assert (config.history, found.config.history) == ("prior", "prior:coding")
    assert found.context.history is found.history.history


def test_a_set_up_names_a_model_that_its_policy_uses(config: RunConfig):
    assert prepare(config).predictor_model is None
    used = prepare(with_policy(config, "heddle"))
    assert used.predictor_model == used.model.plain()


def test_every_data_parallel_rank_has_the_budget_of_an_engine(trace: Path) -> None:
    def simulation(**cluster: Any) -> SimulationConfig:
        config = ClusterConfig(model="qwen3-30b-a3b", gpu="h200", gpus=8, **cluster)
        return prepare(RunConfig(trace=str(trace), cluster=config)).simulation

    assert simulation().max_batched_tokens == 8192
    ranks = simulation(expert_parallel="on", attention_dp=8)
    assert ranks.max_batched_tokens == 8 * 8192
    one = load_profile("qwen3-30b-a3b", "h200").laid_out("on", attention_dp=8)
    table = ranks.table(one.shape(1))
    assert (table.gpus, table.kv_capacity_tokens) == (8, 8 * one.at(1).kv_capacity_tokens)
