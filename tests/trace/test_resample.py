from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from heddle_trace import TraceError, read_trace, write_trace
from heddle_trace.resample import resample
from tests.trace.builders import call, record, step, trace


def rollout(sizes: list[int]):
    return trace(
        *(
            record(
                call(10 + sample),
                step(5),
                trajectory_id=f"g{group}/{sample}",
                group_id=f"g{group}",
                arrival_s=1.0 * sample,
            )
            for group, size in enumerate(sizes)
            for sample in range(size)
        )
    )


sizes = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@given(sizes, st.integers(1, 12), st.integers(1, 12), st.integers(0, 3))
def test_a_draw_has_groups_of_samples_and_says_what_it_repeats(sizes, groups, samples, seed):
    given_trace = rollout(sizes)
    drawn, report = resample(given_trace, groups=groups, samples=samples, seed=seed)
    members: dict[str, list[str]] = {}
    for r in drawn:
        members.setdefault(r.group_id, []).append(r.trajectory_id)
    assert len(members) == groups
    assert {len(group) for group in members.values()} == {samples}
    assert len({r.trajectory_id for r in drawn}) == len(drawn)

    originals = {r.trajectory_id: r for r in given_trace.records}
    sources = [r.trajectory_id.partition("~")[0] for r in drawn]
    for r, source in zip(drawn, sources, strict=True):
        # Samples stay with the group that they are samples of.
        assert r.group_id.partition("~")[0] == originals[source].group_id
        assert r.steps == originals[source].steps
        assert r.arrival_s is None
    uses = Counter(sources)
    assert report.distinct_trajectories == len(uses)
    assert report.repeated_trajectories == len(drawn) - len(uses)
    assert report.most_copies == max(uses.values())
    tasks = Counter(group.partition("~")[0] for group in members)
    assert report.distinct_groups == len(tasks)
    assert report.repeated_groups == groups - len(tasks)
    # Nothing is used twice before everything was used once.
    assert max(tasks.values()) - min(tasks.get(f"g{n}", 0) for n in range(len(sizes))) <= 1
    for group, ids in members.items():
        copies = Counter(name.partition("~")[0] for name in ids)
        size = sizes[int(group.partition("~")[0][1:])]
        assert max(copies.values()) - min(copies.values() if len(copies) == size else [0]) <= 1
    assert report.padded_groups == sum(
        samples > sizes[int(group.partition("~")[0][1:])] for group in members
    )


def test_equal_seeds_give_equal_draws_and_others_give_others():
    given_trace = rollout([5] * 20)
    first = resample(given_trace, groups=10, samples=3, seed=4)
    assert first == resample(given_trace, groups=10, samples=3, seed=4)
    assert first[0] != resample(given_trace, groups=10, samples=3, seed=5)[0]


def test_a_whole_trace_can_be_drawn_back_and_only_its_order_changes():
    given_trace = rollout([4] * 6)
    drawn, report = resample(given_trace, groups=6, samples=4, seed=1)
    assert {r.trajectory_id for r in drawn} == {r.trajectory_id for r in given_trace.records}
    assert (report.repeated_trajectories, report.padded_groups) == (0, 0)
    assert report.left_out_arrivals == 18


def test_a_draw_can_be_drawn_from_again(tmp_path):
    drawn, _ = resample(rollout([2]), groups=3, samples=4, seed=0)
    again, _ = resample(trace(*drawn), groups=9, samples=9, seed=0)
    write_trace(tmp_path / "t.jsonl", again)
    assert len(read_trace(tmp_path / "t.jsonl").records) == 81


def test_copies_of_long_names_have_names_that_fit(tmp_path):
    names = [f"{'x' * 999}{n}" for n in range(2)]
    given_trace = trace(*(record(step(5), trajectory_id=n, group_id="g" * 1_000) for n in names))
    drawn, _ = resample(given_trace, groups=3, samples=5, seed=0)
    write_trace(tmp_path / "t.jsonl", drawn)
    assert len(read_trace(tmp_path / "t.jsonl").records) == 15


@pytest.mark.parametrize(("groups", "samples"), [(0, 1), (1, 0)])
def test_a_draw_of_nothing_is_refused(groups, samples):
    with pytest.raises(TraceError, match="give numbers from 1"):
        resample(rollout([1]), groups=groups, samples=samples, seed=0)
