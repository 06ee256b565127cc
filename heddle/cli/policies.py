"""`heddle policies`: presets, parts and models; a new policy, and checks of one."""

import json
import keyword
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from heddle.cli.errors import FAILED
from heddle.cli.options import settings_option, take_settings

if TYPE_CHECKING:
    from heddle.policies.check import PolicyCheck

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object instead of lines"
)


@click.group()
def policies() -> None:
    """List presets, parts and models with a profile; write a policy of your own, and check it."""


@policies.command("list")
@as_json_option
def list_(as_json: bool) -> None:
    """List presets, parts and models with a profile, one line each."""
    from heddle.cli.tables import lines
    from heddle.policies.plugins import installed_policies
    from heddle.policy_inputs import LEARNED, ORACLES
    from heddle_core.parts.table import KINDS, PARTS
    from heddle_core.presets import ADAPTIVE, PRESETS, about
    from heddle_sim.profile_files import known_profiles, load_profile

    presets = {name: about(name) for name in PRESETS}
    installed = [name for name in installed_policies() if name not in presets]
    profiles: dict[str, list[str]] = {}
    for model, gpu in known_profiles():
        profiles.setdefault(model, []).append(load_profile(model, gpu).gpu_label)
    parts: dict[str, dict[str, str]] = {
        kind: {name: part.about for name, part in PARTS.of(kind).items()} for kind in KINDS
    }
    parts["predictor"] |= LEARNED | ORACLES
    parts["admission"][ADAPTIVE] = (
        "next_round, and trajectories in their order where the policy has none (--max-running auto)"
    )
    if as_json:
        found = {"presets": presets, "installed": installed, "parts": parts, "profiles": profiles}
        click.echo(json.dumps(found))
        return
    lines("presets", presets)
    if installed:
        lines("installed", dict.fromkeys(installed, ""))
    for kind, names in parts.items():
        lines(f"parts: {kind}", names)
    lines("profiles", {model: ", ".join(gpus) for model, gpus in profiles.items()})


@policies.command()
@click.argument("name")
def new(name: str) -> None:
    """Write NAME.py in this folder: a policy with a placement and a scheduler of its own.

    \b
    heddle policies new mine
    heddle compare rollout.jsonl.gz --policies verl,mine:policy,heddle
    """
    from heddle.cli.outputs import OutputError, new_file, write
    from heddle.policies.template import policy_source

    path = Path(f"{name}.py")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise OutputError(
            f"{name!r}: is no name of a Python module; use letters, digits and _, as my_policy"
        )
    new_file(path)
    if _taken(name):
        raise OutputError(f"{name}: an installed module has this name; choose another")
    write(path, policy_source(name).encode())
    click.echo(f"policy in {path}: {name}:policy")
    click.echo(f"next: heddle policies check {name}:policy")
    click.echo(f"next: heddle compare TRACE --policies verl,{name}:policy,heddle")


def _taken(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


@policies.command()
@click.argument("name")
@click.argument("trace", required=False)
@settings_option
@as_json_option
@click.pass_context
def check(
    ctx: click.Context, name: str, trace: str | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Check a policy NAME, as mine:policy or heddle+mine:part, on a trace [the shipped one].

    The cluster has 4 GPUs at TP 1, whose engines run 32 steps at once, unless --set says else.

    Determinism: two runs, and a replay in another process with other hashes of text, make equal
    decisions. Purity: its code reads no clock, file, network or unseeded random number. Speed: the
    time of each method, which decides nothing. Exit status 1 if a check fails.

    \b
    heddle policies check mine:policy
    heddle policies check verl+mine:placement rollout.jsonl.gz --set cluster.gpus=8
    """
    from heddle.cli.demo import shipped_trace
    from heddle.cli.progress import progress
    from heddle.cli.tables import answer
    from heddle.policies.check import check_policy

    config = take_settings(
        settings, trace=trace or str(shipped_trace()), cluster__gpus=4, cluster__max_running=32
    )
    with progress(f"checking {name}"):
        found = check_policy(name, config)
    answer(found, _show, as_json=as_json)
    ctx.exit(0 if found.passed else FAILED)


def _show(found: "PolicyCheck") -> None:
    from heddle.cli.tables import new_table, show

    click.echo(
        f"{found.policy}: {found.trajectories:,} trajectories, {found.decisions:,} commands a run"
    )
    _verdict("two runs in one process", found.differs)
    _verdict("no clock, file, network, unseeded number", "; ".join(found.impure) or None)
    if found.differs is None and not found.impure:
        _verdict("replay in another process", found.diverges)
    table = new_table("method", "calls", "mean us", "worst us", "")
    for time in found.times:
        slow = "slow: about 10 is usual" if time.slow else ""
        table.add_row(
            time.method, f"{time.calls:,}", f"{time.mean_us:.1f}", f"{time.worst_us:.0f}", slow
        )
    show(table)


def _verdict(what: str, fault: str | None) -> None:
    click.echo(f"{'ok' if fault is None else 'FAILED':<7}{what}{f': {fault}' if fault else ''}")
