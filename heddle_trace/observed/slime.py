"""slime's metrics of steps; see `step_metrics` for the source."""

import re
from collections.abc import Mapping

from heddle_trace.observed.schema import PhaseName
from heddle_trace.observed.step_metrics import Metrics, StepMetrics


class Slime(StepMetrics):
    """What the trainer did, and within its wait the rollout, as far as it was waited for."""

    begins = re.compile(rb"\bperf (\d+):")
    total = "perf/step_time"

    def parts(self, seen: Metrics) -> Mapping[PhaseName, float]:
        """A rollout that ran while the trainer trained is no wait of the step."""
        took = {key: seen.get(f"perf/{key}_time", 0.0) for key in _KEYS}
        update_s = took["update_weights"]
        other_s = took["save_model"] + took["sleep"] + took["wake_up"]
        left_s = max(0.0, took["train_wait"] - update_s - other_s)
        return {
            "rollout": min(took["rollout"], left_s),
            "training": took["train"],
            "update": update_s,
            "other": other_s,
        }


_KEYS = ("rollout", "train", "train_wait", "update_weights", "save_model", "sleep", "wake_up")
