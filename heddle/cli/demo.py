"""`heddle demo`: a comparison of policies on the trace that comes with Heddle, and its page."""

from dataclasses import replace
from pathlib import Path

import rich_click as click

from heddle.cli.compare import written_page

TRACE = "coding-512.jsonl.gz"
POLICIES = ("verl", "slime", "heddle")
MODEL, GPU, GPUS = "qwen3-14b", "h100", 8


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("heddle-demo"),
    show_default=True,
    help="Folder of the runs and of report.html",
)
def demo(out: Path) -> None:
    """Compare verl, slime and heddle on 512 shipped coding trajectories, and write a page.

    Qwen3-14B on 8 H100. Policies that do not plan their engines run at each TP degree, and the
    table has their best.
    """
    from heddle.cli.progress import progress
    from heddle.cli.show import comparison
    from heddle.cluster.config import ClusterConfig
    from heddle.comparison.compare import compare
    from heddle.config import RunConfig
    from heddle.runs.comparison_folder import PAGE, write_index

    remark = f"It is the best of these {len(POLICIES)} policies, under one seed."
    out.mkdir(parents=True, exist_ok=True)
    cluster = ClusterConfig(model=MODEL, gpu=GPU, gpus=GPUS)
    with progress("comparing"):
        result = compare(
            RunConfig(trace=str(shipped_trace()), cluster=cluster),
            POLICIES,
            tps="best",
            out=out / "runs",
        )
    result = replace(result, remark=remark)
    write_index(out / "runs", result.plain())
    comparison(result, [str(shipped_trace())])
    page = written_page([run.path for p in result.best_rows for run in p.runs], out / PAGE)
    click.echo("" if page is None else f"\nnext: open {page} in a browser")
    click.echo("next: compare policies on your own trace:")
    click.echo("  heddle compare TRACE --gpus 64")


def shipped_trace() -> Path:
    """The trace that a wheel has, or that of the checkout."""
    packages = Path(__file__).resolve().parents[1]
    shipped = packages / "traces" / TRACE
    return shipped if shipped.exists() else packages.parent / "traces" / TRACE
