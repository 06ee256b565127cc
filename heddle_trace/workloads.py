"""Parameters of the synthetic workloads, one row of numbers each, with sources.

Sources: Heddle (arXiv 2603.28101: experimental setting, Table 1), Libra (arXiv 2606.03077), and
recorded traces: tbench (Terminal-Bench), tau2 (retail tickets), hotpotqa (ReAct), MINT. What each
number rests on is in docs/traces.md, with recorded and synthetic figures side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# Heddle's and Libra's longest output; a trajectory that reaches it is cut off.
OUTPUT_LIMIT_TOKENS: Final = 40_960


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Parameters of one synthetic workload. Tokens and seconds; sigmas are of natural logarithms.

    *Demand* is a standard normal number of each trajectory: a part shared by its group (how hard
    the prompt is) and a part of its own, `own_share` of the variance. A *pull* is how much one
    standard deviation of demand moves a quantity, in natural log (the failure rate: in log odds).
    """

    own_share: float
    needed_calls: float
    needed_calls_pull: float
    first_output_tokens: float
    first_output_sigma: float
    step_output_tokens: float
    step_output_sigma: float
    step_output_pull: float
    fail_rate: float
    fail_pull: float
    tools: tuple[tuple[str, float], ...]
    tool_mean_s: float
    tool_sigma: float
    tool_limit_s: float
    payload_tokens: float
    payload_sigma: float
    first_payload_pull: float
    payload_limit_tokens: int
    prompt_tokens: float
    prompt_sigma: float


WORKLOADS: Final[Mapping[str, WorkloadSpec]] = {
    "coding": WorkloadSpec(
        own_share=0.18,
        needed_calls=5.0,
        needed_calls_pull=0.45,
        first_output_tokens=330.0,
        first_output_sigma=0.7,
        step_output_tokens=350.0,
        step_output_sigma=0.8,
        step_output_pull=0.38,
        fail_rate=0.13,
        fail_pull=0.5,
        tools=(("sandbox", 1.0),),
        tool_mean_s=0.41,
        tool_sigma=1.8,
        tool_limit_s=30.0,
        payload_tokens=150.0,
        payload_sigma=1.4,
        first_payload_pull=0.5,
        payload_limit_tokens=16_000,
        prompt_tokens=820.0,
        prompt_sigma=0.35,
    ),
    "search": WorkloadSpec(
        own_share=0.40,
        needed_calls=7.5,
        needed_calls_pull=0.5,
        first_output_tokens=130.0,
        first_output_sigma=0.5,
        step_output_tokens=110.0,
        step_output_sigma=0.6,
        step_output_pull=0.16,
        fail_rate=0.07,
        fail_pull=0.4,
        tools=(("web_search", 1.0),),
        tool_mean_s=1.41,
        tool_sigma=0.7,
        tool_limit_s=30.0,
        payload_tokens=300.0,
        payload_sigma=0.8,
        first_payload_pull=0.15,
        payload_limit_tokens=4_000,
        prompt_tokens=860.0,
        prompt_sigma=0.02,
    ),
    "math": WorkloadSpec(
        own_share=0.10,
        needed_calls=1.6,
        needed_calls_pull=0.35,
        first_output_tokens=1_500.0,
        first_output_sigma=0.5,
        step_output_tokens=2_100.0,
        step_output_sigma=0.5,
        step_output_pull=0.6,
        fail_rate=0.10,
        fail_pull=0.5,
        tools=(("calculator", 0.7), ("solver", 0.3)),
        tool_mean_s=0.046,
        tool_sigma=0.8,
        tool_limit_s=10.0,
        payload_tokens=35.0,
        payload_sigma=1.0,
        first_payload_pull=0.1,
        payload_limit_tokens=2_000,
        prompt_tokens=890.0,
        prompt_sigma=0.1,
    ),
}
