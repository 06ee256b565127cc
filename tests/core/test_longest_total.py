from heddle_core.parts.scheduler import LongestFirst, LongestTotal
from tests.core.ledgers import add_trajectory, ledger_of


def test_what_is_begun_keeps_its_place_before_what_is_not():
    ledger = ledger_of()
    begun = add_trajectory(ledger, "begun", output_tokens=6_000)
    fresh = add_trajectory(ledger, "fresh")
    total, rest = LongestTotal(), LongestFirst()
    assert total.priority(begun, 4_000.0) == 10_000.0
    assert total.priority(begun, 4_000.0) > total.priority(fresh, 9_000.0)
    assert rest.priority(begun, 4_000.0) < rest.priority(fresh, 9_000.0)
    assert not total.preemptive


def test_a_right_prediction_gives_the_same_key_at_every_step():
    t = add_trajectory(ledger_of(), "t")
    keys = []
    for made in (0, 500, 2_000, 9_999):
        t.output_tokens = made
        keys.append(LongestTotal().priority(t, 10_000.0 - made))
    assert keys == [10_000.0] * 4
