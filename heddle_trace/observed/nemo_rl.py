"""NeMo-RL's Perfetto traces: the driver's timers, and a track for each sample of a rollout.

Source: NVIDIA-NeMo/RL#3879 and #3887: `nemo_rl/utils/trace.py` (Chrome trace events sorted by
time; `B` and `E` on threads of the driver, `X` on tracks of the process `*_rollouts`) and the guide
beside it; names of timers as in `nemo_rl/algorithms/grpo.py`. The span of a reward is the step of
the environment (`calculate_rewards`), so it counts as a tool unless it ends the sample.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.generations import identifier, rl_step_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import head_objects, objects
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.observed.protocol import Observations, Placed
from heddle_trace.observed.schema import Clock, Phase, PhaseName, Request

_NESTED: Final = {"traceEvents": "traceEvents.item"}
_STEP: Final = "total_step_time"
_PHASES: Final[Mapping[str, PhaseName]] = {
    **dict.fromkeys(("policy_training", "training_prep", "value_training"), "training"),
    **dict.fromkeys(("logprob_inference_prep", "policy_and_reference_logprobs"), "training"),
    **dict.fromkeys(("prepare_for_generation", "prepare_for_generation/total"), "update"),
    **dict.fromkeys(
        ("weight_sync", "prepare_for_generation/transfer_and_update_weights"), "update"
    ),
    "reward_calculation": "reward",
    **dict.fromkeys(("validation", "checkpointing"), "other"),
    _STEP: "step",
}
_TRACK: Final = re.compile(r"step (\d+)")


class _Event(msgspec.Struct):
    ph: str
    pid: int | str
    tid: int | str = 0
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class _Span(msgspec.Struct, array_like=True):
    where: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


class NemoRl:
    """A trajectory is a track of a sample."""

    clock: Clock = "shared"
    one_file = True

    def recognises(self, head: Head) -> bool:
        """Trace events of a driver or of rollouts."""
        return any(
            raw.get("name") == "process_name" and _is_ours(raw.get("args"))
            for raw in head_objects(head, _NESTED)
            if raw.get("ph") == "M"
        )

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """Requests by turns, and phases of the driver."""
        tracks: dict[str, str] = {}
        rollouts: set[int | str] = set()
        open_spans: dict[tuple[int | str, int | str], list[_Event]] = {}
        with Sessions(_Span) as samples:
            for where, raw in objects(sources[0], notes, _NESTED):
                with notes.guard(where):
                    event = converted(raw, _Event)
                    track = f"{event.pid}/{event.tid}"
                    if event.ph == "M":
                        if event.name == "thread_name":
                            tracks[track] = str(event.args.get("name"))
                        elif event.name == "process_name" and _of_rollouts(event.args):
                            rollouts.add(event.pid)
                    elif event.ph == "X" and event.pid in rollouts:
                        start_s = event.ts / 1e6
                        end_s = start_s + event.dur / 1e6
                        samples.add(track, _Span(where, event.name, start_s, end_s, event.args))
                    elif event.ph in ("B", "E"):
                        for phase in _phases(event, open_spans):
                            yield Placed(where, phase)
            for track, spans in samples:
                with notes.guard(spans[0].where):
                    yield from _sample(identifier(tracks.get(track, track)), spans)


def _is_ours(args: Any) -> bool:
    return isinstance(args, dict) and (args.get("name") == "driver" or _of_rollouts(args))


def _of_rollouts(args: Mapping[str, Any]) -> bool:
    return str(args.get("name")).endswith("_rollouts")


def _phases(
    event: _Event, open_spans: dict[tuple[int | str, int | str], list[_Event]]
) -> Iterator[Phase]:
    """The phase that an event of the driver ends."""
    stack = open_spans.setdefault((event.pid, event.tid), [])
    if event.ph == "B":
        stack.append(event)
        return
    if not stack:
        raise DamagedError("ends a span that never began: the file lacks its first part")
    begun = stack.pop()
    if event.ts < begun.ts:
        raise DamagedError(f"span {begun.name!r} ends {(begun.ts - event.ts) / 1e6:g} s too early")
    if begun.name in _PHASES:
        yield Phase(
            phase=_PHASES[begun.name],
            start_s=begun.ts / 1e6,
            end_s=event.ts / 1e6,
            rl_step=rl_step_of(begun.args.get("step")),
        )


def _sample(name: str, spans: list[_Span]) -> Observations:
    """The requests of a sample: each from the end of the one before to its environment's answer."""
    whole = max(spans, key=lambda span: span.end_s - span.start_s)
    inner = sorted((s for s in spans if s is not whole), key=lambda span: span.start_s)
    generations = [span for span in inner if "generat" in span.name]
    if not generations:
        raise DamagedError(f"track {name!r} has no generation")
    label = _TRACK.search(name)
    rl_step = int(label[1]) if label else None
    ends = [span.start_s for span in generations[1:]] + [whole.end_s]
    yield Placed(
        whole.where,
        Request(
            trajectory_id=name,
            step=0,
            rl_step=rl_step,
            start_s=whole.start_s,
            end_s=generations[0].start_s,
        ),
    )
    for number, (made, end_s) in enumerate(zip(generations, ends, strict=True)):
        after = [
            span.end_s - span.start_s
            for span in inner
            if made.end_s - 1e-6 <= span.start_s < end_s
            and any(word in span.name for word in ("reward", "env", "tokeni"))
        ]
        last = number == len(generations) - 1
        yield Placed(
            made.where,
            Request(
                trajectory_id=name,
                step=number,
                rl_step=rl_step,
                start_s=made.start_s,
                end_s=end_s,
                llm_s=made.end_s - made.start_s,
                tool_s=sum(after) if after and not last else None,
                tool="environment" if after and not last else None,
                reward_s=sum(after) if after and last else None,
            ),
        )
