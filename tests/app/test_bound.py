"""The lower bound is one: worked out by hand, and never beaten by a run."""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.policies.plugins import load_policy
from heddle.runs.bound import lower_bound
from heddle_core.controller import Controller
from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.events import Event, TrajectoryFinished
from heddle_core.ids import EngineShape
from heddle_core.journal import Entry, collecting
from heddle_core.policy import PolicyContext
from heddle_core.presets import PRESETS
from heddle_rollout.core import RecordedCore
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.rollout import simulate_rollout
from heddle_trace.schema import StepScript, TrajectoryScript


def plain(tp: int = 1, kv_tokens: int = 4096) -> LatencyTable:
    """Iterations of 10 ms at TP 1 whatever the batch, less at higher TP; prefill 1 ms a token."""
    return LatencyTable(
        model="m",
        gpu="g",
        tp=tp,
        base_s=[0.010 / tp**0.5] * 17,
        per_context_s=[0.0] * 17,
        prefill_tokens=(0, 1, 100),
        prefill_knots_s=(0.0, 0.001, 0.100),
        prefill_pair_s=0.0,
        host_per_prefill_s=0.0,
        kv_capacity_tokens=kv_tokens,
        kv_bytes_per_token=1,
    )


def script(name: str, *steps: tuple[int, int, int, float], at: float = 0.0) -> TrajectoryScript:
    """`steps` are (prompt, shared, output, tool seconds)."""
    made = tuple(
        StepScript(
            prompt_tokens=prompt,
            shared_tokens=shared,
            output_tokens=output,
            tool="t" if tool_s else None,
            tool_s=tool_s,
            tool_ok=None,
            tool_tokens=0,
        )
        for prompt, shared, output, tool_s in steps
    )
    return TrajectoryScript(
        id=name, group=name, task="x", arrival_s=at, steps=made, truncated=False
    )


def test_solo_is_prefill_decode_and_tools_of_the_longest():
    one = script("a", (50, 0, 11, 2.0), (80, 60, 21, 0.0))
    bound = lower_bound(
        [one, script("b", (10, 0, 5, 0.0))], [plain()], pools={"g": 4}, max_running=16
    )
    # Two prefill iterations of 10 ms and 50 + 20 tokens at 1 ms; 10 + 20 more tokens at 10 ms.
    assert bound.solo_s == pytest.approx(0.02 + 0.070 + 0.300 + 2.0)


def test_solo_counts_from_the_first_arrival():
    late = script("a", (1, 0, 1, 1.0), at=107.0)
    bound = lower_bound(
        [script("b", (1, 0, 1, 0.0), at=100.0), late], [plain()], pools={"g": 1}, max_running=1
    )
    assert bound.solo_s == pytest.approx(7.0 + 1.0 + 0.010 + 0.001)


def test_solo_takes_the_fastest_tp_degree():
    one = [script("a", (1, 0, 1001, 0.0))]
    tables = [plain(1), plain(4)]
    assert lower_bound(one, tables, pools={"g": 4}, max_running=16).solo_s == pytest.approx(
        1000 * 0.005 + 0.005 + 0.001
    )


def test_capacity_shares_an_iteration_among_the_largest_batch():
    many = [script(str(i), (1, 0, 101, 0.0)) for i in range(64)]
    bound = lower_bound(many, [plain(kv_tokens=10**9), plain(4)], pools={"g": 4}, max_running=16)
    # 6,400 decode tokens at 10 ms / 16 and 64 prompt tokens at 1 ms, all at TP 1, on 4 GPUs.
    assert bound.capacity_s == pytest.approx((6400 * 0.010 / 16 + 64 * 0.001) / 4, rel=1e-3)
    assert bound.makespan_s == max(bound.solo_s, bound.capacity_s)


