"""Which KV gives way first."""

import random

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


def test_blocks_and_their_order_are_those_of_a_list_of_names():
    cache, names, draw = PrefixCache(), "abcdef", random.Random(5)
    expected: dict[str, int] = {}  # the least recently used first
    for _ in range(20_000):
        name, blocks = draw.choice(names), draw.randrange(-1, 6)
        context = cache.context(TrajectoryId(name))
        match draw.randrange(5):
            case 0 | 1:
                cache.put(context, blocks)
                expected.pop(name, None)
                expected |= {name: blocks} if blocks > 0 else {}
            case 2:
                assert cache.take(context) == expected.pop(name, 0)
            case 3:
                cache.trim(context, blocks)
                if min(blocks, expected.get(name, 0)) > 0:
                    expected[name] = min(blocks, expected[name])
                else:
                    expected.pop(name, None)
            case _:
                evicted = min(max(blocks, 0), sum(expected.values()))
                cache.evict(evicted)
                for old in list(expected):
                    gone = min(evicted, expected[old])
                    evicted -= gone
                    expected[old] -= gone
                    if not expected[old]:
                        del expected[old]
        assert {n: cache.held(TrajectoryId(n)) for n in names if n in expected} == expected
        assert cache.blocks == sum(expected.values())
        if draw.random() < 0.01:
            cache.clear()
            expected.clear()
            assert not cache.contexts
