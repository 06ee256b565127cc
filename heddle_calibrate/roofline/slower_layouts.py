"""Layouts that take longer on a GPU class than on a lesser one, which the data sheets do not
explain."""

from collections.abc import Iterable
from dataclasses import replace

from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_sim.profile_files import Profile, read_layout

BATCHES, CONTEXT, PROMPT = (1, 64), 4096, 2048
"""Iterations that are compared."""
NOTABLE = 0.05
"""A smaller share is within the errors of the fits."""


def lesser(one: str, other: str) -> bool:
    """Whether a class is better than another in no figure of its data sheet, and worse in some."""
    a, b = GPU_CLASSES.get(one), GPU_CLASSES.get(other)
    if a is None or b is None:
        return False
    figures = [(x.bf16_flops, x.fp8_flops, x.bandwidth, float(x.memory), x.link) for x in (a, b)]
    return figures[0] != figures[1] and all(x <= y for x, y in zip(*figures, strict=True))


def slower_layouts(profile: Profile, others: Iterable[Profile]) -> dict[str, dict[str, float]]:
    """Return how much longer iterations take than on lesser classes, as a share of their time
    there, by class and layout; the largest over `BATCHES` and a prompt alone.
    """
    found: dict[str, dict[str, float]] = {}
    for other in others:
        if not lesser(other.gpu, profile.gpu):
            continue
        for name in profile.tables:
            if name not in other.tables:
                continue
            pairs = zip(shown_seconds(profile, name), shown_seconds(other, name), strict=True)
            more = max(here / there for here, there in pairs) - 1
            if more > NOTABLE:
                found.setdefault(other.gpu, {})[name] = more
    return found


def shown_seconds(profile: Profile, layout: str) -> list[float]:
    """Times of a decode step at each of `BATCHES` (of each rank), and of a prompt alone."""
    tp, dp, ep = read_layout(layout)
    laid_out = replace(profile, expert_parallel=ep > 1, attention_dp=dp)
    table = laid_out.table(tp, max_batch=max(BATCHES) * dp)
    steps = [table.base_s[b * dp] + table.per_context_s[b * dp] * b * dp * CONTEXT for b in BATCHES]
    prompt_s = table.prefill_s(PROMPT, PROMPT**2 / 2)
    return [*steps, table.base_s[0] + table.host_per_prefill_s + prompt_s]
