"""`heddle policies`: what there is to choose from."""

import json

import rich_click as click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines")
def policies(as_json: bool) -> None:
    """List presets and the parts they are made of, one line each, and models with a profile."""
    from heddle.cli.show import lines
    from heddle_core.presets import PARTS, PRESETS, about, installed_policies
    from heddle_sim.profile_files import known_profiles

    presets = {name: about(name) for name in PRESETS}
    installed = [name for name in installed_policies() if name not in presets]
    profiles: dict[str, list[str]] = {}
    for model, gpu in known_profiles():
        profiles.setdefault(model, []).append(gpu)
    if as_json:
        parts = {kind: dict(names) for kind, names in PARTS.items()}
        found = {"presets": presets, "installed": installed, "parts": parts, "profiles": profiles}
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    lines("presets", presets)
    if installed:
        lines("installed", dict.fromkeys(installed, ""))
    for kind, names in PARTS.items():
        lines(f"parts: {kind}", names)
    lines("profiles", {model: ", ".join(gpus) for model, gpus in profiles.items()})
