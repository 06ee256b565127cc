"""Which of many waiting trajectories a prompt continues: found by hashes as by comparing all."""

from array import array
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from heddle_core.ids import TrajectoryId
from heddle_gateway.agent import common_prefix
from heddle_gateway.continuation import BLOCK_TOKENS, Continuations

BRANCHES = st.lists(st.integers(0, 40 * BLOCK_TOKENS), min_size=1, max_size=6)


@dataclass
class Waiting:
    """A trajectory that waits, of which a reply is all its context: a prompt may go on with it."""

    id: TrajectoryId
    context_ids: "array[int]"
    prompt_tokens: int = 0
    last_prompt_tokens: int = 0

    @property
    def step(self) -> Any:
        return SimpleNamespace(tenant="")


def branches(lengths: list[int], own: int) -> "array[int]":
    """Tokens that are as those of every other, but from `lengths[own]` on."""
    shared = lengths[own]
    return array("i", [*range(shared), *([1000 + own] * (shared // 3 + 2 * BLOCK_TOKENS))])


def one_by_one(waiting: list[Waiting], prompt: "array[int]") -> Waiting | None:
    """Compare the prompt with every context, the newest first."""
    newest = list(reversed(waiting))
    whole = [w for w in newest if w.context_ids == prompt[: len(w.context_ids)]]
    if whole:
        return max(whole, key=lambda w: len(w.context_ids))
    best = max(newest, key=lambda w: common_prefix(w.context_ids, prompt))
    shared = common_prefix(best.context_ids, prompt)
    return best if BLOCK_TOKENS <= shared < len(prompt) else None


@given(BRANCHES, st.integers(0, 45 * BLOCK_TOKENS), st.integers(-1, 5), st.integers(0, 40))
def test_the_longest_shared_beginning_is_found(lengths, shared, like, further):
    waiting: list[Any] = [
        Waiting(TrajectoryId(f"t{i}"), branches(lengths, i)) for i in range(len(lengths))
    ]
    continuations = Continuations()
    for each in waiting:
        continuations.add(each)
    begins = branches(lengths, like) if 0 <= like < len(lengths) else array("i", range(700))
    prompt = begins[:shared] + array("i", [5000] * further)
    assert continuations.find(prompt) is one_by_one(waiting, prompt)


def test_a_beginning_of_any_number_of_blocks_is_found_in_the_context_that_shares_most():
    for blocks in range(1, 40):
        waiting: list[Any] = [
            Waiting(TrajectoryId(f"t{i}"), branches([shared * BLOCK_TOKENS], 0))
            for i, shared in enumerate((0, blocks // 2, blocks))
        ]
        continuations = Continuations()
        for each in waiting:
            continuations.add(each)
        prompt = array("i", range(blocks * BLOCK_TOKENS)) + array("i", [5000] * BLOCK_TOKENS)
        assert continuations.find(prompt) is waiting[-1]
