"""What `/metrics` of a vLLM endpoint says, in Prometheus's text format."""

import re
from collections.abc import Iterator

from heddle_rollout.engines import EngineSample

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
CACHE = "vllm:cache_config_info"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_ITERATIONS = "vllm:iteration_tokens_total_count"
_ITERATION_TOKENS = "vllm:iteration_tokens_total_sum"
_BEGAN = "process_start_time_seconds", "vllm:num_preemptions_created"


def began(text: str) -> str:
    """When the process and its counters began; empty where it does not say both."""
    said = [" ".join(_lines(text, name)) for name in _BEGAN]
    return " ".join(said) if all(said) else ""


def cache_labels(text: str) -> list[dict[str, str]]:
    """The labels of the KV cache's configuration, for each data-parallel rank."""
    return [dict(_LABEL.findall(line)) for line in _lines(text, CACHE)]


def read_sample(text: str, kv_capacity_tokens: int) -> EngineSample:
    """The engine's own counters, of all its data-parallel ranks together.

    Raises:
        ValueError: a counter is no number.
    """
    usage = [_value(line) for line in _lines(text, _USAGE)]
    return EngineSample(
        running=round(sum(_value(line) for line in _lines(text, _RUNNING))),
        waiting=round(sum(_value(line) for line in _lines(text, _WAITING))),
        kv_used_tokens=round(sum(usage) / max(1, len(usage)) * kv_capacity_tokens),
        preemptions=round(sum(_value(line) for line in _lines(text, _PREEMPTIONS))),
    )


def read_iterations(text: str) -> tuple[float | None, float | None]:
    """Iterations so far, and the tokens computed in them; None for a counter that is not there.

    Raises:
        ValueError: a counter is no number.
    """
    return _sum(text, _ITERATIONS), _sum(text, _ITERATION_TOKENS)


def read_acceptance(text: str) -> tuple[float, ...]:
    """The chance that the first 1, 2, ... drafts are all accepted; empty where none was made.

    Engines of several endpoints and ranks count together.

    Raises:
        ValueError: a counter is no number.
    """
    made = _sum(text, _DRAFTS)
    accepted: dict[int, float] = {}
    for line in _lines(text, _ACCEPTED):
        position = int(dict(_LABEL.findall(line)).get("position", "0"))
        accepted[position] = accepted.get(position, 0.0) + _value(line)
    return tuple(accepted[i] / made for i in sorted(accepted)) if made else ()


def _sum(text: str, name: str) -> float | None:
    values = [_value(line) for line in _lines(text, name)]
    return sum(values) if values else None


def _lines(text: str, name: str) -> Iterator[str]:
    starts = (name + "{", name + " ")
    return (line for line in text.splitlines() if line.startswith(starts))


def _value(line: str) -> float:
    return float(line.rpartition("}")[2].split()[0])
