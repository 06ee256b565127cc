"""Metrics of vLLM and SGLang over time: Prometheus text, or what `promtool tsdb` exports.

Source: https://prometheus.io/docs/instrumenting/exposition_formats (a sample may end in a time, in
milliseconds; in OpenMetrics in seconds), `promtool tsdb dump` and `dump-openmetrics`; names as in
vLLM's `vllm/v1/metrics/loggers.py` and SGLang's `sglang:num_running_reqs` and `num_queue_reqs`.
Scrapes without times may follow one another, each after a comment `# TIME` with its Unix seconds.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Final, TypeAlias

from heddle_trace.errors import TraceError
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation, number_in
from heddle_trace.observed.schema import ObservedEngine

_LINE: Final = re.compile(r"([A-Za-z_:][\w:]*)?(?:\{(.*)\})?\s+(\S+)(?:\s+(\S+))?\s*$")
_LABEL: Final = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_OURS: Final = re.compile(rb"\b(?:vllm|sglang):")
_ENGINES: Final = ("instance", "pod", "engine", "engine_type", "dp_rank", "tp_rank")
"""Labels that name an engine."""
_HOSTS: Final = frozenset(_ENGINES[:2])
_SUMS: Final = ("queue_s", "prefill_s", "decode_s")
_COLUMNS: Final = ("running", "waiting", *_SUMS)
_KEYS: Final = {
    **dict.fromkeys(("num_requests_running", "num_running_reqs"), "running"),
    **dict.fromkeys(("num_requests_waiting", "num_queue_reqs"), "waiting"),
    **{f"request_{key[:-2]}_time_seconds_sum": key for key in _SUMS},
    "queue_time_seconds_sum": "queue_s",
}
_UNKNOWN: Final = (nan,) * len(_COLUMNS)
_NO_ENGINE: Final = "no label tells two engines apart: keep instance, or a file for each engine"
_NO_TIMES: Final = "has samples without times: write a line `# TIME SECONDS` before each scrape"


class Prometheus(ObservedFormat):
    """Engines alone: what trajectories did while no engine had a request is not recorded."""

    def recognises(self, head: Head) -> bool:
        """Samples of vLLM or SGLang, or comments about them."""
        return not head.rows and head.readable and bool(_OURS.search(head.start))

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A sample of an engine for each of its times."""
        for source in sources:
            engines: dict[str, dict[float, array[float]]] = defaultdict(dict)
            for where, name, labels, value, time_s in _samples(source, notes):
                found = [labels[label] for label in _ENGINES if label in labels]
                # vLLM numbers its own engines: in a file a server each has an engine 0.
                if not found or (len(sources) > 1 and not labels.keys() & _HOSTS):
                    found.insert(0, source.label)
                values = engines["/".join(found)].setdefault(time_s, array("d", _UNKNOWN))
                at = _COLUMNS.index(_KEYS[name])
                if not isnan(values[at]) and at < 2:
                    raise TraceError(f"{where}: a second {name} at one time, and {_NO_ENGINE}")
                values[at] = value if isnan(values[at]) else values[at] + value
            for engine, times in engines.items():
                for seen in _over_time(engine, times):
                    yield ParsedObservation(str(source.path), seen)


def _over_time(engine: str, times: Mapping[float, Sequence[float]]) -> Iterator[ObservedEngine]:
    """The samples of an engine; none of times at which it had no numbers of requests."""
    before: dict[str, float] = {}
    for time_s, values in sorted(times.items()):
        now = {key: v for key, v in zip(_COLUMNS, values, strict=True) if not isnan(v)}
        # A counter that falls was reset: its engine was started again.
        keys: list[str] = [key for key in _SUMS if key in now and key in before]
        more = {k: now[k] - before[k] if now[k] >= before[k] else now[k] for k in keys}
        before |= now
        if "running" in now:
            more |= {"running": now["running"], "waiting": now.get("waiting", 0.0)}
            yield ObservedEngine(engine=engine, time_s=time_s, **more)


_Sample: TypeAlias = tuple[str, str, dict[str, str], float, float]


def _samples(source: SourceFile, notes: Notes) -> Iterator[_Sample]:
    """Place, name without its system, labels, value and Unix time of each sample of an engine."""
    scraped_s: float | None = None
    for where, line in source.lines(notes):
        text = line.decode(errors="replace").strip()
        with notes.guard(where):
            if text.startswith("# TIME"):
                scraped_s = seconds(number_in(text[6:]))
            if text.startswith("#") or not _OURS.search(line):
                continue
            notes.read += 1
            match = _LINE.match(text)
            if match is None:
                raise DamagedError("is no sample: NAME{LABELS} VALUE [TIME] is expected")
            name, inner, value, time = match.groups()
            labels = dict(_LABEL.findall(inner or ""))
            name = (name or labels.get("__name__", "")).partition(":")[2]
            time_s = scraped_s if time is None else seconds(number_in(time))
            if time_s is None:
                raise TraceError(f"{where}: {_NO_TIMES}")
            if name in _KEYS and isfinite(number := number_in(value)):
                yield where, name, labels, number, time_s
