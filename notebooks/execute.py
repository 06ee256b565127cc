"""Executes notebooks: `python -m notebooks.execute [NAME...] [--check]`.

Without --check outputs are written in place. With it nothing is written: a text output that differs
from the committed one is an error. Pictures are not compared, since a release of the library that
draws them may move a pixel, nor are cells with the tag `varies`, which show measured times.
"""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 300
"""For a kernel to start, and for one cell."""
VARIES = "varies"
"""Tag of cells whose outputs are measured times."""


def notebooks() -> list[Path]:
    """All notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """Execute a notebook in its own folder, as Jupyter does, and return it with its outputs.

    Raises:
        CellExecutionError: a cell raised; the message has its traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        startup_timeout=TIMEOUT_S,
        # It warns of its connection to this process, which does not leave the machine.
        extra_arguments=["--IPKernelApp.log_level=40"],
    )
    client.execute()
    # The kernel's own release would only make files differ.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def texts(notebook: Any) -> list[str]:
    """What a reader can read of each code cell's outputs, one text for each cell."""
    return [_text(cell) for cell in notebook.cells if cell.cell_type == "code"]


def _text(cell: Any) -> str:
    if VARIES in cell.metadata.get("tags", ()):
        return ""
    return "\n".join(part for output in cell.outputs for part in _parts(output))


def _parts(output: Any) -> Iterator[str]:
    if output.output_type == "stream":
        yield output.text.rstrip()
    elif output.output_type == "error":
        yield output.evalue
    elif not any(kind.startswith("image/") for kind in output.data):
        # Tables are written twice; a space more or less in HTML is no difference.
        for kind in ("text/plain", "text/html", "text/markdown"):
            yield re.sub(r"\s+", " ", output.data.get(kind, "")).strip()


def differences(committed: Any, now: Any) -> list[str]:
    """Cells whose outputs differ, a line or two for each."""
    found = []
    for number, (was, is_) in enumerate(zip(texts(committed), texts(now), strict=True), 1):
        if was != is_:
            found.append(f"code cell {number} now shows\n  {is_}\nwhere the file has\n  {was}")
    return found


@click.command()
@click.argument("names", nargs=-1)
@click.option("--check", is_flag=True, help="Compare with the outputs in the files; write nothing")
def main(names: Sequence[str], check: bool) -> None:
    """Execute notebooks (all, or those whose name begins with a NAME)."""
    try:
        import nbformat
    except ImportError:
        raise click.ClickException("needs nbclient: pip install 'heddle-rl[notebooks]'") from None
    for name in names:
        if not any(path.name.startswith(name) for path in notebooks()):
            known = ", ".join(path.stem for path in notebooks())
            raise click.UsageError(f"no notebook begins with {name!r}; there are: {known}")
    stale = False
    for path in notebooks():
        if names and not any(path.name.startswith(name) for name in names):
            continue
        began_s = time.perf_counter()
        now = executed(path)
        took_s = time.perf_counter() - began_s
        if not check:
            nbformat.write(now, path)
            click.echo(f"{path.name}: executed in {took_s:.0f} s")
            continue
        apart = differences(nbformat.read(path, as_version=4), now)
        stale = stale or bool(apart)
        click.echo(f"{path.name}: {'out of step' if apart else 'in step'} ({took_s:.0f} s)")
        for line in apart:
            click.echo(line, err=True)
    if stale:
        click.echo("`make notebooks` brings them in step; look at what changed", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
