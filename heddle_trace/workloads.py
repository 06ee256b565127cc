"""Parameters of the synthetic workloads, one column of numbers each, with sources.

Sources: Heddle (arXiv 2603.28101: experimental setting, Table 1), Libra (arXiv 2606.03077), and
recorded traces: tbench (Terminal-Bench), tau2 (retail tickets), hotpotqa (ReAct), MINT. What each
number rests on is in docs/traces.md, with recorded and synthetic figures side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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


_NAMES: Final = ("coding", "search", "math")
_NUMBERS: Final[Mapping[str, tuple[Any, Any, Any]]] = {
    "own_share": (0.18, 0.40, 0.10),
    "needed_calls": (5.0, 7.5, 1.6),
    "needed_calls_pull": (0.45, 0.5, 0.35),
    "first_output_tokens": (330.0, 130.0, 1_500.0),
    "first_output_sigma": (0.7, 0.5, 0.5),
    "step_output_tokens": (350.0, 110.0, 2_100.0),
    "step_output_sigma": (0.8, 0.6, 0.5),
    "step_output_pull": (0.38, 0.16, 0.6),
    "fail_rate": (0.13, 0.07, 0.10),
    "fail_pull": (0.5, 0.4, 0.5),
    "tools": ((("sandbox", 1.0),), (("web_search", 1.0),), (("calculator", 0.7), ("solver", 0.3))),
    "tool_mean_s": (0.41, 1.41, 0.046),
    "tool_sigma": (1.8, 0.7, 0.8),
    "tool_limit_s": (30.0, 30.0, 10.0),
    "payload_tokens": (150.0, 300.0, 35.0),
    "payload_sigma": (1.4, 0.8, 1.0),
    "first_payload_pull": (0.5, 0.15, 0.1),
    "payload_limit_tokens": (16_000, 4_000, 2_000),
    "prompt_tokens": (820.0, 860.0, 890.0),
    "prompt_sigma": (0.35, 0.02, 0.1),
}
"""Of each parameter, in the order of the names."""

WORKLOADS: Final[Mapping[str, WorkloadSpec]] = {
    name: WorkloadSpec(**{field: numbers[at] for field, numbers in _NUMBERS.items()})
    for at, name in enumerate(_NAMES)
}
