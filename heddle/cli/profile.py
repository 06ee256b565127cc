"""`heddle profile`: profiles that are shipped, and those that you make, measure, fit and check."""

import json
from pathlib import Path
from typing import Any

import rich_click as click

from heddle.cli.options import NUMBERS, settings_option, take_settings
from heddle.cli.profile_engine import check, fit, measure


@click.group()
def profile() -> None:
    """Times of engines: list those that are shipped, make one for any model, measure and check."""


for _verb in (measure, fit, check):
    profile.add_command(_verb)


@profile.command("from-config")
@click.argument("model", metavar="CONFIG.json|DIR|ORG/NAME")
@click.option("--gpu", required=True, help="GPU class, as h200")
@click.option("--tp", "tps", type=NUMBERS, default="1,2,4,8", show_default=True, help="TP degrees")
@settings_option
@click.option("-o", "--out", type=click.Path(path_type=Path), default=None, help="File to write")
@click.option("--force", is_flag=True, help="Replace the file if it exists")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
def from_config(
    settings: tuple[str, ...], out: Path | None, force: bool, as_json: bool, **given: Any
) -> None:
    """Make the profile of a model from its config.json.

    Times are a roofline of each operator: bytes and operations against the data sheet of the GPU
    class, with efficiencies fitted on kernel times of other models, plus the host time of the
    shipped profiles. Its cross-validated error is printed and kept in the file. Where
    aiconfigurator-core is installed and has the model, its kernel times are used instead.

    Layouts are those of cluster.expert_parallel and cluster.attention_dp; profile.precision,
    profile.kv_precision and profile.source say what is read of the configuration, and from where;
    profile.name how the model is called. Heads of drafts are that of its MTP layer, and an EAGLE-3
    head that profile.head names.
    """
    from heddle.cli.outputs import new_file, write
    from heddle.cli.show_profile import plain_config_profile, show_config_profile
    from heddle_calibrate.profiles import encode_profile
    from heddle_calibrate.roofline.from_config import ConfigRequest, profile_from_config

    config = take_settings(settings)
    if out is not None:
        new_file(out, force)
        if out.suffix != ".json":
            raise click.UsageError(f"--out {out}: a profile is named by a path that ends in .json")
    request = ConfigRequest(
        expert_parallel=config.cluster.expert_parallel == "on",
        attention_dp=config.cluster.attention_dp,
        precision=config.profile.precision,
        fp8_kv=config.profile.kv_precision == "fp8",
        source=config.profile.source,
        name=config.profile.name,
        head=config.profile.head,
        **given,
    )
    made = profile_from_config(request)
    if out is not None:
        write(out, encode_profile(made.profile))
    if as_json:
        click.echo(json.dumps({**plain_config_profile(made), "profile": str(out) if out else None}))
        return
    show_config_profile(made)
    if out is not None:
        ranks = made.profile.attention_dp
        layout = (
            f" --set cluster.attention_dp={ranks} --tp {made.profile.tps[0]}" if ranks > 1 else ""
        )
        click.echo(f"profile in {out}: use it as --model {out}{layout}")
    else:
        click.echo("nothing written: name a file with -o to use the profile as --model FILE")


@profile.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
def list_(as_json: bool) -> None:
    """List the shipped profiles: models, GPU classes, precision and layouts.

    (derived) marks classes whose times were computed from those of another class.
    """
    from heddle.cli.show_profile import show_profiles
    from heddle_calibrate.roofline.kv_precision import kv_dtype_of
    from heddle_sim.profile_files import known_profiles, load_profile

    profiles = [load_profile(*names) for names in known_profiles()]
    if not as_json:
        show_profiles(profiles)
        return
    rows = [
        {
            "model": p.model,
            "gpu": p.gpu,
            "derived": p.derived,
            "precision": p.source.precision,
            "kv_precision": kv_dtype_of(p),
            "layouts": list(p.tables),
        }
        for p in profiles
    ]
    click.echo(json.dumps({"schema": "heddle.profiles/1", "profiles": rows}))


@profile.command("show")
@click.argument("model")
@click.argument("gpu", default="")
def show_(model: str, gpu: str) -> None:
    """Show one profile: source, KV capacity, times of an iteration, and errors.

    MODEL is a name or a Hugging Face id, or a profile file. A model whose shape is known has a
    profile by the roofline where none is shipped.
    """
    from heddle.cli.show_profile import show_profile
    from heddle_calibrate.roofline.by_name import profile_by_name

    found = profile_by_name(model, gpu).of_version("")
    if model.endswith(".json") and gpu.lower() not in ("", found.gpu.lower()):
        raise click.UsageError(f"{model} is a profile of {found.gpu}, not of {gpu}")
    show_profile(found)
