"""Which GPU class a new trajectory gets: by measured shares, by tags, and when a class is full."""

from dataclasses import replace

import pytest

from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.estimate.history import Levels
from heddle_core.events import StepFinished
from heddle_core.ids import EngineId, EngineShape
from heddle_core.parts.placement.affinity import Affinity, TaggedAffinity, TaskShare
from heddle_core.policy import PolicyContext
from tests.core.ledgers import history
from tests.core.policy_fakes import FakeEngine, FakeView, trajectory

COMPUTES, READS = EngineShape("h800", 1), EngineShape("h20", 1)
COST = StepCost(t0_s=0.02, t1_s=1e-4, t2_s=2e-8, prefill_s=4e-5, kv_capacity_tokens=1_000_000)
CONTEXT = PolicyContext(
    pools={"h800": 2, "h20": 2},
    shape=COMPUTES,
    other_shapes=(READS,),
    shape_choices=(COMPUTES, READS),
    max_running=10,
    cost=CostModel(
        by_shape={COMPUTES: COST, READS: replace(COST, t0_s=0.014, t2_s=1e-8, prefill_s=2.4e-4)},
        transfer_fixed_s=0.1,
        transfer_s_per_token=1e-6,
    ),
)


def view(*sessions: int) -> FakeView:
    """Engines e0 and e1 on h800, e2 and e3 on h20."""
    shapes = (COMPUTES, COMPUTES, READS, READS)
    return FakeView(
        known=[
            FakeEngine(id=EngineId(f"e{k}"), shape=shape, sessions=count, max_running=10)
            for k, (shape, count) in enumerate(zip(shapes, sessions, strict=True))
        ]
    )


def ran(placement: Affinity, task: str, *, prompt: int, cached: int, output: int) -> None:
    t = trajectory(f"{task}-seen", task=task, context_tokens=prompt + output)
    event = StepFinished(
        time_s=1.0,
        trajectory=t.id,
        step=0,
        engine=EngineId("e0"),
        output_tokens=output,
        reason="stop",
        cached_tokens=cached,
    )
    placement.observe_step(t, event)


def seen() -> Affinity:
    """Of software tasks mostly prefill was seen, of math mostly decode."""
    placement = Affinity(CONTEXT)
    ran(placement, "swe", prompt=20_000, cached=4_000, output=200)
    ran(placement, "math", prompt=200, cached=0, output=8_000)
    return placement


def placed(placement: Affinity | TaggedAffinity, tasks: list[str], at: FakeView) -> list[str]:
    """Classes of new trajectories of these tasks, whose sessions count from then on."""
    found = []
    for number, task in enumerate(tasks):
        t = trajectory(f"{task}-{number}", task=task)
        home = placement.place(t, at)
        engine = at.engine(home)
        engine.sessions += 1
        found.append(engine.shape.gpu)
    return found


def test_the_share_of_a_task_is_what_its_steps_prefilled_and_attended():
    placement = seen()
    assert placement.share(trajectory("a", task="swe")) == TaskShare(16_000 / 200, 20_100.0)
    assert placement.share(trajectory("a", task="math")) == TaskShare(200 / 8_000, 4_200.0)
    assert placement.share(trajectory("a", task="games")) is None


def test_history_counts_until_a_task_is_measured():
    levels = Levels(
        total_tokens=1_000.0, step_tokens=250.0, payload_tokens=500.0, prompt_tokens=100.0
    )
    known = replace(history(), tasks={"swe": levels})
    placement = Affinity(replace(CONTEXT, history=known))
    t = trajectory("a", task="swe", prompt_tokens=500)
    # Three tool results of 500 tokens and the prompt, over 1,000 tokens of output.
    assert placement.share(t) == TaskShare(2_000 / 1_000, 500 + 0.5 * 2_500)
    ran(placement, "swe", prompt=20_000, cached=0, output=20_000)
    share = placement.share(t)
    assert share is not None
    assert share.prefill_tokens == pytest.approx((1.0 + 2.0) / 2)
    other = placement.share(trajectory("b", task="math", prompt_tokens=500))
    assert other is not None
    assert other.prefill_tokens == pytest.approx(500 / known.mean_output_tokens() + 0.6, rel=0.9)


