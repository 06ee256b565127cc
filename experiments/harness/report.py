"""The page of results: claims of sources beside our measurements.

    python -m experiments.harness.report

writes experiments/results.md from the committed numbers.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.harness.experiment import (
    COMMITTED,
    Outcome,
    Place,
    experiments,
)
from experiments.harness.verdicts import Judged

HEAD = """\
# Results

{size}

*agrees*: our mean lies in the claimed range (widened by 10 % of its distance from the neutral
value, unless its claim says otherwise), or our confidence interval meets it and leaves out the
neutral value; where the source gives a direction only, we have the same. *direction only*: the same
side of the neutral value, another size. *disagrees*: neither. `±` is the half-width of the 95 %
confidence interval over seeds (Student's t), `(a to b)` the least and the greatest of several
cells, whose mean is judged. *ratio* is ours over the middle of the claim. The paper is Heddle,
arXiv 2603.28101v1; it publishes neither traces nor lengths, so ratios and orders can be compared,
absolute throughput cannot. Sources of all claims are in each `expected.json`, the numbers of each
figure in its `measured.json`. A section ends with its experiment, and with the GPUs and the
rollouts of each cell unless `config.toml` says otherwise.
"""


def results_page(outcomes: Sequence[Outcome], *, figures: str) -> str:
    """Return the page; `figures` leads from it to the folder of pictures."""
    counts = {
        verdict: sum(j.verdict == verdict for o in outcomes for j in o.judged)
        for verdict in ("agrees", "direction only", "disagrees")
    }
    said = ", ".join(f"{n} {_plural(verdict)}" for verdict, n in counts.items())
    skipped = sum(bool(o.skipped) for o in outcomes)
    sized = [o.size for o in outcomes if o.size is not None]
    full = sum(size.full for size in sized)
    others = "the others a reduced one (`make experiments`)" if full < len(sized) else "none less"
    size = (
        f"Of {sum(counts.values())} claims {said}. {full} of {len(sized)} sets of runs have the "
        "paper's size (`make experiments FULL=1`: 64 GPUs, 100 trajectories for each baseline "
        f"engine), {others}; each section says which. "
        f"{len(outcomes) - len(sized) - skipped} experiments are small worked examples"
        + (f", {skipped} were skipped." if skipped else ".")
    )
    lines = [HEAD.format(size=size)]
    for heading, chosen in _parts(outcomes):
        lines += [f"## {heading}", ""]
        for outcome in chosen:
            lines += _section(outcome, figures)
    return "\n".join(lines).rstrip() + "\n"


def _plural(verdict: str) -> str:
    return {"agrees": "agree", "disagrees": "disagree"}.get(verdict, "in direction only")


def _parts(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    # F1 to F16, T1, T2; what is beyond has a letter alone.
    paper = [o for o in outcomes if o.expected.figure[1:].isdigit()]
    beyond = [o for o in outcomes if o not in paper]
    if paper:
        yield "The paper's figures and tables", paper
    if beyond:
        yield "Beyond the paper", beyond


def _section(outcome: Outcome, figures: str) -> Iterator[str]:
    yield f"### {outcome.expected.figure}: {outcome.expected.title}"
    yield ""
    if outcome.skipped:
        yield f"Skipped: {outcome.skipped}."
        yield ""
        return
    if outcome.judged:
        yield "| what | claimed | here | ratio | verdict |"
        yield "|---|---|---|---|---|"
        for judged in outcome.judged:
            yield _row(judged)
        yield ""
    if outcome.expected.note:
        yield outcome.expected.note
        yield ""
    reasons: dict[str, list[str]] = {}
    for judged in outcome.judged:
        if judged.verdict != "agrees":
            why = judged.claim.why or "Reason not known."
            reasons.setdefault(why, []).append(f"*{judged.claim.what}*")
    for why, claims in reasons.items():
        yield f"- {', '.join(claims)}: {why}"
    if reasons:
        yield ""
    yield f"![{outcome.expected.title}]({figures}/{outcome.name}.png)"
    yield ""
    yield f"`experiments/{outcome.name}`{_size(outcome)}."
    yield ""


def _size(outcome: Outcome) -> str:
    size = outcome.size
    if size is None:
        return ""
    return f", {size.gpus} GPUs, {size.seeds} rollout{'s' if size.seeds > 1 else ''}"


def _row(judged: Judged) -> str:
    claim = judged.claim
    unit = f" ({claim.unit})" if claim.unit not in ("x", "") else ""
    ratio = "-" if judged.ratio is None else f"{judged.ratio:.2f}"
    verdict = judged.verdict + (f", {judged.remark}" if judged.remark else "")
    return f"| {claim.what}{unit} | {claim.text()} | {judged.value.text()} | {ratio} | {verdict} |"


def page(place: Place = COMMITTED) -> tuple[Path, str]:
    """The page of results in `place`, of every experiment as it was measured last."""
    outcomes = [experiment.outcome() for experiment in experiments(place)]
    path = place.numbers / "results.md"
    figures = os.path.relpath(place.figures, path.parent)
    return path, results_page(outcomes, figures=figures)


def write(page: str, path: Path) -> None:
    """Write the page whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(page, encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    committed, text = page()
    write(text, committed)
