"""What the gateway counts, as text for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from heddle_gateway.client_step import ClientStep
from heddle_gateway.gateway import Gateway

_SECONDS: Final = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_DECISIONS: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01, 0.1, 1.0)


class _Histogram:
    """Counts of values in buckets, by engine or for all."""

    def __init__(self, name: str, limits: Sequence[float]) -> None:
        self._name, self._limits = name, limits
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def take(self, value: float, engine: str = "") -> None:
        if engine not in self._counts:
            self._counts[engine], self._sums[engine] = [0] * (len(self._limits) + 1), 0.0
        self._counts[engine][bisect_left(self._limits, value)] += 1
        self._sums[engine] += value

    def lines(self) -> Iterator[str]:
        yield f"# TYPE heddle_{self._name} histogram"
        for engine, counts in (self._counts or {"": [0] * (len(self._limits) + 1)}).items():
            label = f'engine="{engine}",' if engine else ""
            for limit, count in zip((*self._limits, "+Inf"), accumulate(counts), strict=True):
                yield f'heddle_{self._name}_bucket{{{label}le="{limit}"}} {count}'
            label = f"{{{label[:-1]}}}" if label else ""
            yield f"heddle_{self._name}_sum{label} {self._sums.get(engine, 0.0)}"
            yield f"heddle_{self._name}_count{label} {sum(counts)}"


class Metrics:
    """Counts of requests and of steps."""

    def __init__(self) -> None:
        self.open = 0
        """Requests that are not answered yet."""
        self._requests: dict[tuple[str, int], int] = {}
        self._steps = _Histogram("step_seconds", _SECONDS)
        self._first = _Histogram("time_to_first_token_seconds", _SHORT)
        self._each = _Histogram("request_time_per_output_token_seconds", _SHORT)
        self._queue = _Histogram("request_queue_time_seconds", _SECONDS)
        self.decisions = _Histogram("decision_seconds", _DECISIONS)
        self._prefix: dict[str, list[int]] = {}
        """Prompt tokens and those from the prefix cache, by engine."""
        self._prompt_tokens = 0
        self._output_tokens = 0

    def answered(self, path: str, status: int) -> None:
        """Count a request; `path` is one of a few."""
        self._requests[path, status] = self._requests.get((path, status), 0) + 1

    def step(self, step: ClientStep, began_s: float, now_s: float) -> None:
        """Count a step the first time that it was answered; times are of `time.monotonic`."""
        if step.measured:
            return
        step.measured = True
        self._steps.take(now_s - began_s)
        if step.dispatched_s is not None:
            self._queue.take(step.dispatched_s - step.submitted_s, step.engine)
        if step.first_s is not None and step.first_s > began_s:
            self._first.take(step.first_s - began_s, step.engine)
            if step.tokens > 1:
                self._each.take((now_s - step.first_s) / (step.tokens - 1), step.engine)
        found = self._prefix.setdefault(step.engine, [0, 0])
        found[0] += step.prompt_tokens
        found[1] += (step.end.cached_tokens or 0) if step.end is not None else 0
        self._prompt_tokens += step.prompt_tokens
        self._output_tokens += step.tokens

    def _of_prefix(self, which: int) -> list[tuple[str, float]]:
        return [(_engine(name), counts[which]) for name, counts in self._prefix.items()]

    def text(self, gateway: Gateway) -> str:
        """Return everything in Prometheus' text format."""
        steps = list(gateway.sessions.under_way)
        running = dict.fromkeys(map(str, gateway.engines), 0)
        for step in steps:
            if step.engine in running:
                running[step.engine] += 1
        lines = [
            *_counter("requests", _labelled(self._requests)),
            *_counter("prompt_tokens", [("", self._prompt_tokens)]),
            *_counter("output_tokens", [("", self._output_tokens)]),
            *_counter("dispatches", [("", gateway.dispatches)]),
            *_counter("preemptions", [("", gateway.preemptions)]),
            *_counter("engine_deaths", [("", gateway.engine_deaths)]),
            *_counter("engines_given_up", [("", gateway.engines_given_up)]),
            *_gauge("open_requests", [("", self.open)]),
            *_gauge("sessions", [("", len(gateway.sessions))]),
            *_gauge("trajectories", [("", gateway.sessions.trajectories)]),
            *_gauge("trajectories_in_tool", [("", gateway.sessions.idle)]),
            *_gauge("steps", [("", len(steps))]),
            *_gauge("num_requests_running", [(_engine(e), n) for e, n in running.items()]),
            *_gauge("num_requests_waiting", [("", sum(s.dispatches == 0 for s in steps))]),
            *_counter("prefix_cache_queries", self._of_prefix(0)),
            *_counter("prefix_cache_hits", self._of_prefix(1)),
            *_gauge("engines", [("", len(gateway.engines))]),
            *_gauge("paused", [("", int(gateway.paused))]),
        ]
        for each in (self._steps, self._first, self._each, self._queue, self.decisions):
            lines += each.lines()
        return "\n".join(lines) + "\n"


def _engine(name: str) -> str:
    return f'{{engine="{name}"}}' if name else ""


def _labelled(counts: Mapping[tuple[str, int], int]) -> Iterator[tuple[str, float]]:
    for (path, status), count in counts.items():
        yield f'{{path="{path}",status="{status}"}}', count


def _counter(name: str, values: Iterable[tuple[str, float]]) -> list[str]:
    return _gauge(f"{name}_total", values, "counter")


def _gauge(name: str, values: Iterable[tuple[str, float]], kind: str = "gauge") -> list[str]:
    lines = (f"heddle_{name}{labels} {value}" for labels, value in values)
    return [f"# TYPE heddle_{name} {kind}", *lines]
