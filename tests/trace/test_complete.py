from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from heddle_trace import MissingRules, TraceError, complete, open_gaps, shuffled, synth
from heddle_trace.complete import USER
from heddle_trace.typical import typical_seconds
from tests.trace.builders import call, record, step, trace

SAMPLE = MissingRules(
    tool_s="sample", tool_tokens="sample", prompt_tokens="sample", output_tokens="sample"
)
ZERO = MissingRules(tool_s="zero", tool_tokens="zero", prompt_tokens="zero")


def only(made, rules=MissingRules(), seed=0):  # noqa: B008 -- frozen
    (script,), report = complete(trace(made), rules=rules, seed=seed)
    return script, report


def test_a_full_record_needs_no_filling_and_its_context_is_the_running_sum():
    script, report = only(
        record(call(10, tool_tokens=20), call(30, tool_tokens=5, tool_ok=False), step(7))
    )
    assert [s.prompt_tokens for s in script.steps] == [100, 130, 165]
    assert [s.shared_tokens for s in script.steps] == [0, 110, 160]
    assert [s.output_tokens for s in script.steps] == [10, 30, 7]
    assert [(s.tool, s.tool_s, s.tool_ok) for s in script.steps] == [
        ("bash", 0.5, True),
        ("bash", 0.5, False),
        (None, 0.0, None),
    ]
    assert (script.id, script.group, script.task) == ("t", "g", "coding")
    assert (script.arrival_s, script.truncated) == (0.0, False)
    assert all(fill.missing == 0 for fill in report.fields.values())
    assert report.assumptions == ()


def test_arrival_and_truncation_come_from_the_record():
    script, _ = only(record(arrival_s=4.5, truncated=True))
    assert (script.arrival_s, script.truncated) == (4.5, True)


def test_gaps_are_refused_by_default_all_fields_at_once_with_their_keys():
    made = trace(
        record(call(None, tool_s=None, tool_tokens=None), step(), prompt_tokens=None),
        record(call(tool_s=3.0), step(), trajectory_id="u"),
    )
    with pytest.raises(TraceError) as refused:
        complete(made, rules=MissingRules(), seed=0)
    message = str(refused.value)
    assert "tool_s in 1 places (first: 't', step 0)" in message
    for name in ("tool_s", "tool_tokens", "prompt_tokens", "output_tokens"):
        assert f"--set missing.{name}=sample" in message
    assert open_gaps(made) == {
        "tool_s": 1,
        "tool_tokens": 1,
        "prompt_tokens": 1,
        "output_tokens": 1,
    }


def test_where_nothing_is_recorded_the_refusal_does_not_advise_sampling():
    made = trace(record(call(tool_s=None, tool_tokens=None), step()))
    with pytest.raises(TraceError) as refused:
        complete(made, rules=MissingRules(), seed=0)
    proposed = "--set missing.tool_s=typical --set missing.tool_tokens=zero"
    assert str(refused.value).endswith(proposed)


def test_zero_is_zero_only_on_request_and_is_counted():
    script, report = only(
        record(call(tool_s=None, tool_tokens=None), step(), prompt_tokens=None), ZERO
    )
    assert script.steps[0].tool_s == 0.0
    assert script.steps[0].tool_tokens == 0
    assert script.steps[0].prompt_tokens == 1  # an engine cannot run on nothing
    assert report.raised_prompt_tokens == 1
    assert report.fields["tool_s"].zeroed == 1
    assert "1 missing tool_s taken as 0" in report.assumptions


def test_sampled_waits_come_from_the_same_tool():
    known = [record(call(tool="a", tool_s=s), trajectory_id=f"a{s}") for s in (1.0, 2.0, 3.0)]
    known += [record(call(tool="b", tool_s=50.0), trajectory_id="b")]
    gaps = [record(call(tool="a", tool_s=None), trajectory_id=f"gap{i}") for i in range(40)]
    scripts, report = complete(trace(*known, *gaps), rules=SAMPLE, seed=1)
    drawn = {script.steps[0].tool_s for script in scripts[4:]}
    assert drawn == {1.0, 2.0, 3.0}
    assert report.fields["tool_s"].sampled == report.fields["tool_s"].missing == 40