def test_prefill_goes_where_it_computes_and_decode_where_it_reads_quickly():
    assert placed(seen(), ["swe", "math", "swe", "math"], view(0, 0, 0, 0)) == [
        *("h800", "h20", "h800", "h20")
    ]


def test_a_full_class_overflows_and_the_loads_stay_near():
    placement, at = seen(), view(0, 0, 0, 0)
    placed(placement, ["swe", "math"] * 3, at)
    classes = placed(placement, ["swe"] * 40, at)
    assert classes[0] == "h800"
    assert {"h800", "h20"} == set(classes)
    load_s = {gpu: gpu_s / 2 for gpu, gpu_s in placement._load_gpu_s.items()}
    assert max(load_s.values()) < 1.5 * min(load_s.values())


def test_a_task_of_which_nothing_is_known_goes_to_the_least_load():
    placement, at = Affinity(CONTEXT), view(0, 0, 0, 0)
    assert {*placed(placement, ["games"] * 12, at)} == {"h800", "h20"}


def test_one_task_alone_prefers_no_class():
    placement, at = Affinity(CONTEXT), view(0, 0, 0, 0)
    ran(placement, "swe", prompt=20_000, cached=4_000, output=200)
    assert {*placed(placement, ["swe"] * 12, at)} == {"h800", "h20"}


@pytest.mark.parametrize("make", [seen, lambda: TaggedAffinity(CONTEXT)])
def test_a_trajectory_stays_at_home_while_its_engine_accepts(make):
    placement, at = make(), view(9, 9, 0, 0)
    t = trajectory("a", task="math", home=EngineId("e0"))
    assert placement.place(t, at) == "e0"
    at.known[0].accepting = False
    assert placement.place(t, at) != "e0"


def test_a_finished_trajectory_leaves_the_load_of_its_class():
    placement, at = seen(), view(0, 0, 0, 0)
    t = trajectory("a", task="swe")
    placement.place(t, at)
    assert placement._load_gpu_s["h800"] > 0.0
    placement.finished(t)
    placement.finished(t)
    assert placement._load_gpu_s["h800"] == 0.0


def test_the_spread_of_loads_is_at_least_one():
    with pytest.raises(ValueError, match="at least 1"):
        Affinity(CONTEXT, spread=0.9)


TAGGED = replace(CONTEXT, tags={"swe": "h800", "math": "h20"})


def test_tags_choose_the_class():
    assert placed(TaggedAffinity(TAGGED), ["swe", "math", "swe"], view(5, 5, 0, 0)) == [
        *("h800", "h20", "h800")
    ]


def test_a_class_whose_engines_have_no_slot_left_is_full():
    assert placed(TaggedAffinity(TAGGED), ["swe", "swe"], view(10, 9, 3, 2)) == ["h800", "h20"]


def test_where_all_are_full_the_tag_holds():
    assert placed(TaggedAffinity(TAGGED), ["swe", "math"], view(30, 30, 10, 10)) == ["h800", "h20"]


def test_a_task_without_a_tag_goes_to_the_least_full_engine():
    assert placed(TaggedAffinity(TAGGED), ["games"], view(5, 4, 3, 2)) == ["h20"]


def test_a_tag_of_a_class_without_a_pool_is_refused():
    with pytest.raises(ValueError, match="'b200', which has no pool"):
        TaggedAffinity(replace(CONTEXT, tags={"swe": "b200"}))


def test_without_engines_of_its_class_a_tagged_task_goes_elsewhere():
    at = view(0, 0, 20, 20)
    for engine in at.known[:2]:
        engine.accepting = False
    assert placed(TaggedAffinity(TAGGED), ["swe"], at) == ["h20"]
