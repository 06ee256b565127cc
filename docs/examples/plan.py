"""Plan 63 trajectories on 8 GPUs from estimated lengths and costs, without a cluster."""

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import context_costs, longest_first, work_of
from heddle_core.ids import EngineShape
from heddle_core.solve.exact import exact_plan

one, four = EngineShape("h100", 1), EngineShape("h100", 4)
by_shape = {
    one: StepCost(t0_s=0.011, t1_s=5e-5, t2_s=4.7e-8, prefill_s=4e-5, kv_capacity_tokens=259_000),
    four: StepCost(
        t0_s=0.0043, t1_s=5e-5, t2_s=1.2e-8, prefill_s=1e-5, kv_capacity_tokens=1_550_000
    ),
}
work = work_of([40_000, 21_000, 9_000, *[2_000] * 60], context_tokens=500, tool_s=5.0)
work = work.take(longest_first(work, by_shape[one]))
plan = exact_plan(context_costs(work, by_shape, max_running=64), len(work), pools={"h100": 8})
print([str(shape) for shape in plan.shapes], plan.sizes(), round(plan.makespan_s, 1))
