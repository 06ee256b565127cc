"""slime's traces of samples: the JSON that its timeline viewer makes of a rollout's dump.

Source: THUDM/slime, `tools/trace_timeline_viewer.py` (`*.trace_timeline_cache.json`: a row a
sample, with spans as items), `slime/utils/trace_utils.py` (times are Unix seconds; attributes of
`sglang_generate`) and `slime/rollout/sglang_rollout.py` (`reward_model`).
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from heddle_trace.importers.generations import identifier
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.limits import Tokens
from heddle_trace.observed.core import (
    Observations,
    ObservedFormat,
    ParsedObservation,
    TimedGeneration,
    requests_of_generations,
)
from heddle_trace.observed.schema import ObservedRequest

_Counts: TypeAlias = dict[str, Tokens | None]
_COUNTS: Final = (
    ("input_tokens", "prompt_tokens"),
    ("cached_tokens", "cached_tokens"),
    ("output_tokens", "completion_tokens"),
)
_ROLLOUT: Final = re.compile(r"rollout_(\d{1,7})\D")


class _Item(msgspec.Struct):
    name: str
    state: str = ""
    start_ts: float | None = None
    end_ts: float | None = None
    attrs: dict[str, Any] = msgspec.field(default_factory=dict)


class _Sample(msgspec.Struct):
    items: list[_Item]
    sample_index: int | str | None = None
    group_index: int | str | None = None
    trace_id: str | None = None


class SlimeTrace(ObservedFormat):
    """A trajectory is a sample; the time to its next generation is its tools'."""

    def recognises(self, head: Head) -> bool:
        """A cache of the viewer."""
        return head.has("cache_version", "pt_path", "rows")

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request a generation."""
        for source in sources:
            label = _ROLLOUT.search(source.path.name)
            rl_step = int(label[1]) if label else None
            for where, row in source.items(notes, "rows.item", _Sample):
                with notes.guard(where):
                    for request in _requests(row, source.label, rl_step):
                        yield ParsedObservation(where, request)


def _requests(row: _Sample, label: str, rl_step: int | None) -> Iterator[ObservedRequest]:
    made, scored_s = [], 0.0
    for item in row.items:
        if item.state != "closed_span" or item.start_ts is None or item.end_ts is None:
            continue
        if item.name == "reward_model":
            scored_s += item.end_ts - item.start_ts
        elif item.name.endswith("_generate"):
            found = converted(item.attrs.get("end_attrs") or {}, dict[str, Any])
            counts = converted({key: found.get(name) for key, name in _COUNTS}, _Counts)
            made.append(TimedGeneration(item.start_ts, item.end_ts, counts))
    group = None if row.group_index is None else identifier(f"{rl_step}/{row.group_index}")
    name = f"{label}/{row.sample_index if row.trace_id is None else row.trace_id}"
    return requests_of_generations(made, name, scored_s=scored_s, group_id=group, rl_step=rl_step)