def test_an_unrecorded_tool_falls_back_on_other_tools_but_never_on_people():
    made = trace(
        record(call(tool="a", tool_s=2.0), trajectory_id="a"),
        record(call(tool=USER, tool_s=900.0), trajectory_id="u"),
        *(record(call(tool="b", tool_s=None), trajectory_id=f"b{i}") for i in range(20)),
    )
    scripts, _ = complete(made, rules=SAMPLE, seed=1)
    assert {script.steps[0].tool_s for script in scripts[2:]} == {2.0}


def test_peoples_delays_are_not_drawn_from_tools():
    made = trace(
        record(call(tool="a", tool_s=2.0), trajectory_id="a"),
        record(call(tool=USER, tool_s=None), trajectory_id="u"),
    )
    with pytest.raises(TraceError, match="nothing is recorded to sample from, for tool user"):
        complete(made, rules=SAMPLE, seed=1)


def test_sampling_from_nothing_says_so():
    with pytest.raises(TraceError, match="use another rule for missing tool_s"):
        only(record(call(tool_s=None)), SAMPLE)


def waits_of(tools, rule, seed=1):
    made = [record(call(tool=t, tool_s=None), trajectory_id=f"t{i}") for i, t in enumerate(tools)]
    scripts, report = complete(trace(*made), rules=MissingRules(tool_s=rule), seed=seed)
    return [script.steps[0].tool_s for script in scripts], report


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        ("Bash", "shell"),
        ("execute_ipython_cell", "python"),
        ("run_tests", "tests"),
        ("mcp__docs__web_search", "search"),
        ("browser_click", "browser"),
        ("str_replace_editor", "edit"),
        (USER, "user"),
        ("llm_judge", "judge"),
        ("get_user_details", "other"),
    ],
)
def test_typical_waits_are_those_of_the_kind_that_the_name_shows(tool, kind):
    waits, report = waits_of([tool] * 2000, "typical")
    shipped = typical_seconds()[kind]
    inside = [level for level in shipped.levels if 0.05 < level < 0.95]
    for level in inside:
        expected = shipped.seconds[shipped.levels.index(level)]
        share = sum(wait <= expected for wait in waits) / len(waits)
        assert share == pytest.approx(level, abs=0.05)
    assert min(waits) >= shipped.seconds[0]
    assert max(waits) <= shipped.seconds[-1]
    assert report.fields["tool_s"].typical == report.fields["tool_s"].drawn == 2000
    assert f"2,000 missing tool_s drawn from typical ones of {kind} (seed 1)" in report.assumptions
    assert waits_of([tool] * 9, "typical")[0] != waits_of([tool] * 9, "typical", seed=2)[0]


def test_parallel_tools_take_as_long_as_the_longest():
    alone, _ = waits_of(["Bash"] * 500, "typical")
    both, _ = waits_of(["Bash+run_tests"] * 500, "typical")
    assert sum(both) > sum(alone)
    assert waits_of(["a+b"], "a=1,b=3")[0] == [3.0]


def test_seconds_may_be_stated_for_all_tools_for_some_and_for_kinds():
    tools = ["bash", "web_search", "Grep", "x+bash"]
    waits, report = waits_of(tools, "bash=2,search=1.4,0.5")
    assert waits == [2.0, 1.4, 0.5, 2.0]
    assert report.fields["tool_s"].constant == report.fields["tool_s"].filled == 4
    assert waits_of(tools, "1.5")[0] == [1.5] * 4
    assert waits_of(tools, "bash=2,zero")[0] == [2.0, 0.0, 0.0, 0.0]
    with pytest.raises(TraceError, match=r"tool_s in 2 places \(first: 't2', step 0\)"):
        waits_of(tools, "bash=2,search=1.4")


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("often", "'often' is no rule; write error, zero, sample, typical, seconds such as 1.5"),
        ("bash=2,bash=3", "names 'bash' twice"),
        ("=3", "names no tool"),
        ("1,typical", "'typical' is a second rule for all tools"),
        ("bash=-1", "'-1' is not from 0 to 2,592,000 seconds"),
        ("nan", "'nan' is not from 0"),
        ("", "'' is no rule"),
    ],
)
def test_what_is_no_rule_for_tools_is_refused(rule, fault):
    with pytest.raises(TraceError, match=fault):
        MissingRules(tool_s=rule)


