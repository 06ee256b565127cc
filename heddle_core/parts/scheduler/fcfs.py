"""First come, first served, by the arrival of the step: how vLLM and SGLang order their queues."""

from mypy_extensions import mypyc_attr

from heddle_core.policy import TrajectoryView


@mypyc_attr(allow_interpreted_subclasses=True)
class Fcfs:
    """Every step has the same urgency, so the queue's tie rule alone decides: arrival.

    The arrival is that of the step: a trajectory that returns from its tool goes to the tail.
    """

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return 0.0
