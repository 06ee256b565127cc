"""The configuration of a model by its path or its Hugging Face id, from the local cache first."""

import os
import re
from importlib import import_module
from pathlib import Path

from heddle_sim.config_fields import ModelConfigError
from heddle_sim.known_models import listed_config
from heddle_sim.model_config import model_shape, read_model_config
from heddle_sim.model_names import nearest_ids
from heddle_sim.model_shape import ModelShape, Precision

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_TIMEOUT_S = 2.0
"""Until the hub counts as out of reach."""


def find_model(model: str, *, precision: Precision | None = None) -> tuple[ModelShape, Path | None]:
    """Return a model's shape and the file it was read from; None for a configuration known here.

    `model` is a config.json, a folder with one, a known name, or a Hugging Face id: of the local
    cache, else downloaded where ``huggingface_hub`` is installed.

    Raises:
        ModelConfigError: nothing is found, or the configuration is not modelled.
    """
    path = Path(model).expanduser()
    if path.exists():
        return read_model_config(path, precision=precision), path
    if model.endswith(".json"):
        raise ModelConfigError(f"cannot read {model}: no such file")
    try:
        values, stated = listed_config(model)
    except KeyError:
        file = _cached(model) or _downloaded(model)
        return read_model_config(file, precision=precision), file
    name = model.rpartition("/")[2].lower()
    return model_shape(values, place=model, name=name, precision=precision or stated), None


def find_config(model: str) -> Path:
    """Return the config.json of a path or a Hugging Face id, whatever model it is of.

    Raises:
        ModelConfigError: nothing is found.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    if model.endswith(".json"):
        raise ModelConfigError(f"cannot read {model}: no such file")
    return _cached(model) or _downloaded(model)


def hub_cache() -> Path:
    """Folder in which ``huggingface_hub`` keeps models, by its variables of the environment."""
    own = os.environ.get("HF_HUB_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("HF_HOME")
    if base:
        return Path(base).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "huggingface" / "hub"


def _cached(model: str) -> Path | None:
    """Return the configuration in the local cache, of its main revision if that is there."""
    if not HUB_ID.fullmatch(model):
        return None
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        found = folder / "snapshots" / main.read_text(encoding="utf-8").strip() / "config.json"
        if found.is_file():
            return found
    return next(iter(sorted(folder.glob("snapshots/*/config.json"))), None)


def _downloaded(model: str) -> Path:
    near = nearest_ids(model) or nearest_ids("qwen3-8b")
    remedy = (
        "download config.json from the model's page and give its path, or take one known here: "
        f"{', '.join(near)} (all: heddle_sim/models.json)"
    )
    if not HUB_ID.fullmatch(model):
        raise ModelConfigError(
            f"{model}: no file or folder of this name, no Hugging Face id (organisation/name), and "
            f"no known model; {remedy}"
        )
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise ModelConfigError(
            f"{model} is not in the local cache {hub_cache()}, and huggingface_hub is not "
            f"installed; {remedy}"
        ) from None
    try:
        # A download alone would try for half a minute where there is no network.
        hub.get_hf_file_metadata(hub.hf_hub_url(model, "config.json"), timeout=HUB_TIMEOUT_S)
        return Path(hub.hf_hub_download(model, "config.json"))
    except Exception as e:  # Its errors depend on the HTTP client of its release.
        first = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ModelConfigError(
            f"{model} is not in the local cache {hub_cache()}, and cannot be downloaded ({first}); "
            f"{remedy}"
        ) from None
