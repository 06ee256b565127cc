"""`heddle prices`: dollars of a GPU and hour, with sources."""

import json
from dataclasses import asdict

import rich_click as click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
def prices(as_json: bool) -> None:
    """List the prices of GPU classes that comparisons and plans count with, and their sources.

    --set prices.h100=2.1, or h100 = 2.1 under [prices] in heddle.toml, replaces one.
    """
    from heddle.cli.tables import lines
    from heddle.cost.prices import price_text, priced_classes

    rows = priced_classes()
    if as_json:
        found = {"schema": "heddle.prices/1", "prices": [asdict(row) for row in rows]}
        click.echo(json.dumps(found))
        return
    shown = {}
    for row in rows:
        price = "-" if row.dollars_per_hour is None else price_text(row.dollars_per_hour)
        shown[row.gpu] = f"{price:>6}  {row.date:<10}  {row.source}"
    lines("dollars of a GPU and hour", shown)
