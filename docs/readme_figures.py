"""The table of the README that says how far to trust Heddle, from the files that have its figures.

    python docs/readme_figures.py [--check]

Without --check it writes the table between the two marks of the README.
"""

import json
import re
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: python docs/readme_figures.py -->\n", "<!-- end of figures -->\n"


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| figure | compared with | error |", "|---|---|---|"]
    lines += [f"| {what} | {source} | {error} |" for what, source, error in rows()]
    return "\n".join(lines) + "\n"


def rows() -> list[tuple[str, str, str]]:
    """Return what is predicted, what it was compared with, and how far it was off."""
    served = [found for found in map(_measured, _profiles()) if found.get("runs")]
    apart = [f["tpot_unseen_mean_abs_pct"] for f in served if "tpot_unseen_mean_abs_pct" in f]
    runs, seen = sum(f["runs"] for f in served), median(f["tpot_mean_abs_pct"] for f in served)
    errors = _read("heddle_sim/profiles/training/published.json")["training"]["errors"]
    training = errors["groups"]["dense megatron"]
    replays = _read("experiments/real_cpu/results.json").values()
    makespans = [abs(replay["makespan_s"]["error_pct"]) for replay in replays]
    verdict = re.search(r"Of (\d+) claims (\d+) agree, (\d+) in direction only", _text())
    assert verdict is not None, "docs/results.md begins with its verdict"
    claims, agree, direction = verdict.groups()
    return [
        (
            "time per output token",
            f"{runs} published vLLM runs, {len(served)} models and GPU types",
            f"{seen:.1f} %; {median(apart):.1f} % on runs that the fit has not seen",
        ),
        (
            "makespan of a rollout",
            f"{len(makespans)} rollouts on vLLM CPU engines",
            f"{mean(makespans):.1f} %, the worst {max(makespans):.0f} %",
        ),
        (
            "training step of a dense model, Megatron",
            f"{training['rows']} published steps",
            f"{training['seen']:.0f} %; {training['unseen']:.0f} % with the document left out",
        ),
        ("anything on a GPU of ours", "nothing was measured yet", "unknown"),
        (
            "figures of the papers",
            f"{claims} claims",
            f"{agree} agree, {direction} in direction only",
        ),
    ]


def _profiles() -> list[dict[str, Any]]:
    files = sorted((ROOT / "heddle_sim" / "profiles").glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _measured(profile: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = profile.get("errors", {}).get("measured", {})
    return found


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _text() -> str:
    return (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the table, or check that it is what it would be; 1 if it is not."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = head + BEGIN + table() + END + tail
    if "--check" not in arguments:
        readme.write_text(made, encoding="utf-8")
        return 0
    print("README.md: as the files say" if made == text else "README.md: run this without --check")
    return int(made != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
