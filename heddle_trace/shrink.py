"""The same rollout with fewer tokens, for engines that decode slowly."""

import msgspec

from heddle_trace.errors import TraceError
from heddle_trace.schema import TrajectoryRecord


def shrunk(record: TrajectoryRecord, factor: float) -> TrajectoryRecord:
    """`record` with every count of tokens divided by `factor`, at least 1 where there were any.

    Steps, tools and their times stay. Recorded sizes of whole prompts are left out: rounding
    would make it contradict the sum of its parts.

    Raises:
        TraceError: a factor below 1.
    """
    if not factor >= 1.0:
        raise TraceError(f"shrink is {factor}; give 1 or more")

    def less(tokens: int | None) -> int | None:
        return tokens if not tokens else max(1, round(tokens / factor))

    steps = tuple(
        msgspec.structs.replace(
            step,
            output_tokens=less(step.output_tokens),
            tool_tokens=less(step.tool_tokens),
            input_tokens=None,
            cached_tokens=None,
        )
        for step in record.steps
    )
    return msgspec.structs.replace(record, prompt_tokens=less(record.prompt_tokens), steps=steps)
