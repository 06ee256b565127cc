"""Prefill and decode engines in simulated time, solved by hand.

A prefill takes 0.1 ms for each token that is computed, an iteration 10 ms beside, and a copy of KV
0.05 s and 1 us for each token. Blocks have 16 tokens.
"""

from collections.abc import Sequence

import pytest

from heddle_core import Controller, Entry, collecting
from heddle_core.commands import Dispatch, Migrate
from heddle_core.events import MigrationFinished, StepFinished, StepPreempted, TrajectoryFinished
from heddle_core.ids import EngineId, EngineShape
from heddle_core.parts.admission import PromptOnly
from heddle_core.parts.migration import Never
from heddle_core.parts.placement.load_and_pin import Sticky
from heddle_core.parts.predictor import NoPrediction
from heddle_core.parts.scheduler import Fcfs
from heddle_core.plans import Disaggregation, EngineSpec, PlanProblem, ResourcePlan
from heddle_core.policy import Policy, TrajectoryView
from heddle_rollout.core import RecordedCore
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.rollout import simulate_rollout
from heddle_trace.schema import StepScript, TrajectoryScript

ITERATION_S, TOKEN_S = 0.01, 0.0001
COPY_S, COPY_TOKEN_S = 0.05, 1e-6
P0, D0, D1 = EngineId("p0"), EngineId("d0"), EngineId("d1")
PREFILL, DECODE = EngineShape("g", 1, "prefill"), EngineShape("g", 1, "decode")


def table(kv_tokens: int) -> LatencyTable:
    return LatencyTable(
        model="m",
        gpu="g",
        tp=1,
        base_s=[ITERATION_S] * 9,
        per_context_s=[0.0] * 9,
        prefill_tokens=[0.0, 10_000.0],
        prefill_knots_s=[0.0, 10_000 * TOKEN_S],
        prefill_pair_s=0.0,
        host_per_prefill_s=0.0,
        kv_capacity_tokens=kv_tokens,
        kv_bytes_per_token=1000,
    )


class DecodeEngines:
    needs_all = False

    def __init__(self, names: Sequence[EngineId], slots: int) -> None:
        self._plan = ResourcePlan(
            engines=tuple(EngineSpec(engine=n, shape=DECODE, max_running=slots) for n in names)
        )

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        return self._plan


def script(name: str, *steps: tuple[int, int, int], tool_s: float = 1.0) -> TrajectoryScript:
    """Each step as (prompt, shared, output) tokens."""
    return TrajectoryScript(
        id=name,
        group=name,
        task="t",
        arrival_s=0.0,
        steps=tuple(
            StepScript(
                prompt, shared, output, "sh" if k + 1 < len(steps) else None, tool_s, True, 0
            )
            for k, (prompt, shared, output) in enumerate(steps)
        ),
        truncated=False,
    )


def play(
    scripts: Sequence[TrajectoryScript],
    *,
    decode: Sequence[EngineId] = (D0,),
    slots: int = 4,
    threshold: int = 0,
    prefill_kv: int = 64_000,
    decode_kv: int = 64_000,
    faults: tuple[tuple[float, EngineId], ...] = (),
) -> list[Entry]:
    policy = Policy(
        predictor=NoPrediction(),
        scheduler=Fcfs(),
        admission=PromptOnly(),
        placement=Sticky(),
        migration=Never(),
        planner=DecodeEngines(decode, slots),
    )
    beside = Disaggregation(
        engines=(EngineSpec(engine=P0, shape=PREFILL, max_running=4),),
        threshold_tokens=threshold,
        prefill_s_by_shape={PREFILL: TOKEN_S},
    )
    config = SimulationConfig(
        table=lambda shape: table(prefill_kv if shape.prefills_only else decode_kv),
        transfer_fixed_s=9.0,
        handover_fixed_s=COPY_S,
        transfer_bytes_per_s=1000 / COPY_TOKEN_S,
        engine_start_s=5.0,
        report_interval_s=0.0,
        faults=faults,
    )
    entries: list[Entry] = []
    controller = Controller(policy, beside)
    simulate_rollout(scripts, RecordedCore(controller, collecting(entries)), config)
    assert not controller.ledger.trajectories
    for engine in controller.ledger.known_engines.values():
        assert (engine.prefilled_kv_tokens, engine.prefill_tokens, engine.in_flight) == (0, 0, 0)
    return entries


def events(entries: Sequence[Entry], kind: type) -> list:
    return [e.event for e in entries if isinstance(e.event, kind)]


def commands(entries: Sequence[Entry], kind: type) -> list:
    return [c for e in entries for c in e.commands if isinstance(c, kind)]


def test_one_step_on_two_engines_takes_prefill_copy_and_decode():
    entries = play([script("a", (1600, 0, 11))])
    [prefilled] = events(entries, StepPreempted)
    [copied] = events(entries, MigrationFinished)
    [end] = events(entries, StepFinished)
    first_s = ITERATION_S + 1600 * TOKEN_S
    assert (prefilled.engine, prefilled.output_tokens) == (P0, 1)
    assert prefilled.time_s == pytest.approx(first_s)
    copied_s = first_s + COPY_S + 1600 * COPY_TOKEN_S
    assert (copied.source, copied.target, copied.kv_tokens) == (P0, D0, 1600)
    assert copied.time_s == pytest.approx(copied_s)
    # The first token has no KV yet; its iteration makes the second, and nine more follow.
    assert (end.engine, end.output_tokens, end.cached_tokens) == (D0, 10, 1600)
    assert end.time_s == pytest.approx(copied_s + TOKEN_S + 10 * ITERATION_S)


