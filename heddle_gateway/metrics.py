"""What the gateway counts, as text for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from heddle_gateway.client_step import ClientStep
from heddle_gateway.gateway import Gateway

_SECONDS: Final = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Metrics:
    """Counts of requests and of steps."""

    def __init__(self) -> None:
        self.open = 0
        """Requests that are not answered yet."""
        self._requests: dict[tuple[str, int], int] = {}
        self._buckets = [0] * (len(_SECONDS) + 1)
        self._step_s = 0.0
        self._queued_s = 0.0
        self._prompt_tokens = 0
        self._output_tokens = 0

    def answered(self, path: str, status: int) -> None:
        """Count a request; `path` is one of a few."""
        self._requests[path, status] = self._requests.get((path, status), 0) + 1

    def step(self, step: ClientStep, seconds: float) -> None:
        """Count a step that was answered after `seconds`."""
        self._buckets[bisect_left(_SECONDS, seconds)] += 1
        self._step_s += seconds
        if step.dispatched_s is not None:
            self._queued_s += step.dispatched_s - step.submitted_s
        self._prompt_tokens += len(step.prompt_ids)
        self._output_tokens += step.tokens

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
            *_counter("queued_seconds", [("", self._queued_s)]),
            *_counter("dispatches", [("", gateway.dispatches)]),
            *_counter("preemptions", [("", gateway.preemptions)]),
            *_counter("engine_deaths", [("", gateway.engine_deaths)]),
            *_counter("engines_given_up", [("", gateway.engines_given_up)]),
            *_gauge("open_requests", [("", self.open)]),
            *_gauge("sessions", [("", len(gateway.sessions))]),
            *_gauge("trajectories", [("", gateway.sessions.trajectories)]),
            *_gauge("trajectories_in_tool", [("", gateway.sessions.idle)]),
            *_gauge("steps", [("", len(steps))]),
            *_gauge("steps_at_engine", [(f'{{engine="{e}"}}', n) for e, n in running.items()]),
            *_gauge("engines", [("", len(gateway.engines))]),
            *_gauge("paused", [("", int(gateway.paused))]),
            "# TYPE heddle_step_seconds histogram",
        ]
        total = 0
        for limit, count in zip((*_SECONDS, "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'heddle_step_seconds_bucket{{le="{limit}"}} {total}')
        lines += [f"heddle_step_seconds_sum {self._step_s}", f"heddle_step_seconds_count {total}"]
        return "\n".join(lines) + "\n"


def _labelled(counts: Mapping[tuple[str, int], int]) -> Iterator[tuple[str, float]]:
    for (path, status), count in counts.items():
        yield f'{{path="{path}",status="{status}"}}', count


def _counter(name: str, values: Iterable[tuple[str, float]]) -> list[str]:
    return _gauge(f"{name}_total", values, "counter")


def _gauge(name: str, values: Iterable[tuple[str, float]], kind: str = "gauge") -> list[str]:
    lines = (f"heddle_{name}{labels} {value}" for labels, value in values)
    return [f"# TYPE heddle_{name} {kind}", *lines]
