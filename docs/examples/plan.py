"""Plan 63 trajectories on 8 GPUs from estimated lengths and costs, without a cluster."""

from heddle_core.cost import StepCost
from heddle_core.plan.exact import exact_plan
from heddle_core.plan.group_cost import context_costs, longest_first, work_of

by_tp = {
    1: StepCost(t0_s=0.011, t1_s=5e-5, t2_s=4.7e-8, prefill_s=4e-5, kv_capacity_tokens=259_000),
    4: StepCost(t0_s=0.0043, t1_s=5e-5, t2_s=1.2e-8, prefill_s=1e-5, kv_capacity_tokens=1_550_000),
}
work = work_of([40_000, 21_000, 9_000, *[2_000] * 60], context_tokens=500, tool_s=5.0)
work = work.take(longest_first(work, by_tp[1]))
plan = exact_plan(context_costs(work, by_tp, max_running=64), len(work), gpus=8)
print(plan.tps, plan.sizes(), round(plan.makespan_s, 1))