def test_new_tokens_up_to_the_threshold_are_prefilled_where_they_are_decoded():
    steps = ((1600, 0, 16), (1716, 1616, 16), (2233, 1732, 16))
    entries = play([script("a", *steps)], threshold=500)
    dispatched = [(c.engine, c.step, c.max_tokens) for c in commands(entries, Dispatch)]
    # 100 new tokens stay on d0; the last step has 501 beyond its context there.
    assert dispatched == [(P0, 0, 1), (D0, 0, None), (D0, 1, None), (P0, 2, 1), (D0, 2, None)]


def test_a_prefill_engine_copies_the_earlier_context_and_only_what_is_missing_comes_back():
    entries = play([script("a", (1600, 0, 16), (2216, 1616, 16))])
    there, back, again = (e for e in events(entries, MigrationFinished)[0:3])
    assert (there.source, there.target) == (P0, D0)
    assert (back.source, back.target) == (D0, P0)
    assert (again.source, again.target) == (P0, D0)
    began_s = [e.event.time_s for e in entries if commands([e], Migrate)]
    # d0 has 1615 of 1616 tokens, 1600 in whole blocks; p0 has kept all of them.
    assert back.time_s - began_s[1] == pytest.approx(COPY_S)
    # p0 has 2216 tokens, 2208 in whole blocks, of which d0 has 1600.
    assert again.time_s - began_s[2] == pytest.approx(COPY_S + 608 * COPY_TOKEN_S)
    second = [e for e in events(entries, StepPreempted) if e.step == 1]
    assert [e.cached_tokens for e in second] == [1600]


def test_a_full_decode_engine_stalls_the_prefill_engine():
    """One slot decodes; prefilled KV stays on p0, which has KV for two contexts."""
    scripts = [script(name, (1600, 0, 101)) for name in ("a", "b", "c", "d")]
    entries = play(scripts, slots=1, prefill_kv=3_300)
    prefills = [c for c in commands(entries, Dispatch) if c.engine == P0]
    began_s = {c.trajectory: e.event.time_s for e in entries for c in e.commands if c in prefills}
    copied_s = [e.time_s for e in events(entries, MigrationFinished)]
    ends_s = [e.time_s for e in events(entries, StepFinished)]
    # a and b are prefilled together, and a is handed over; c takes its place on p0 then.
    assert began_s["a"] == began_s["b"] == 0.0
    assert began_s["c"] == copied_s[0]
    # d waits until b is on d0, which is after a has ended there.
    assert began_s["d"] == copied_s[1] > ends_s[0]
    assert len(copied_s) == len(ends_s) == 4


@pytest.mark.parametrize("engine", [P0, D0])
@pytest.mark.parametrize("at_s", [0.05, 0.172, 0.2, 0.25])
def test_a_failure_before_in_or_after_a_hand_over_loses_no_step_and_repeats_none(
    engine: EngineId, at_s: float
):
    """At 0.05 s p0 prefills, at 0.172 and 0.2 s KV is copied to d0, at 0.25 s d0 decodes."""
    entries = play(
        [script("a", (1600, 0, 16), (1700, 1616, 16))], decode=(D0, D1), faults=((at_s, engine),)
    )
    assert [e.outcome for e in events(entries, TrajectoryFinished)] == ["completed"]
    assert [e.step for e in events(entries, StepFinished)] == [0, 1]
    made = [e.output_tokens for e in events(entries, StepFinished)]
    made += [e.output_tokens for e in events(entries, StepPreempted)]
    salvaged = [n for e in entries for _, n in getattr(e.event, "salvaged", ())]
    assert sum(made) + sum(salvaged) == 32


def test_without_a_prefill_engine_decode_engines_prefill():
    entries = play([script("a", (1600, 0, 16))], faults=((0.001, P0),))
    assert [(c.engine, c.max_tokens) for c in commands(entries, Dispatch)] == [
        (P0, 1),
        (D0, None),
    ]


def test_kv_kept_for_a_failed_decode_engine_goes_to_another():
    entries = play([script("a", (1600, 0, 16))], decode=(D0, D1), faults=((0.2, D0),))
    moves = [(c.source, c.target) for c in commands(entries, Migrate)]
    assert moves == [(P0, D0), (P0, D1)]
    assert [c.engine for c in commands(entries, Dispatch)] == [P0, D1]


def test_a_step_of_one_token_needs_no_decode_engine():
    entries = play([script("a", (1600, 0, 1))])
    assert [c.engine for c in commands(entries, Dispatch)] == [P0]
    assert not commands(entries, Migrate)


def test_a_plan_has_no_prefill_engines_of_its_own():
    both = EngineSpec(engine=P0, shape=EngineShape("g", 1), max_running=4)
    with pytest.raises(ValueError, match="role prefill"):
        Disaggregation(engines=(both,), threshold_tokens=0, prefill_s_by_shape={})
