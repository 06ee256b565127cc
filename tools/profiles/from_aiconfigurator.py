"""A profile of one model and GPU class from AIConfigurator's kernel times.

    python -m tools.profiles from-aiconfigurator --model NAME|DIR --gpu NAME -o FILE.json

As the shipped profiles were made: their fit, their host time, their transfer times.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from heddle.cli.options import NUMBERS
from heddle_calibrate.fit.from_aiconfigurator import EstimatorError, KernelSource, fit_shapes
from heddle_calibrate.fit.kernel_profile import TPS
from heddle_calibrate.profiles import encode_profile
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile


def layouts(
    tps: Sequence[int] = TPS, *, expert_parallel: bool = False, attention_dp: Sequence[int] = (1,)
) -> tuple[EngineShape, ...]:
    """Shapes of engines of these TP degrees, each with every number of data-parallel ranks.

    With `expert_parallel` the experts of engines with several GPUs are spread over them: as a
    further shape without ranks, and always with ranks.
    """
    plain = [EngineShape("", tp) for tp in tps] if 1 in attention_dp else []
    spread = [
        EngineShape("", tp, ep=tp * dp, dp=dp)
        for dp in attention_dp
        for tp in tps
        if expert_parallel and tp * dp > 1
    ]
    ranks = [EngineShape("", tp, dp=dp) for dp in attention_dp for tp in tps if dp > 1]
    return (*plain, *(spread if expert_parallel else ranks))


def profile_from_aiconfigurator(
    model: str,
    gpu: str,
    *,
    tps: Sequence[int] = TPS,
    expert_parallel: bool = False,
    attention_dp: Sequence[int] = (1,),
    backend: str = "vllm",
    backend_version: str | None = None,
    name: str | None = None,
) -> Profile:
    """Fit a profile of `model`, by a name of the package or as a folder with a
    ``config.json``, on a GPU class, in the precision of its configuration; see `layouts`.

    Raises:
        EstimatorError: as `fit_shapes`.
    """
    return fit_shapes(
        model,
        gpu,
        layouts(tps, expert_parallel=expert_parallel, attention_dp=attention_dp),
        KernelSource(backend=backend, backend_version=backend_version),
        name=name,
    )


@click.command("from-aiconfigurator")
@click.option("--model", required=True, help="Model: a name the package knows, or a model folder")
@click.option("--gpu", required=True, help="GPU class, as h200 or h200_sxm")
@click.option("--tp", "tps", type=NUMBERS, default="1,2,4,8", help="TP degrees")
@click.option("--ep", is_flag=True, help="Also with a layer's experts spread over all GPUs")
@click.option("--attention-dp", type=NUMBERS, default="1", help="Data-parallel ranks of attention")
@click.option("--backend", type=click.Choice(["vllm", "sglang"]), default="vllm")
@click.option("--backend-version", default=None, help="Of that engine [the package's current]")
@click.option("--name", default=None, help="Name of the model in the profile [from --model]")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="File to write")
def command(
    model: str,
    gpu: str,
    tps: tuple[int, ...],
    ep: bool,
    attention_dp: tuple[int, ...],
    backend: str,
    backend_version: str | None,
    name: str | None,
    out: Path,
) -> None:
    """Fit a profile of one model and GPU class to AIConfigurator's kernel times."""
    try:
        profile = profile_from_aiconfigurator(
            model,
            gpu,
            tps=tps,
            expert_parallel=ep,
            attention_dp=attention_dp,
            backend=backend,
            backend_version=backend_version,
            name=name,
        )
    except EstimatorError as e:
        raise click.ClickException(str(e)) from e
    out.write_bytes(encode_profile(profile))
    click.echo(out)
