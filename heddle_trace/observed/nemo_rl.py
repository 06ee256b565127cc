"""NeMo-RL's Perfetto traces: the driver's timers, and a track for each sample of a rollout.

Source: NVIDIA-NeMo/RL#3879 and #3887: `nemo_rl/utils/trace.py` (events sorted by time; spans of
samples on tracks of the process `*_rollouts`) and the guide beside it; names of timers as in
`nemo_rl/algorithms/grpo.py`. The span of a reward is the step of the environment
(`calculate_rewards`), so it counts as a tool unless it ends the sample.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from heddle_trace.importers.generations import identifier
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.observed.chrome import ChromeSpan, chrome_spans, processes
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation, grouped
from heddle_trace.observed.schema import ObservedRequest, Phase, PhaseName

_DRIVER, _ROLLOUTS = "driver", "_rollouts"
_PHASES: Final[Mapping[str, PhaseName]] = {
    **dict.fromkeys(("policy_training", "training_prep", "value_training"), "training"),
    **dict.fromkeys(("logprob_inference_prep", "policy_and_reference_logprobs"), "training"),
    **dict.fromkeys(("prepare_for_generation", "prepare_for_generation/total"), "update"),
    "weight_sync": "update",
    "reward_calculation": "reward",
    "total_step_time": "step",
    **dict.fromkeys(("validation", "checkpointing"), "other"),
}
_STEP: Final = re.compile(r"step (\d+)")
_ANSWER: Final = re.compile("reward|env|tokeni")


class NemoRl(ObservedFormat):
    """A trajectory is a track of a sample."""

    one_file = True

    def recognises(self, head: Head) -> bool:
        """Trace events of a driver or of rollouts."""
        return any(name == _DRIVER or name.endswith(_ROLLOUTS) for name in processes(head))

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """Requests by turns, and phases of the driver."""
        phases: list[ParsedObservation] = []

        def samples() -> Iterator[tuple[str, str, ChromeSpan]]:
            for where, span in chrome_spans(sources[0], notes):
                if span.process.endswith(_ROLLOUTS):
                    yield span.track, where, span
                elif span.name in _PHASES:
                    name = _PHASES[span.name]
                    phase = Phase(phase=name, start_s=span.start_s, end_s=span.end_s)
                    phases.append(ParsedObservation(where, phase))

        for track, spans in grouped(ChromeSpan, samples()):
            with notes.guard(spans[0][0]):
                for request in _requests(track, [span for _, span in spans]):
                    yield ParsedObservation(spans[0][0], request)
        yield from phases


def _requests(track: str, spans: Sequence[ChromeSpan]) -> Iterator[ObservedRequest]:
    """Of a sample: what is before its first generation, and from each generation to the next."""
    whole = max(spans, key=lambda span: span.end_s - span.start_s)
    made = sorted((s for s in spans if "generat" in s.name), key=lambda span: span.start_s)
    if not made:
        raise DamagedError(f"track {track[:60]!r} has no generation")
    label, name = _STEP.search(track), identifier(track)
    rl_step = int(label[1]) if label else None
    begun = ObservedRequest(trajectory_id=name, step=0, rl_step=rl_step, start_s=whole.start_s)
    yield begun
    ends = [*(span.start_s for span in made[1:]), whole.end_s]
    for step, (span, end_s) in enumerate(zip(made, ends, strict=True)):
        answers = [
            each.end_s - each.start_s
            for each in spans
            if span.end_s - 1e-6 <= each.start_s < end_s and _ANSWER.search(each.name)
        ]
        last, waited_s = span is made[-1], sum(answers) if answers else None
        yield ObservedRequest(
            trajectory_id=name,
            step=step,
            rl_step=rl_step,
            start_s=span.start_s,
            end_s=end_s,
            llm_s=span.end_s - span.start_s,
            tool=None if last else "environment",
            tool_s=None if last else waited_s,
            reward_s=waited_s if last else None,
        )
