"""Tables of the README and of pages, from the files that have their figures.

    python docs/readme_figures.py [--check]

Without --check it writes the tables between their marks.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.check_gpu import compared  # noqa: E402
from experiments.harness.experiment import Outcome, experiments  # noqa: E402
from experiments.harness.verdicts import Judged  # noqa: E402
from heddle_sim.profile_files import load_profile  # noqa: E402

VERDICTS = ("agrees", "direction only", "disagrees")


def figures(outcomes: list[Outcome]) -> str:
    """Return the table of what is predicted, what it was compared with, and how far it was off."""
    served = _scores("TPOT and TTFT, vllm")
    seen, apart = (_unseen("vllm", part) for part in ("nothing", "layout"))
    errors = _read("heddle_sim/profiles/training/published.json")["training"]["errors"]
    training = errors["groups"]["dense"]
    replays = _read("experiments/real_cpu/results.json").values()
    makespans = [abs(replay["makespan_s"]["error_pct"]) for replay in replays]
    gpu = _read("benchmarks/gpu_h200.json")
    profile = load_profile(gpu["model"], "h200")
    before, own = (
        median(
            row.off_pct
            for row in compared(gpu, profile.of_version(version).table(1))
            if row.kind == "decode"
        )
        for version in ("0.12.0", gpu["vllm"])
    )
    count = _counts([judged for outcome in outcomes for judged in outcome.judged])
    rows = [
        (
            "time per output token",
            f"{sum(int(row['runs']) for row in served)} published vLLM runs, "
            f"{seen['groups']} layouts",
            f"{seen['TPOT median']} %; {apart['TPOT median']} % on unseen layouts, one in ten over "
            f"{float(apart['TPOT P90']):.0f} %, the worst {float(apart['TPOT worst']):.0f} %",
        ),
        (
            "makespan of a rollout",
            f"{len(makespans)} rollouts on vLLM CPU engines",
            f"{mean(makespans):.1f} %, the worst {max(makespans):.0f} %",
        ),
        (
            "training step of a dense model",
            f"{training['rows']} published steps",
            f"{training['seen']['median']:.0f} %; "
            f"{training['unseen']['median']:.0f} % with the document left out",
        ),
        (
            f"step of {gpu['model']} on H200",
            f"{len(gpu['engine']['decode'])} of ours, vLLM {gpu['vllm']}",
            f"{before:+.0f} % (0.12's host time), {own:+.0f} % (own)",
        ),
        (
            "figures of the papers",
            f"{sum(count.values())} claims",
            f"{count['agrees']} agree, {count['direction only']} in direction only",
        ),
    ]
    return _table(("figure", "compared with", "error"), rows)


def unseen() -> str:
    """Return the errors of runs by what the fit has not seen, of each engine."""
    columns = ("TPOT median", "TPOT P90", "TPOT worst", "TTFT median")
    rows = []
    for part in ("nothing", "layout", "engine version", "model"):
        both = [_unseen(engine, part) for engine in ("vllm", "sglang")]
        rows.append((part, *("/".join(of[column] for of in both) for column in columns)))
    return _table(("left out, vLLM/SGLang", *columns), rows)


def claims(outcomes: list[Outcome]) -> str:
    """Return the verdicts by experiment."""
    rows = []
    for outcome in outcomes:
        count = _counts(outcome.judged)
        if outcome.judged:
            shown = [str(count[verdict] or "") for verdict in VERDICTS]
            rows.append((outcome.expected.figure, outcome.expected.title, *shown))
    return _table(("", "experiment", "agree", "direction only", "disagree"), rows)


def points(outcomes: list[Outcome]) -> str:
    """Return the published points of speculation beside the model's."""
    (found,) = (o for o in outcomes if o.expected.figure == "U")
    rows = [
        (each.claim.what, f"{each.claim.value or 0.0:g}", each.value.text(), each.verdict)
        for each in found.judged
    ]
    return _table(("", "published", "here", ""), rows)


def cells() -> str:
    """Return makespans of the nine cells of speculation, in seconds."""
    rows = []
    for cell, policies in _read("experiments/speculation_cells/measured.json")["data"].items():
        best = {name: min(kinds.values()) for name, kinds in policies.items()}
        first = min(best, key=lambda name: best[name])
        shown = [policies[n][kind] for n in ("verl", "heddle") for kind in ("off", "static")]
        rows.append((cell, *(f"{s:,.0f}" for s in shown), f"{first}, {best[first]:,.0f}"))
    kinds = ["verl", "with drafts", "heddle", "with drafts"]
    return _table(("", *kinds, "first"), rows)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head, *lines = (f"| {' | '.join(cells)} |\n" for cells in (header, *rows))
    return "".join((head, "|---" * len(header), "|\n", *lines))


def _counts(judged: "list[Judged] | tuple[Judged, ...]") -> Mapping[str, int]:
    return {verdict: sum(j.verdict == verdict for j in judged) for verdict in VERDICTS}


def _scores(section: str) -> list[dict[str, str]]:
    """Rows of a section of the scorecard, by their columns."""
    page = (ROOT / "benchmarks" / "scorecard.md").read_text(encoding="utf-8")
    lines = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [dict(zip(cells[0], row, strict=False)) for row in cells[1:]]


def _unseen(engine: str, part: str) -> dict[str, str]:
    rows = _scores("TPOT and TTFT by what the fit has not seen")
    return next(row for row in rows if (row["engine"], row["part"]) == (engine, part))


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Write the tables, or check that they are what they would be; 1 if one is not."""
    outcomes = [experiment.outcome() for experiment in experiments()]
    tables = {
        "figures": figures(outcomes),
        "claims": claims(outcomes),
        "points": points(outcomes),
        "cells": cells(),
        "unseen": unseen(),
    }
    wrong = 0
    for name in ("README.md", "docs/results.md", "docs/speculation.md"):
        path = ROOT / name
        text = made = path.read_text(encoding="utf-8")
        for kind, table in tables.items():
            begin = f"<!-- {kind}: python docs/readme_figures.py -->\n"
            end = f"<!-- end of {kind} -->"
            if begin in made:
                head, _, rest = made.partition(begin)
                made = head + begin + table + end + rest.partition(end)[2]
        if "--check" not in arguments:
            path.write_text(made, encoding="utf-8")
            continue
        print(f"{name}: {'as the files say' if made == text else 'run this without --check'}")
        wrong += made != text
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
