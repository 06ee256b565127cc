"""Metrics of vLLM and SGLang over time: Prometheus text, or what `promtool tsdb` exports.

Source: https://prometheus.io/docs/instrumenting/exposition_formats (a sample may end in a time, in
milliseconds; in OpenMetrics in seconds), `promtool tsdb dump` and `dump-openmetrics`; names as in
vLLM's `vllm/v1/metrics/loggers.py` and SGLang's `sglang:num_running_reqs` and `num_queue_reqs`.
Scrapes without times may follow one another, each after a comment `# TIME` with its Unix seconds.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Final

from heddle_trace.errors import TraceError
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.observed.protocol import Observations, Placed
from heddle_trace.observed.schema import Clock, EngineSample

_LINE: Final = re.compile(r"([A-Za-z_:][\w:]*)?(?:\{(.*)\})?\s+(\S+)(?:\s+(\S+))?\s*$")
_LABEL: Final = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_OURS: Final = re.compile(rb"\b(?:vllm|sglang):")
_TIME: Final = "# TIME"
_ENGINES: Final = ("instance", "pod", "engine", "engine_type", "dp_rank", "tp_rank")
"""Labels that name an engine."""
_GAUGES: Final = {
    "num_requests_running": "running",
    "num_running_reqs": "running",
    "num_requests_waiting": "waiting",
    "num_queue_reqs": "waiting",
}
_SUMS: Final = {
    "request_queue_time_seconds_sum": "queue_s",
    "request_prefill_time_seconds_sum": "prefill_s",
    "request_decode_time_seconds_sum": "decode_s",
    "queue_time_seconds_sum": "queue_s",
}
_NO_TIMES: Final = (
    "has samples without times: export them with `promtool tsdb dump-openmetrics`, or write a line "
    '`echo "# TIME $(date +%s)"` before each scrape'
)
_NO_ENGINES: Final = (
    "has two values of {name} at one time and no label that names their engines: give each engine "
    "a file of its own, or keep the labels instance or engine"
)


class Prometheus:
    """Engines alone: what trajectories did while no engine had a request is not recorded."""

    clock: Clock = "shared"
    one_file = False

    def recognises(self, head: Head) -> bool:
        """Samples of vLLM or SGLang, or comments about them."""
        return not head.rows and head.readable and bool(_OURS.search(head.start))

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A sample of an engine for each of its times."""
        for source in sources:
            engines: dict[str, dict[float, dict[str, float]]] = {}
            for where, name, labels, value, time_s in _samples(source, notes):
                key = _GAUGES.get(name) or _SUMS.get(name)
                if key is None:
                    continue
                found = [labels[label] for label in _ENGINES if label in labels]
                times = engines.setdefault("/".join(found if found else [source.label]), {})
                values = times.setdefault(time_s, {})
                if key in values and name in _GAUGES:
                    raise TraceError(f"{where}: {_NO_ENGINES.format(name=name)}")
                values[key] = values.get(key, 0.0) + value
            for engine, times in engines.items():
                for seen in _over_time(engine, times):
                    yield Placed(str(source.path), seen)


def _over_time(engine: str, times: Mapping[float, Mapping[str, float]]) -> Iterator[EngineSample]:
    """The samples of an engine; none of times at which it had no numbers of requests."""
    before: dict[str, float] = {}
    for time_s, now in sorted(times.items()):
        deltas = {
            # A counter that falls was reset: its engine was started again.
            key: now[key] - before[key] if now[key] >= before[key] else now[key]
            for key in dict.fromkeys(_SUMS.values())
            if key in now and key in before
        }
        before |= now
        if "running" in now:
            waiting = now.get("waiting", 0.0)
            yield EngineSample(
                engine=engine, time_s=time_s, running=now["running"], waiting=waiting, **deltas
            )


def _samples(
    source: SourceFile, notes: Notes
) -> Iterator[tuple[str, str, dict[str, str], float, float]]:
    """Place, name without its system, labels, value and Unix time of each sample of an engine."""
    scraped_s: float | None = None
    for where, line in source.lines(notes):
        text = line.decode(errors="replace").strip()
        if text.startswith(_TIME):
            with notes.guard(where):
                scraped_s = seconds(_number(text.removeprefix(_TIME).strip()))
        if text.startswith("#") or not _OURS.search(line):
            continue
        notes.read += 1
        with notes.guard(where):
            match = _LINE.match(text)
            if match is None:
                raise DamagedError("is no sample: NAME{LABELS} VALUE [TIME] is expected")
            name, inner, value, time = match.groups()
            labels = dict(_LABEL.findall(inner or ""))
            name = (name or labels.get("__name__", "")).partition(":")[2]
            time_s = scraped_s if time is None else seconds(_number(time))
            if time_s is None:
                raise TraceError(f"{where}: {_NO_TIMES}")
            number = _number(value)
            if isfinite(number):
                yield where, name, labels, number, time_s


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DamagedError(f"{text[:40]!r} is no number") from None