def test_a_rule_that_names_a_tool_that_the_trace_lacks_is_refused():
    with pytest.raises(TraceError, match="'bsah': the trace has no such tool"):
        waits_of(["bash"], "bsah=2,typical")


def test_the_samples_of_a_group_share_a_drawn_prompt():
    known = [record(trajectory_id=f"k{n}", group_id=f"k{n}", prompt_tokens=n) for n in range(50)]
    gaps = [
        record(trajectory_id=f"g{g}-{i}", group_id=f"g{g}", prompt_tokens=None)
        for g in range(10)
        for i in range(4)
    ]
    other = record(trajectory_id="o", group_id="o", workload="math", prompt_tokens=9_999)
    scripts, report = complete(trace(*known, other, *gaps), rules=SAMPLE, seed=3)
    prompts = {s.group: {m.steps[0].prompt_tokens for m in scripts if m.group == s.group}
               for s in scripts[51:]}  # fmt: skip
    assert all(len(drawn) == 1 and max(drawn) < 50 for drawn in prompts.values())
    assert len(set.union(*prompts.values())) > 3
    assert report.fields["prompt_tokens"].sampled == 40


def test_a_known_prompt_of_the_group_comes_before_the_workload():
    made = trace(
        record(trajectory_id="x", group_id="other", prompt_tokens=7),
        record(trajectory_id="a", prompt_tokens=500),
        record(trajectory_id="b", prompt_tokens=None),
    )
    scripts, _ = complete(made, rules=SAMPLE, seed=0)
    assert scripts[2].steps[0].prompt_tokens == 500


def test_input_tokens_give_prompts_and_missing_tool_tokens():
    script, report = only(
        record(
            call(10, tool_tokens=None, input_tokens=200),
            call(10, tool_tokens=None, input_tokens=260),
            call(10, tool_tokens=None, input_tokens=120, cached_tokens=64),
            step(5),
            prompt_tokens=None,
        ),
        MissingRules(tool_tokens="zero"),
    )
    assert [s.prompt_tokens for s in script.steps] == [200, 260, 120, 130]
    assert [s.tool_tokens for s in script.steps] == [50, 0, 0, 0]
    # After a compaction only what the source saw repeated is shared.
    assert [s.shared_tokens for s in script.steps] == [0, 210, 64, 130]
    assert report.fields["prompt_tokens"].derived == 1
    assert report.fields["tool_tokens"].derived == 2
    assert report.fields["tool_tokens"].zeroed == 1


def test_cache_misses_of_the_source_are_not_ours():
    script, _ = only(record(call(10, tool_tokens=20), step(5, input_tokens=130, cached_tokens=0)))
    assert script.steps[1].shared_tokens == 110


def test_the_last_tools_tokens_do_not_matter_but_its_time_does():
    script, report = only(record(call(tool_tokens=None, tool_s=8.0)))
    assert (script.steps[0].tool_tokens, script.steps[0].tool_s) == (0, 8.0)
    assert report.fields["tool_tokens"].missing == 0
    with pytest.raises(TraceError, match="tool_s in 1 places"):
        only(record(call(tool_s=None)))


def test_where_nothing_ran_nothing_is_missing():
    script, report = only(record(step(5), step(6, tool_tokens=40), step(1)))
    assert [(s.tool, s.tool_s, s.tool_tokens) for s in script.steps] == [
        (None, 0.0, 0),
        (None, 0.0, 40),
        (None, 0.0, 0),
    ]
    assert all(fill.missing == 0 for fill in report.fields.values())


def test_a_wait_without_a_name_is_kept():
    script, _ = only(record(step(5, tool_s=2.0), step()))
    assert (script.steps[0].tool, script.steps[0].tool_s) == ("unspecified", 2.0)


def test_outputs_are_sampled_but_never_zero():
    scripts, report = complete(
        trace(record(call(0), step(7)), record(call(None), step(7), trajectory_id="u")),
        rules=SAMPLE,
        seed=0,
    )
    assert scripts[0].steps[0].output_tokens == 1
    assert scripts[1].steps[0].output_tokens == 1  # drawn from the one recorded call: 0, raised
    assert report.fields["output_tokens"].sampled == 1
    assert report.raised_output_tokens == 2


