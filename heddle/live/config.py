"""The configuration of live agents."""

from dataclasses import dataclass

_MOST = 1 << 30
"""Of each number: more than any context or set of tasks has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """Live agents instead of a replay; only `heddle run` reads this. See docs/live-agents.md."""

    agents: bool = False
    """Whether `trace` is a file of tasks, and agents with a Python sandbox work on them."""
    samples: int = 1
    """Trajectories for each task."""
    steps: int = 16
    """Generations of a trajectory."""
    step_tokens: int = 2048
    """Tokens of one generation."""
    observation_tokens: int = 2048
    """Tokens of a program's output in the model's context."""
    context_tokens: int = 32_768
    """Tokens of prompt, generations and observations together."""
    tool_s: float = 30.0
    """Seconds after which a program is cut."""
    tool_cpu_s: int = 10
    """CPU seconds of a program."""
    tool_memory_mib: int = 512
    """Address space of a program."""

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "step_tokens", "observation_tokens", "context_tokens"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise ValueError(f"{name} must be 1 or more, at most {_MOST:,}")
