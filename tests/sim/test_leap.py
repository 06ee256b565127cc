"""Leaps of a decoding batch, against its iterations one by one."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.ids import GroupId, TrajectoryId
from heddle_sim.leap import DecodeBatch
from heddle_sim.request import Context, Request

BLOCK = 16
BASE_S = [0.0, *(0.01 + 0.001 * batch for batch in range(1, 9))]
requests = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(2, 400)), min_size=1, max_size=len(BASE_S) - 1
)


def batch_of(lengths: list[tuple[int, int]], per_context_s: float) -> DecodeBatch:
    """A batch of (prompt, output) tokens, each after its first token."""
    batch = DecodeBatch(BASE_S, [per_context_s] * len(BASE_S), BLOCK)
    for number, (prompt, output) in enumerate(lengths):
        request = Request(
            Context(TrajectoryId(f"t{number}")),
            GroupId("g"),
            prompt_tokens=prompt,
            shared_tokens=0,
            output_tokens=output,
            started_s=0.0,
        )
        request.made_tokens = 1
        batch.join(request)
    return batch


@given(requests, st.sampled_from([0.0, 1e-7, 3e-6]))
def test_a_leap_takes_as_long_as_its_iterations(lengths, per_context_s):
    batch = batch_of(lengths, per_context_s)
    iterations, seconds = batch.leap(1 << 40)
    assert iterations == min(output for _, output in lengths) - 1
    each_s = []
    for _ in range(iterations):
        each_s.append(batch.iteration_s())
        batch.advance(1)
    ends_s = list(accumulate(each_s))
    assert seconds == pytest.approx(ends_s[-1])
    for k, end_s in enumerate(ends_s, 1):
        assert batch.elapsed_s(k) == pytest.approx(end_s)
        # The moment at which an iteration ends belongs to it, the next one to the next.
        assert batch.begun(batch.elapsed_s(k)) == k
        assert batch.begun(batch.elapsed_s(k) * (1 + 1e-9)) == k + 1


@given(requests, st.integers(0, 200), st.integers(0, 40))
def test_a_leap_takes_no_more_blocks_than_are_free(lengths, free, before):
    batch = batch_of(lengths, 0.0)
    left = min(output for _, output in lengths) - 1
    before = min(before, left - 1)
    batch.advance(before)
    free = max(free, batch.blocks_due(1))
    iterations, _ = batch.leap(free)
    taken = [batch.blocks_due(k) for k in (iterations, iterations + 1)]
    assert taken[0] <= free
    assert taken[1] > free or iterations == left - before
    with_kv = [prompt + before for prompt, _ in lengths]
    needed = sum(-(-(n + iterations) // BLOCK) - -(-n // BLOCK) for n in with_kv)
    assert taken[0] == needed
