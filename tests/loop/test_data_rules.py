"""What trainers do to the data, simulated: dynamic sampling, refill by sample, order of batches."""

import msgspec
import pytest

from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.data import UnfitError
from heddle.loops.result import RegimeResult
from heddle_trace.files import read_trace, write_trace
from heddle_trace.synth import synth

GROUPS, SAMPLES, STEPS = 4, 4, 6


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Rewards: none; and 1 for the first sample of every other prompt, 0 elsewhere."""
    folder = tmp_path_factory.mktemp("data")
    plain, solved = folder / "plain.jsonl.gz", folder / "solved.jsonl.gz"
    write_trace(plain, synth("math", trajectories=40 * SAMPLES, samples_per_group=SAMPLES, seed=3))
    records = [
        msgspec.structs.replace(record, reward=float(number % (2 * SAMPLES) == 0))
        for number, record in enumerate(read_trace(plain).records)
    ]
    write_trace(solved, records)
    return {"plain": str(plain), "solved": str(solved)}


def compared(trace: str, *names: str, running: int = 8) -> list[RegimeResult]:
    cluster = ClusterConfig(model="qwen3-8b", gpus=4, tp=2, max_running=running)
    config = LoopConfig(
        run=RunConfig(trace=trace, cluster=cluster),
        regimes=names,
        groups=GROUPS,
        samples=SAMPLES,
        batches=STEPS,
    )
    return list(compare_regimes([config]).tried)


@pytest.mark.parametrize("name", ["sync", "areal:max_head_offpolicyness=1"])
def test_groups_of_equal_reward_are_paid_and_not_trained(traces: dict[str, str], name: str):
    plain, dynamic = compared(traces["solved"], name, f"{name}:batching.equal_rewards=drop")
    assert plain.wasted_share == 0.0
    # Every other prompt has rewards that differ.
    assert dynamic.wasted_share == pytest.approx(0.5, abs=0.1)
    assert dynamic.step_s.mean > 1.2 * plain.step_s.mean
    (run,) = dynamic.runs
    assert {batch.trajectories for batch in run.batches} == {GROUPS * SAMPLES}


def test_an_overlong_filter_pays_for_tokens_that_do_not_count(traces: dict[str, str]):
    plain, masks = compared(traces["plain"], "sync", "sync:batching.overlong=mask")
    assert plain.masked_share is None
    assert masks.step_s.mean == plain.step_s.mean
    share = masks.masked_share
    assert share is not None
    assert 0.01 < share < 0.2
    assert masks.tokens_per_s == pytest.approx(plain.tokens_per_s * (1.0 - share), rel=0.1)
    assert masks.plain()["masked_share"] == share


def test_a_trace_without_rewards_has_no_dynamic_sampling(traces: dict[str, str]):
    with pytest.raises(UnfitError, match="drops groups of equal reward, as all 40 prompts"):
        compared(traces["plain"], "sync:batching.equal_rewards=drop")


def test_refill_by_sample_is_quicker_than_by_group(traces: dict[str, str]):
    """AReaL pull request 1722: 22.5 % less time of ten batches where slots are scarce."""
    name = "areal:max_head_offpolicyness=2:max_concurrent_rollouts=16:batching.order=first_finished"
    admits = ("groups", "slots", "samples")
    rows = compared(traces["plain"], *(f"{name}:staleness.admits={each}" for each in admits))
    groups, slots, samples = (row.step_s.mean for row in rows)
    assert samples <= 1.02 * slots
    assert samples < 0.9 * groups


def test_batches_in_order_of_starts_are_of_all_lengths_and_within_the_bound(traces: dict[str, str]):
    """Megatron-LM pull request 5306: consumption by batch, and by group."""
    name = "areal:max_head_offpolicyness=2:batching.order="
    by_batch, by_group = compared(traces["plain"], f"{name}started", f"{name}first_finished")
    assert by_batch.runs[0].batches[0].end_s > by_group.runs[0].batches[0].end_s
    assert by_batch.length_bias == pytest.approx(1.0, abs=1e-9)
    assert max(by_batch.staleness) <= 2 < max(by_group.staleness)


def test_slots_that_are_free_before_training_bound_no_staleness(traces: dict[str, str]):
    """Megatron-LM pull request 5853: a group's slot is free as it is assembled, or trained."""
    free = "areal:staleness.counted_by=nothing:staleness.late=train:staleness.admits=groups"
    name = ":batching.order=started:staleness.max_concurrent=32:max_head_offpolicyness=1"
    mended = f"areal{name}"
    unbounded, bounded = compared(traces["plain"], f"{free}{name}", mended, running=64)
    assert max(bounded.staleness) == 1
    assert max(unbounded.staleness) > 1
