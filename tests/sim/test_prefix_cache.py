"""Which KV gives way first."""

import random

from heddle_core.ids import GroupId, TrajectoryId
from heddle_sim.prefix_cache import GroupPrompts, PrefixCache
from heddle_sim.request import Context, Request


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


def test_siblings_that_hold_the_prompt_of_their_group_are_a_ring():
    prompts, names = GroupPrompts(), ("first", "other", "same", "later")
    contexts = {name: Context(TrajectoryId(name)) for name in names}

    def first_of(name: str, prompt_tokens: int, shared_tokens: int = 0) -> Context | None:
        context = contexts[name]
        step = Request(context, GroupId("g"), prompt_tokens, shared_tokens, 1, 0.0)
        return prompts.first_sibling(step)

    def ring() -> set[str]:
        found = [contexts["first"]]
        while (sibling := found[-1].next_sibling) is not found[0]:
            assert sibling is not None
            found.append(sibling)
        return {context.trajectory for context in found if context.holds_group_prompt}

    assert first_of("first", 40) is None
    assert first_of("other", 41) is None  # another prompt: what looks the ring up skips it
    assert contexts["other"].next_sibling is None
    assert first_of("same", 40) is contexts["first"]
    assert first_of("later", 90, 50) is contexts["first"]
    assert ring() == {"first", "same", "later"}
    assert first_of("same", 90, 20) is None  # its context was cut before the end of the prompt
    assert ring() == {"first", "later"}
    assert first_of("same", 90, 40) is contexts["first"]
    assert ring() == {"first", "same", "later"}
