from dataclasses import replace

from heddle_core.ids import EngineId
from heddle_core.parts.migration import Carry
from tests.core.ledgers import add_trajectory, ledger_of, policy_context


def test_kv_is_carried_where_its_transfer_takes_less_than_its_prefill():
    # 0.1 s and 1e-6 s a token against 5e-5 s a token at TP 1, 1.25e-5 s at TP 4.
    part, ledger = Carry(policy_context()), ledger_of(1, 4)
    narrow, wide = (ledger.engine(EngineId(name)) for name in ("e0", "e1"))
    for engine, even in ((narrow, 0.1 / (5e-5 - 1e-6)), (wide, 0.1 / (1.25e-5 - 1e-6))):
        fewer = add_trajectory(ledger, f"{engine.id}-", context_tokens=int(even))
        more = add_trajectory(ledger, f"{engine.id}+", context_tokens=int(even) + 1)
        assert not part.carries_kv(fewer, engine, ledger)
        assert part.carries_kv(more, engine, ledger)


def test_where_a_store_is_quicker_than_both_nothing_is_carried_and_homes_never_move_in_tools():
    context = policy_context()
    loads = {s: replace(c, load_s=1e-7) for s, c in context.cost.by_shape.items()}
    part = Carry(replace(context, cost=replace(context.cost, by_shape=loads)))
    ledger = ledger_of(1)
    t = add_trajectory(ledger, "a", "e0", context_tokens=100_000)
    assert not part.carries_kv(t, ledger.engine(EngineId("e0")), ledger)
    assert part.target(t, 0.0, ledger) is None
    part.finished(t)