def test_the_capacity_bound_counts_long_contexts_that_cannot_share_an_engine():
    # Each holds more than half of the KV, so no two run together: 10 ms a token, not 10 / 16.
    long = [script(str(i), (2500, 0, 101, 0.0)) for i in range(8)]
    loose = lower_bound(long, [plain(kv_tokens=10**9)], pools={"g": 1}, max_running=16)
    tight = lower_bound(long, [plain(kv_tokens=4096)], pools={"g": 1}, max_running=16)
    assert loose.capacity_s == pytest.approx(8 * (100 * 0.010 / 16 + 2.5), rel=1e-3)
    assert tight.capacity_s > 8 * (100 * 0.010 * 0.6 + 2.5)
    assert tight.capacity_s < 8 * (100 * 0.010 + 2.5)


def test_the_prompt_of_a_group_is_prefilled_once():
    group = [replace(script(str(i), (1000, 0, 1, 0.0)), group="g") for i in range(8)]
    assert lower_bound(
        group, [plain()], pools={"g": 1}, max_running=16
    ).capacity_s == pytest.approx(1.0)


def test_limited_tools_bound_the_makespan_too():
    tools = [script(str(i), (1, 0, 1, 30.0)) for i in range(10)]
    bound = lower_bound(tools, [plain()], pools={"g": 8}, max_running=16, tool_capacity=2)
    assert bound.tools_s == bound.makespan_s == pytest.approx(150.0)
    assert lower_bound(tools, [plain()], pools={"g": 8}, max_running=16).tools_s == 0.0


@st.composite
def tables(draw: st.DrawFn, tp: int, gpu: str = "g") -> LatencyTable:
    base, slope = draw(st.floats(1e-4, 0.02)), draw(st.floats(0.0, 1e-6))
    # As steeply as experts fill, or hardly; an iteration that prefills may read all of them.
    grown = draw(st.lists(st.floats(0.0, 0.01), min_size=8, max_size=8))
    least = draw(st.floats(0.2, 3.0)) * base
    rate = draw(st.floats(1e-6, 1e-4))
    return LatencyTable(
        model="m",
        gpu=gpu,
        tp=tp,
        base_s=[least, *accumulate(grown, initial=base)][:9],
        per_context_s=[slope] * 9,
        prefill_tokens=(0, 64, 512),
        prefill_knots_s=(0.0, 64 * rate, 512 * rate * draw(st.floats(0.5, 2.0))),
        prefill_pair_s=draw(st.floats(0.0, 1e-9)),
        host_per_prefill_s=draw(st.floats(0.0, 1e-3)),
        kv_capacity_tokens=draw(st.integers(3000, 20_000)),
        kv_bytes_per_token=10,
    )


@st.composite
def scripts(draw: st.DrawFn) -> list[TrajectoryScript]:
    out = []
    for i in range(draw(st.integers(1, 12))):
        steps, end = [], 0
        for _ in range(draw(st.integers(1, 4))):
            shared = end if draw(st.integers(0, 4)) else draw(st.integers(0, end))
            prompt = shared + draw(st.integers(1 if shared == 0 else 0, 200))
            output = draw(st.integers(1, 300))
            tool_s = draw(st.sampled_from([0.0, 0.01, 1.0]))
            steps.append((prompt, shared, output, tool_s))
            end = prompt + output
        one = script(f"t{i}", *steps, at=draw(st.sampled_from([0.0, 0.0, 0.5])))
        out.append(replace(one, group=f"g{i // 3}"))
    return out


