"""`heddle policies`: presets, parts and models."""

import json

import rich_click as click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines")
def policies(as_json: bool) -> None:
    """List presets and the parts they are made of, one line each, and models with a profile."""
    from heddle.cli.show import lines
    from heddle.knowledge import LEARNED, ORACLES
    from heddle.plugins import installed_policies
    from heddle_core.parts.table import KINDS, PARTS
    from heddle_core.presets import PRESETS, about
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
