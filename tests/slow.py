"""Writes which tests `make test` leaves out, from the times that a run of all of them printed.

    pytest --durations=0 --durations-min=0.05 -m "not real_engines" > times.txt
    python -m tests.slow times.txt

Functions go in order of their seconds, the longest first, until the rest takes `LEFT_S`. One second
and less a case is never slow: what is left out is little time for many checks.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

from tests.conftest import SLOW

LEFT_S = 400.0
"""Seconds of one core that `make test` takes at most."""
CASE_S = 0.5
"""A function whose longest case takes less stays."""
LINE = re.compile(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+\.py::[^\[@\s]+)")


def slow_functions(text: str) -> list[str]:
    """Return the functions that are left out, in order of their names."""
    total: dict[str, float] = defaultdict(float)
    longest: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if (found := LINE.match(line)) is not None:
            seconds, name = float(found[1]), found[2]
            total[name] += seconds
            longest[name] = max(longest[name], seconds)
    left, out = sum(total.values()), []
    for name in sorted(total, key=lambda name: -total[name]):
        if left <= LEFT_S:
            break
        if longest[name] >= CASE_S:
            out.append(name)
            left -= total[name]
    return sorted(out)


if __name__ == "__main__":
    SLOW.write_text("\n".join(slow_functions(Path(sys.argv[1]).read_text())) + "\n")
