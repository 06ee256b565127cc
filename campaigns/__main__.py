"""The command line of campaigns: `python -m campaigns faults --minutes 5 --seed 7`."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

import click
import msgspec

from campaigns.campaign import COUNTER_EXAMPLES, Campaign, CounterExample, numbered, read_case
from campaigns.report import Result, execute, save_findings, so_far, table
from heddle_compiled import in_force

CAMPAIGNS: Final = {
    "faults": "campaigns.faults.campaign:Faults",
    "answers": "campaigns.faults.answers:Answers",
    "fuzz": "campaigns.fuzz.campaign:Fuzz",
    "kill": "campaigns.kill.campaign:Kills",
    "mutants": "campaigns.mutants.campaign:Mutants",
}


def campaign_named(name: str) -> Campaign:
    """Import a campaign."""
    module, _, kind = CAMPAIGNS[name].partition(":")
    made: Campaign = getattr(import_module(module), kind)()
    return made


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice([*CAMPAIGNS]))
@click.option("--minutes", type=click.FloatRange(0.0), default=5.0, show_default=True)
@click.option("--cases", type=click.IntRange(1), help="So many cases at most.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--case", "number", type=click.IntRange(0), help="Run this case alone, by its number."
)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    default=COUNTER_EXAMPLES,
    show_default="campaigns/counter_examples",
    help="Folder for minimised counter-examples, which a test replays.",
)
def main(
    names: tuple[str, ...],
    minutes: float,
    cases: int | None,
    seed: int,
    number: int | None,
    jobs: int,
    save: Path,
) -> None:
    """Attack Heddle; the exit status is 1 if that found something.

    A case depends on its campaign, its seed and its number alone; --minutes is for each campaign.
    """
    results = []
    for name in names:
        campaign = campaign_named(name)
        if number is None:
            result = execute(
                campaign,
                seed,
                minutes=minutes,
                cases=cases,
                jobs=jobs,
                progress=lambda now: click.echo(so_far(now), err=True),
            )
        else:
            result = Result(campaign, seed)
            result.add(number, campaign.run(numbered(campaign, seed, number)))
        if campaign.saves:
            save_findings(result, save)
        results.append(result)
        if result.interrupted:
            break
    click.echo(table(results))
    click.echo(f"build: {'compiled' if in_force() else 'sources'}")
    sys.exit(any(r.failed for r in results))


def replay(path: Path) -> str:
    """Run the case of a file again; return what still fails, "" if nothing does."""
    example = msgspec.json.decode(path.read_bytes(), type=CounterExample)
    campaign = campaign_named(example.campaign)
    failure = campaign.run(read_case(campaign, example)).failure
    return failure.text if failure is not None else ""


if __name__ == "__main__":
    main()
