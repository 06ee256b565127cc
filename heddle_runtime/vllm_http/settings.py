"""Settings of engines behind URLs."""

from typing import Any

import msgspec

from heddle_runtime.sampling import checked_sampling


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all engines of a launcher share. Times are seconds."""

    sampling: dict[str, Any] = msgspec.field(default_factory=lambda: {"temperature": 0.0})
    """Sampling of steps that bring none of their own."""
    stream_interval: int = 8
    """Tokens of an event of the stream. What a dead engine had made and not sent is lost."""
    start_limit_s: float = 300.0
    """How long a start waits for a URL, or for one that does not answer."""
    retry_s: float = 1.0
    """Interval of its attempts."""
    answer_limit_s: float = 10.0
    """How long any call may take but a generation and `/health`."""
    silence_s: float = 5.0
    """Silence of streams and calls after which an engine may count as hung; see
    `heddle_runtime.vllm_http.life`."""
    silence_limit_s: float = 300.0
    """How long a step may bring nothing on an engine that computes: then it runs again."""
    place_limit_s: float = 300.0
    """How long a step waits while every engine is busy or fails: then it ends with the last
    answer."""
    abort_limit_s: float = 5.0
    """How long an engine may take to end an aborted step: then its connection is closed."""
    health_s: float = 1.0
    """Interval of `/health`."""
    sample_s: float = 0.5
    """Interval of `/metrics` while something runs."""
    kv_lease_s: float = 30.0
    """How long a source keeps exported KV: NIXL's `kv_lease_duration` of the endpoints. The value
    of one whose configuration can be read counts instead."""
    kv_margin_s: float = 5.0
    """No pull is waited for later than this before the end of a lease."""

    def __post_init__(self) -> None:
        checked_sampling(self.sampling)
        if self.stream_interval < 1:
            raise ValueError(f"stream_interval is {self.stream_interval}: it must be at least 1")
        for name in self.__struct_fields__:
            if name.endswith("_s") and name[:3] != "kv_" and getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be more than 0")
        if not 0 <= self.kv_margin_s < self.kv_lease_s:
            raise ValueError(
                f"kv_margin_s is {self.kv_margin_s}: it must be less than kv_lease_s, "
                f"{self.kv_lease_s}"
            )
