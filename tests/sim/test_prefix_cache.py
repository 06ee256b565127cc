"""Which KV gives way first."""

from heddle_core.ids import TrajectoryId
from heddle_sim.prefix_cache import PrefixCache


def test_the_least_recently_used_gives_way_first_however_often_another_is_used():
    cache = PrefixCache()
    rare, often = (cache.context(TrajectoryId(name)) for name in ("rare", "often"))
    cache.put(rare, 5)
    for _ in range(500):
        cache.put(often, 3)
        assert cache.take(often) == 3
    cache.put(often, 3)
    assert cache.blocks == 8
    cache.evict(2)
    assert (rare.blocks, often.blocks) == (3, 3)
    cache.evict(4)
    assert (rare.blocks, often.blocks, cache.blocks) == (0, 2, 2)


def test_the_order_of_use_is_kept_in_space_that_does_not_grow_with_uses():
    cache = PrefixCache()
    context = cache.context(TrajectoryId("one"))
    for _ in range(10_000):
        cache.put(context, 1)
        cache.take(context)
    assert len(cache._freed) < 100
