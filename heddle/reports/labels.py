"""Names of runs side by side, in tables, figures and pages."""

from collections.abc import Sequence

from heddle.reports.tried import tried_settings
from heddle.runs import Run


def labels(runs: Sequence[Run]) -> list[str]:
    """Policy and seed, with the setting where several were tried.

    Where these are equal, with the TP degree or with the time of day; the directories at worst.
    """
    tried = tried_settings(runs)
    own = [
        run.label if settings is None else f"{settings.row} s{run.manifest['seed']}"
        for run, settings in zip(runs, tried, strict=True)
    ]
    short = [
        label
        if own.count(label) == 1 or settings is not None
        else label.replace(
            f" s{run.manifest['seed']}", f"@tp{run.config.cluster.tps} s{run.manifest['seed']}"
        )
        for run, label, settings in zip(runs, own, tried, strict=True)
    ]
    timed = [
        f"{label} {str(run.manifest.get('started'))[11:19]}"
        for run, label in zip(runs, own, strict=True)
    ]
    named = [t if short.count(s) > 1 else s for s, t in zip(short, timed, strict=True)]
    for candidates in (named, [run.path.resolve().name for run in runs]):
        if len(dict.fromkeys(candidates)) == len(runs):
            return candidates
    return [str(run.path) for run in runs]
