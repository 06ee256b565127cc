from dataclasses import replace

import pytest

from heddle_core.parts.planner import SharesPlan
from tests.core.policy_fakes import policy_context
from tests.core.shapes import h100


def degrees(*, gpus: int, tps: tuple[int, ...] = (1, 2, 4, 8)) -> list[int]:
    context = replace(policy_context(gpus=gpus), shape_choices=tuple(h100(tp) for tp in tps))
    return [e.shape.tp for e in SharesPlan(context).plan((), ()).engines]


@pytest.mark.parametrize(
    ("gpus", "tps", "planned"),
    [
        (8, (1, 2, 4, 8), [4, 2, 1, 1]),  # Libra's node
        (16, (1, 2, 4, 8), [4, 4, 2, 2, 1, 1, 1, 1]),
        (4, (1, 2, 4), [2, 1, 1]),
        (1, (1,), [1]),
        (8, (2, 4, 8), [4, 2, 2]),  # TP 1 cannot hold the model
        (8, (1, 2), [2, 2, 2, 1, 1]),  # no TP 4
        (6, (1, 2, 4, 8), [2, 2, 1, 1]),
        (7, (1, 2, 4, 8), [2, 2, 1, 1, 1]),
        (16, (8,), [8, 8]),
    ],
)
def test_half_of_the_gpus_at_tp_4_and_a_quarter_at_tp_2_and_tp_1_each(gpus, tps, planned):
    assert degrees(gpus=gpus, tps=tps) == planned


def test_a_given_mix_is_taken():
    context = replace(policy_context(gpus=8), mix=(h100(4), h100(4)))
    assert [e.shape.tp for e in SharesPlan(context).plan((), ()).engines] == [4, 4]


def test_gpus_that_cannot_all_be_used_are_refused():
    with pytest.raises(ValueError, match="leave 1 of 7 h100 GPUs over: take a multiple of 2"):
        degrees(gpus=7, tps=(2, 4))


def test_without_a_known_choice_the_shape_of_the_cluster_is_used():
    context = replace(policy_context(gpus=4, tp=2), shape_choices=())
    assert [e.shape.tp for e in SharesPlan(context).plan((), ()).engines] == [2, 2]


def test_gpus_of_a_class_without_engines_are_refused():
    context = replace(policy_context(), pools={"h100": 4, "h200": 4})
    with pytest.raises(ValueError, match="the 4 h100 GPUs and 4 h200 GPUs that there are"):
        SharesPlan(context)
