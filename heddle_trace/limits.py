"""Upper limits of a trace, as types. A larger number is a unit error, not a workload.

The decoder enforces the bounds of these types while it reads (`files.py`).
"""

from typing import Annotated, Final, TypeAlias

import msgspec

# Contexts today end at 1-2 million tokens; ten million in one step is a count of bytes.
MAX_STEP_TOKENS: Final = 10_000_000
# A tool may wait for a human over a long weekend; thirty days is milliseconds taken for seconds.
MAX_WAIT_S: Final = 30 * 24 * 3600.0
# Arrivals count from the start of the trace; a year is a Unix time that was not made relative.
MAX_CLOCK_S: Final = 365 * 24 * 3600.0
# The longest recorded agent sessions have some hundreds of steps.
MAX_STEPS: Final = 100_000
MAX_PARALLEL_TOOLS: Final = 10_000
# Rewards are of the order of 1.
MAX_REWARD: Final = 1e9
# The longest published training runs have some thousands of steps.
MAX_RL_STEP: Final = 10_000_000
# Everything is held in memory; a gzip file can claim to unpack to anything.
MAX_FILE_BYTES: Final = 4 * 1024**3

Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP_TOKENS)]
WaitSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]
ClockSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_CLOCK_S)]
ToolCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_PARALLEL_TOOLS)]
Reward: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
RlStep: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_RL_STEP)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1_000)]