@pytest.mark.parametrize("pools", [{"g": 4}, {"g": 4, "k": 2}])
@settings(max_examples=60)
@given(data=st.data(), work=scripts(), tp=st.sampled_from([1, 2]), slots=st.integers(1, 8))
def test_no_simulated_run_beats_the_bound(
    pools: dict[str, int], data: st.DataObject, work: list[TrajectoryScript], tp: int, slots: int
):
    shapes = [EngineShape(gpu, n) for gpu in pools for n in (1, 2)]
    made = {shape: data.draw(tables(shape.tp, shape.gpu)) for shape in shapes}
    tools = data.draw(st.sampled_from([None, 1, 3]))
    bound = lower_bound(
        work, list(made.values()), pools=pools, max_running=slots, tool_capacity=tools
    )
    cost = StepCost(t0_s=0.01, t1_s=0.0, t2_s=0.0, prefill_s=1e-5, kv_capacity_tokens=3000)
    other = replace(cost, t0_s=0.005, prefill_s=2e-5)
    by_shape = {shape: cost if shape.gpu == "g" else other for shape in shapes}
    policy_context = PolicyContext(
        pools=pools,
        shape=EngineShape("g", tp),
        other_shapes=tuple(EngineShape(gpu, 1) for gpu in pools if gpu != "g"),
        shape_choices=tuple(by_shape),
        max_running=slots,
        cost=CostModel(by_shape=by_shape, transfer_fixed_s=0.0, transfer_s_per_token=0.0),
    )
    name = data.draw(st.sampled_from(sorted(PRESETS)))
    controller, entries = Controller(load_policy(name, policy_context)), list[Entry]()
    world = SimulationConfig(
        table=made.__getitem__,
        transfer_fixed_s=0.0,
        transfer_bytes_per_s=1e9,
        tool_capacity=tools,
    )
    simulate_rollout(work, RecordedCore(controller, collecting(entries)), world)
    events: list[Event] = [e.event for e in entries]
    ended = [e.trajectory for e in events if isinstance(e, TrajectoryFinished)]
    assert sorted(ended) == sorted(one.id for one in work)
    makespan = max(e.time_s for e in events if isinstance(e, TrajectoryFinished))
    assert makespan >= bound.makespan_s * (1 - 1e-9)


def test_two_classes_bound_by_the_multipliers_of_their_gpu_seconds():
    # 1,000 tokens of no context: 1 ms of an engine each on "g", 2 ms on "k", one sequence a batch.
    work = [script(f"t{i}", (1, 0, 100, 0.0)) for i in range(10)]
    quick = replace(plain(kv_tokens=10**9), base_s=[1e-3, 1e-3], per_context_s=[0.0, 0.0])
    free = {"prefill_knots_s": (0.0, 0.0, 0.0), "prefill_pair_s": 0.0, "host_per_prefill_s": 0.0}
    free["prefill_tokens"] = (0, 64, 512)
    quick = replace(quick, **free)
    slow = replace(quick, gpu="k", base_s=[2e-3, 2e-3])
    tables = [quick, slow]
    both = lower_bound(work, tables, pools={"g": 1, "k": 2}, max_running=1)
    # One GPU of "g" makes 1,000 tokens a second, two of "k" as many.
    tokens = sum(step.output_tokens - 1 for one in work for step in one.steps)
    assert both.capacity_s == pytest.approx(tokens / 2_000, rel=0.01)
    alone = lower_bound(work, tables[:1], pools={"g": 1}, max_running=1)
    assert alone.capacity_s == pytest.approx(tokens / 1_000, rel=1e-9)


def test_a_class_that_is_another_in_all_but_its_name_changes_no_bound():
    work = [script(f"t{i}", (10 * i + 5, 0, 40 + i, 0.0)) for i in range(6)]
    one = lower_bound(work, [plain()], pools={"g": 4}, max_running=16)
    twice = [plain(), replace(plain(), gpu="k")]
    two = lower_bound(work, twice, pools={"g": 3, "k": 1}, max_running=16)
    assert two.makespan_s == pytest.approx(one.makespan_s, rel=1e-12)


def test_the_bound_of_a_shipped_trace_is_not_vacuous(tmp_path: Path):
    from heddle import ClusterConfig, RunConfig, simulate
    from heddle.setup import prepare

    trace = Path(__file__).resolve().parents[2] / "traces" / "tiny.jsonl"
    config = RunConfig(trace=str(trace), cluster=ClusterConfig(gpus=1, model="qwen3-8b"))
    makespan = simulate(config, out=tmp_path / "runs").summary["makespan_s"]
    assert 0.3 < prepare(config).bound().makespan_s / makespan <= 1.0