def test_long_waits_are_cut_and_counted():
    script, report = only(
        record(call(tool_s=7.0), call(tool_s=3.0), step()), MissingRules(cap_tool_s=5.0)
    )
    assert [s.tool_s for s in script.steps] == [5.0, 3.0, 0.0]
    assert report.capped_tool_s == 1
    assert report.assumptions == ("1 tool waits cut at 5 s",)


@pytest.mark.parametrize(
    "fields",
    [
        {"output_tokens": "zero"},
        {"tool_s": "guess"},
        {"cap_tool_s": 0.0},
        {"cap_tool_s": float("nan")},
        {"cap_tool_s": float("inf")},
    ],
)
def test_rules_that_make_no_sense_are_refused(fields):
    with pytest.raises(TraceError):
        MissingRules(**fields)


numbers = st.none() | st.integers(0, 1_000)
anything = st.lists(
    st.lists(
        st.builds(
            step,
            numbers,
            tool=st.sampled_from([None, "a", "b", USER]),
            tool_s=st.none() | st.floats(0, 100),
            tool_tokens=numbers,
            input_tokens=numbers,
            cached_tokens=numbers,
        ),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


@given(rollout=anything, seed=st.integers(0, 2**40))
def test_scripts_are_always_replayable_and_seeded(rollout, seed):
    full = record(  # so that every gap has something to draw from
        call(tool="a"), call(tool=USER), step(), trajectory_id="full", group_id="full"
    )
    made = [
        record(*steps, trajectory_id=f"t{i}", prompt_tokens=None if i % 2 else 9)
        for i, steps in enumerate(rollout)
    ]
    rolled = trace(full, *made)
    scripts, report = complete(rolled, rules=SAMPLE, seed=seed)
    assert complete(rolled, rules=SAMPLE, seed=seed) == (scripts, report)
    for script, source in zip(scripts, rolled.records, strict=True):
        assert len(script.steps) == len(source.steps)
        end = 0
        for made_step, given_step in zip(script.steps, source.steps, strict=True):
            assert made_step.output_tokens >= 1
            assert 0 <= made_step.shared_tokens <= min(end, made_step.prompt_tokens)
            assert made_step.prompt_tokens >= 1
            assert made_step.tool_s >= 0.0
            assert made_step.tool is not None or made_step.tool_s == 0.0
            if given_step.tool is not None and given_step.tool_s is not None:
                assert made_step.tool_s == given_step.tool_s
            end = made_step.prompt_tokens + made_step.output_tokens
    for fill in report.fields.values():
        assert fill.missing == fill.derived + fill.sampled
        assert fill.zeroed == 0


def test_a_rule_for_one_field_does_not_move_the_draws_of_another():
    known = [record(call(tool_s=float(i), tool_tokens=i), trajectory_id=f"{i}") for i in range(9)]
    gaps = [
        record(call(tool_s=None, tool_tokens=None), step(), trajectory_id=f"g{i}") for i in range(9)
    ]
    made = trace(*known, *gaps)
    both, _ = complete(made, rules=SAMPLE, seed=5)
    one, _ = complete(made, rules=MissingRules(tool_s="sample", tool_tokens="zero"), seed=5)
    other, _ = complete(made, rules=SAMPLE, seed=6)

    def waits(scripts):
        return [script.steps[0].tool_s for script in scripts]

    assert waits(both) == waits(one)
    assert waits(both) != waits(other)


def test_shuffling_moves_groups_whole_and_seed_zero_moves_nothing():
    scripts, _ = complete(
        trace(*synth("search", 40, 1, samples_per_group=4)), rules=MissingRules(), seed=0
    )
    assert shuffled(scripts, 0) == scripts
    assert shuffled(scripts, 5) == shuffled(scripts, 5)
    assert shuffled(scripts, 5) != shuffled(scripts, 6)
    mixed = shuffled(scripts, 5)
    assert Counter(s.id for s in mixed) == Counter(s.id for s in scripts)
    for start in range(0, 40, 4):
        members = mixed[start : start + 4]
        assert [m.id for m in members] == [s.id for s in scripts if s.group == members[0].group]
