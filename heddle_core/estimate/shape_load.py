"""Estimated work on the engines of one shape, and the one where a trajectory would end earliest.

A trajectory of `o` output tokens and mean context `c` adds to two sums of its engine, with the
terms of `heddle_core.estimate.group_cost`:

    full_e = sum of t0 * o_k * max(c_k / KV capacity, 1 / slots) + w_k    (a full engine)
    work_e = sum of w_k                 (the delay of one that runs all the time by the others)

and ends on `e` at ``max(full_e, solo + work_e)``. If the longest trajectory of `e` counts, which
needs `longest_e` for its iterations and tools alone, the end is no earlier than that one's,
``work_e + longest_e``. Engines of one shape differ in these sums and a little in KV capacity. The
least sums of 2, 4, 8 ... neighbours bound the ends on all of them from below, so that a search
visits few engines.
"""

import math

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray


class EngineSums:
    """The two sums of each engine of one shape; engines are numbered from 0 in a given order."""

    def __init__(
        self,
        cost: StepCost,
        kv_capacity_tokens: list[float],
        *,
        max_running: int,
        appended_per_output: float,
        tool_s_per_output: float,
    ) -> None:
        self._t0, self._t1, self._t2 = cost.t0_s, cost.t1_s, cost.t2_s
        self._prefill_s = cost.prefill_s
        self._kv = kv_capacity_tokens
        self._largest_kv = max(kv_capacity_tokens)
        self._least_pace = 1.0 / max_running
        self._appended, self._tool_s = appended_per_output, tool_s_per_output
        self._leaves = 1 << (len(kv_capacity_tokens) - 1).bit_length()
        # Node 1 is the root, the children of node i are 2 i and 2 i + 1, engines are the leaves.
        self._full = [math.inf] * (2 * self._leaves)
        self._work = [math.inf] * (2 * self._leaves)
        self._late = [-math.inf] * (2 * self._leaves)
        """End of the longest trajectory of each engine; minus infinity where it does not count."""
        self._longest = [-math.inf] * len(kv_capacity_tokens)

    def replace(self, full: FloatArray, work: FloatArray, longest: FloatArray) -> None:
        """Take new sums of all engines, and `longest_e`: minus infinity where it does not count."""
        leaves, late = self._leaves, work + longest
        self._longest = longest.tolist()
        trees = ((self._full, full), (self._work, work), (self._late, late))
        for tree, sums in trees:
            tree[leaves : leaves + len(sums)] = sums.tolist()
            for node in range(leaves - 1, 0, -1):
                tree[node] = min(tree[2 * node], tree[2 * node + 1])

    def sums(self, engine: int) -> tuple[float, float]:
        """Return the two sums of an engine in seconds: when full, and work."""
        return self._full[self._leaves + engine], self._work[self._leaves + engine]

    def put(self, engine: int, full_s: float, work_s: float) -> None:
        _put(self._full, self._leaves + engine, full_s)
        _put(self._work, self._leaves + engine, work_s)
        _put(self._late, self._leaves + engine, work_s + self._longest[engine])

    def longest_s(self, engine: int) -> float:
        """Return what the longest trajectory of an engine needs alone, without its work."""
        return self._longest[engine]

    def own(self, output: float, context_tokens: float, engine: int) -> tuple[float, float, float]:
        """Return what a trajectory adds to the two sums of `engine`, and its solo time there."""
        context, work_s, solo_s = self._terms(output, context_tokens)
        pace = max(context / self._kv[engine], self._least_pace)
        return self._t0 * output * pace + work_s, work_s, solo_s

    def _terms(self, output: float, context_tokens: float) -> tuple[float, float, float]:
        """Mean context, work and solo time of a trajectory, the same on all these engines."""
        appended = self._appended * output
        context = context_tokens + 0.5 * (output + appended)
        work_s = output * (self._t1 + self._t2 * context) + self._prefill_s * appended
        return context, work_s, self._t0 * output + work_s + self._tool_s * output

    def earliest(
        self, output: float, context_tokens: float, price_s: float, before_s: float
    ) -> tuple[float, int]:
        """Return the earliest end of a trajectory, and the first engine with it.

        `price_s` is added to every end. Only ends below `before_s` count; without one, `before_s`
        and -1.
        """
        context, own_s, solo_s = self._terms(output, context_tokens)
        alone_s = self._t0 * output
        least_s = alone_s * max(context / self._largest_kv, self._least_pace) + own_s
        leaves, fulls, works, lates = self._leaves, self._full, self._work, self._late
        end_s, found = before_s, -1
        node = 1
        while node:
            # Rounding is monotone: this is no later than any end below the node, to the last digit.
            full_s, work_s = fulls[node] + least_s, works[node] + solo_s
            late_s = lates[node] + own_s
            if late_s > work_s:
                work_s = late_s
            bound_s = (full_s if full_s > work_s else work_s) + price_s
            if bound_s < end_s:
                if node < leaves:
                    node *= 2
                    continue
                pace = max(context / self._kv[node - leaves], self._least_pace)
                full_s = fulls[node] + (alone_s * pace + own_s)
                exact_s = (full_s if full_s > work_s else work_s) + price_s
                if exact_s < end_s:
                    end_s, found = exact_s, node - leaves
            while node & 1:
                node >>= 1
            if node:
                node += 1
        return end_s, found


def _put(tree: list[float], node: int, value: float) -> None:
    tree[node] = value
    while node > 1:
        beside = tree[node ^ 1]
        if beside < value:
            value = beside
        node >>= 1
        if tree[node] == value:
            return
        tree[node] = value
