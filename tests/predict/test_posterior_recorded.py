"""The posterior on a recorded trace: one half of the groups is history, the other a rollout."""

from pathlib import Path

import numpy as np
import pytest

from heddle_core.parts.predictor import PosteriorPredictor
from heddle_predict.play import Pace, play, total_tokens
from heddle_trace import MissingRules, complete, read_trace
from heddle_trace.history import history_of

TRACE = Path(__file__).resolve().parents[2].parent / "shared/traces/hotpotqa_react.jsonl.gz"
LEVELS = (0.5, 0.9, 0.95)


class Asking:
    """Counts whether totals lie at or below quantiles, when a tool starts or a step is queued."""

    def __init__(self, predictor, totals):
        self.predictor, self.totals = predictor, totals
        self.observe_step = predictor.observe_step
        self.observe_tool = predictor.observe_tool
        self.observe_finish = predictor.observe_finish
        self.hits = []

    def on_question(self, t, index, moment):
        rest = self.totals[index] - t.output_tokens
        self.hits.append(rest <= np.array(self.predictor.remaining_quantiles(t, LEVELS)))


@pytest.mark.skipif(not TRACE.is_file(), reason="the recorded traces are not there")
def test_recorded_lengths_are_covered():
    rules = MissingRules(
        tool_s="zero", tool_tokens="zero", prompt_tokens="zero", output_tokens="sample"
    )
    scripts, _ = complete(read_trace(TRACE), rules=rules, seed=1)
    groups = sorted({script.group for script in scripts})
    past = set(np.random.default_rng(7).permutation(groups)[: len(groups) // 2].tolist())
    coming = [script for script in scripts if script.group not in past]
    history = history_of([script for script in scripts if script.group in past])
    asking = Asking(PosteriorPredictor(history), [total_tokens(script) for script in coming])
    play(coming, Pace(slots=0.5), asking, asking.on_question)
    assert np.mean(asking.hits, axis=0) == pytest.approx(np.array(LEVELS), abs=0.1)
    assert np.mean(asking.hits, axis=0)[-1] >= 0.9
