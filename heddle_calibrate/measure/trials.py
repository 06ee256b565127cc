"""From samples of steps to trials: seconds per iteration of the measured part.

Steps requested together need not begin together: a message may reach the engine one iteration late.
So the time of a batch is that of the last step to begin, and its size is the mean during that time.
"""

from collections.abc import Sequence

from heddle_calibrate.measure.cells import DecodeCell, PrefillCell
from heddle_calibrate.measure.probe import StepSample
from heddle_calibrate.sweeps import DecodeTrial, LoopStep, LoopTrial, PrefillTrial
from heddle_trace.schema import TrajectoryScript

TOGETHER = 0.1
"""First tokens that are further apart than this part of a prefill come from two iterations."""


def decode_trial(
    samples: Sequence[StepSample], cell: DecodeCell, *, order: int, tp: int
) -> DecodeTrial | None:
    """Seconds per iteration of a batch of equal steps; None after a preemption by the engine."""
    if any(each.end.recomputes for each in samples):
        return None
    last = max(samples, key=lambda each: each.first_token_s)
    iterations = last.end.tokens - 1
    if iterations < 1 or last.end.decode_s <= 0.0:
        return None
    batch = sum(_share(each, last.first_token_s, last.last_token_s) for each in samples)
    # In its k-th iteration after the first token a step attends to k tokens beyond its prompt.
    context = cell.context + (iterations + 1) / 2
    return DecodeTrial(
        order=order,
        tp=tp,
        held_out=cell.held_out,
        batch=cell.batch,
        context=cell.context,
        step_s=last.end.decode_s / iterations,
        mean_batch=batch,
        mean_context=batch * context,
    )


def prefill_trials(
    joined: Sequence[Sequence[StepSample]],
    beside: Sequence[StepSample],
    cell: PrefillCell,
    *,
    order: int,
    tp: int,
) -> list[PrefillTrial]:
    """The groups of prompts that were computed together while the whole batch decoded."""
    if any(
        each.end.recomputes for each in (*beside, *(each for group in joined for each in group))
    ):
        return []
    begun_s = max((each.first_token_s for each in beside), default=float("-inf"))
    ended_s = min((each.last_token_s for each in beside), default=float("inf"))
    trials = []
    for group in joined:
        first = min(group, key=lambda each: each.first_token_s)
        admitted_s = first.sent_s + first.end.queued_s
        prefill_s = first.end.prefill_s
        apart_s = max(each.first_token_s for each in group) - first.first_token_s
        alike = len(dict.fromkeys(each.end.cached_tokens for each in group)) == 1
        if apart_s > TOGETHER * prefill_s or not alike or prefill_s <= 0.0:
            continue
        if admitted_s < begun_s or first.first_token_s > ended_s:
            continue
        trials.append(
            PrefillTrial(
                order=order,
                tp=tp,
                held_out=cell.held_out,
                batch=cell.batch,
                mean_context=sum(_context(b, cell.context, admitted_s) for b in beside),
                together=cell.together,
                prompt=cell.prompt,
                cached=first.end.cached_tokens,
                prefill_s=prefill_s,
                queued_s=first.end.queued_s,
                wall_s=first.reported_s - first.sent_s,
            )
        )
    return trials


def loop_trial(
    scripts: Sequence[TrajectoryScript],
    samples: Sequence[Sequence[StepSample]],
    *,
    order: int,
    tp: int,
) -> LoopTrial:
    """The times that the clients of a loop measured."""
    steps = [each for client in samples for each in client]
    begun_s = min(each.sent_s for each in steps)
    return LoopTrial(
        order=order,
        tp=tp,
        clients=tuple(
            tuple(LoopStep(prompt=s.prompt_tokens, output=s.output_tokens) for s in script.steps)
            for script in scripts
        ),
        makespan_s=max(each.reported_s for each in steps) - begun_s,
        ttft_s=sum(each.end.queued_s + each.end.prefill_s for each in steps) / len(steps),
        tpot_s=sum(each.end.decode_s / max(1, each.end.tokens - 1) for each in steps) / len(steps),
    )


def _share(each: StepSample, begin_s: float, end_s: float) -> float:
    """The part of a window in which a step decoded."""
    both_s = min(each.last_token_s, end_s) - max(each.first_token_s, begin_s)
    return max(0.0, both_s) / (end_s - begin_s)


def _context(each: StepSample, prompt: int, now_s: float) -> float:
    """Tokens that a step attended to at a moment, if it makes them evenly."""
    if each.end.decode_s <= 0.0:
        return prompt + 1.0
    done = min(1.0, max(0.0, (now_s - each.first_token_s) / each.end.decode_s))
    return prompt + 1.0 + done * (each.end.tokens - 1)
