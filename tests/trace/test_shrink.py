"""Fewer tokens, the same trajectory."""

import pytest

from heddle_trace import MissingRules, Trace, TraceError, complete, synth
from heddle_trace.shrink import shrunk

RECORDS = synth("coding", 16, 3)


def test_tokens_shrink_and_all_else_stays():
    for record in RECORDS:
        less = shrunk(record, 6)
        assert less.trajectory_id == record.trajectory_id
        assert [(s.tool, s.tool_s, s.tool_ok) for s in less.steps] == [
            (s.tool, s.tool_s, s.tool_ok) for s in record.steps
        ]
        for small, large in zip(less.steps, record.steps, strict=True):
            assert small.output_tokens == max(1, round(large.output_tokens / 6))
            assert (small.tool_tokens == 0) == (large.tool_tokens == 0)


def test_a_shrunk_trace_replays_without_any_rule():
    scripts, report = complete(
        Trace("t", tuple(shrunk(r, 8.5) for r in RECORDS), ""), rules=MissingRules(), seed=0
    )
    assert len(scripts) == 16
    assert report.assumptions == ()


def test_by_one_nothing_changes():
    assert [shrunk(r, 1) for r in RECORDS] == list(RECORDS)


@pytest.mark.parametrize("factor", [0.0, -1.0, 0.99, float("nan")])
def test_a_factor_that_would_grow_it_is_refused(factor):
    with pytest.raises(TraceError, match="shrink"):
        shrunk(RECORDS[0], factor)
