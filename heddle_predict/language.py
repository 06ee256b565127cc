"""A causal language model with a regression head, as in the Heddle paper (arXiv 2603.28101).

The paper fine-tunes a model of 0.6 billion parameters on (context, remaining length) pairs. Here
any folder of a causal language model can be the base. The inputs of the head are the model's last
state and the row of features of the other models, so siblings count here too. Its outputs are
increasing quantiles. The context holds the texts of a trajectory where they are given; otherwise it
states sizes and tools in words.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from heddle_predict.artefact import Artefact, leaves_folder, no_path
from heddle_predict.contexts import Texts, context_of, read_texts
from heddle_predict.corpus import Source, check_groups, vocabulary_of
from heddle_predict.errors import PredictError
from heddle_predict.examples import Examples, examples
from heddle_predict.fit import artefact_of
from heddle_predict.model import Floats
from heddle_predict.optional import needed
from heddle_predict.play import Pace
from heddle_predict.quantiles import LEVELS, shifted
from heddle_predict.recurrent import FARTHEST
from heddle_trace.schema import TrajectoryScript

_BACKBONE: Final = "backbone/"
_WHAT: Final = "the language model"
_HEAD: Final = ("hidden_weight", "hidden_bias", "head_weight", "head_bias", "centre", "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageFit:
    """How a language model is fine-tuned."""

    epochs: int = 2
    batch: int = 8
    base_rate: float = 2e-5
    head_rate: float = 1e-3
    hidden: int = 64
    most_questions: int = 20_000
    """Drawn from all questions of the traces; the rest is left out."""
    context_tokens: int = 1_024
    left_out: float = 0.2


@dataclass(slots=True)
class _Network:
    """Base, tokenizer and head, on one device."""

    torch: Any
    base: Any
    tokenizer: Any
    hidden: Any
    head: Any
    centre: Floats
    spread: Floats
    context_tokens: int

    def outputs(self, contexts: Sequence[str], rows: Floats) -> Any:
        """Rising quantiles, (contexts, levels)."""
        torch, device = self.torch, self.base.device
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in contexts]
        # The latest text is at the end; the prompt, at the front, is cut first.
        ids = [found[-self.context_tokens :] or [0] for found in ids]
        longest = max(map(len, ids))
        tokens = torch.zeros((len(ids), longest), dtype=torch.long, device=device)
        mask = torch.zeros_like(tokens)
        for i, found in enumerate(ids):
            tokens[i, : len(found)] = torch.tensor(found, device=device)
            mask[i, : len(found)] = 1
        states = self.base(input_ids=tokens, attention_mask=mask).last_hidden_state
        last = states[torch.arange(len(ids)), mask.sum(dim=1) - 1].float()
        scaled = np.clip((rows - self.centre) / self.spread, -FARTHEST, FARTHEST)
        given = torch.from_numpy(scaled.astype(np.float32)).to(device)
        seen = torch.relu(self.hidden(torch.cat((last, given), dim=1)))
        out = self.head(seen)
        rises = torch.nn.functional.softplus(out[:, 1:])
        return torch.cumsum(torch.cat((out[:, :1], rises), dim=1), dim=1)


def fit_language(
    sources: Sequence[Source],
    *,
    base: Path,
    texts: Sequence[Path],
    seed: int,
    command: str,
    settings: LanguageFit | None = None,
) -> Artefact:
    """Fine-tune the language model in the folder `base` on traces.

    Raises:
        PredictError: torch or transformers is absent, the folder holds no causal language model
            with safe weights, or the traces have too few groups.
    """
    settings = settings or LanguageFit()
    check_groups(sources)
    torch = needed("torch", _WHAT)
    needed("transformers", _WHAT)
    vocabulary = vocabulary_of(sources)
    parts = [examples(source.scripts, vocabulary, Pace()) for source in sources]
    seen = Examples.joined(parts)
    rng = np.random.default_rng([seed, 7])
    seen = seen.where(np.sort(rng.permutation(len(seen))[: settings.most_questions]))
    scripts = [script for source in sources for script in source.scripts]
    contexts = _contexts(seen, scripts, read_texts(texts))
    groups = rng.permutation(np.unique(seen.group))
    held = np.isin(seen.group, groups[: max(1, round(settings.left_out * len(groups)))])
    spread = seen.rows[~held].std(axis=0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = _begun(
            torch,
            base,
            settings,
            centre=seen.rows[~held].mean(axis=0),
            spread=np.where(spread > 1e-6, spread, 1.0),
        )
        _train(network, seen, contexts, np.flatnonzero(~held), rng, settings)
    checking = np.flatnonzero(held)
    found = _answers(network, [contexts[i] for i in checking], seen.rows[checking])
    shifts, error = shifted(seen.targets[checking], found, seen.weights[checking])
    return artefact_of(
        sources,
        kind="llm",
        seed=seed,
        command=command,
        vocabulary=vocabulary,
        examples=int((~held).sum()),
        error=error,
        settings={
            "base": base.name,
            "epochs": str(settings.epochs),
            "context_tokens": str(settings.context_tokens),
            "texts": ", ".join(path.name for path in texts) or "none",
        },
        arrays={"shifts": shifts, **_head_of(network)},
        files=_files_of(network),
    )


def answering_language(
    artefact: Artefact, label: Path, texts: Sequence[Path]
) -> Callable[[Source, Pace], tuple[Examples, Floats]]:
    """Load a language model from a model file; see `answering.Answer`.

    Raises:
        PredictError: the file is damaged, or torch or transformers is absent.
    """
    torch = needed("torch", _WHAT)
    needed("transformers", _WHAT)
    written = read_texts(texts)
    network = _loaded(torch, artefact, label)
    vocabulary, shifts = artefact.header.vocabulary(), artefact.arrays["shifts"]

    def answer(source: Source, pace: Pace) -> tuple[Examples, Floats]:
        questions = examples(source.scripts, vocabulary, pace)
        contexts = _contexts(questions, source.scripts, written)
        found = _answers(network, contexts, questions.rows) + shifts
        logs = np.clip(found, -12.0, 12.0) + questions.survival[:, None]
        return questions, np.maximum(np.exp(logs), 1.0)

    return answer


def _contexts(questions: Examples, scripts: Sequence[TrajectoryScript], texts: Texts) -> list[str]:
    return [
        context_of(scripts[script], int(step), bool(queued), texts)
        for script, step, queued in zip(
            questions.script, questions.step, questions.queued, strict=True
        )
    ]


def _begun(
    torch: Any, base: Path, settings: LanguageFit, centre: Floats, spread: Floats
) -> _Network:
    model, tokenizer = _opened(base, str(base))
    nn, width = torch.nn, model.config.hidden_size
    hidden = nn.Linear(width + len(centre), settings.hidden)
    head = nn.Linear(settings.hidden, len(LEVELS))
    with torch.no_grad():  # begins at survival's estimate with quantiles a little apart
        head.weight.mul_(0.1)
        head.bias.copy_(torch.tensor([-1.5, *[-0.7] * (len(LEVELS) - 1)]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limit = getattr(model.config, "max_position_embeddings", settings.context_tokens)
    return _Network(
        torch=torch,
        base=model.to(device),
        tokenizer=tokenizer,
        hidden=hidden.to(device),
        head=head.to(device),
        centre=centre,
        spread=spread,
        context_tokens=min(settings.context_tokens, limit),
    )


def _opened(folder: Path, label: str) -> tuple[Any, Any]:
    """Open a folder of a model: only its own files, weights without code, no download."""
    transformers = needed("transformers", _WHAT)
    if not (folder / "config.json").is_file():
        raise PredictError(
            f"{label}: not a folder of a language model (it has no config.json); give one that "
            "transformers can load, with its tokenizer and model.safetensors"
        )
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model = transformers.AutoModel.from_pretrained(
            folder, use_safetensors=True, dtype="float32", **options
        )
    except Exception as error:  # transformers raises errors of many types
        said = str(error).partition("\n")[0]
        raise PredictError(f"{label}: transformers cannot load it: {said}") from None
    return model, tokenizer


def _train(
    network: _Network,
    seen: Examples,
    contexts: Sequence[str],
    lines: Any,
    rng: np.random.Generator,
    settings: LanguageFit,
) -> None:
    torch = network.torch
    heads = [*network.hidden.parameters(), *network.head.parameters()]
    optimiser = torch.optim.AdamW(
        [
            {"params": list(network.base.parameters()), "lr": settings.base_rate},
            {"params": heads, "lr": settings.head_rate},
        ]
    )
    levels = torch.tensor(LEVELS, device=network.base.device)
    targets = seen.targets.astype(np.float32)
    weights = (seen.weights / seen.weights[lines].mean()).astype(np.float32)
    network.base.train()
    for _ in range(settings.epochs):
        order = rng.permutation(lines)
        for i in range(0, len(order), settings.batch):
            chosen = order[i : i + settings.batch]
            out = network.outputs([contexts[j] for j in chosen], seen.rows[chosen])
            wrong = torch.from_numpy(targets[chosen]).to(out.device)[:, None] - out
            pinball = torch.maximum(levels * wrong, (levels - 1.0) * wrong).mean(dim=1)
            loss = (pinball * torch.from_numpy(weights[chosen]).to(out.device)).mean()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(heads, 1.0)
            torch.nn.utils.clip_grad_norm_(network.base.parameters(), 1.0)
            optimiser.step()


def _answers(network: _Network, contexts: Sequence[str], rows: Floats) -> Floats:
    network.base.eval()
    found = [np.empty((0, len(LEVELS)))]
    with network.torch.no_grad():
        for i in range(0, len(contexts), 32):
            out = network.outputs(contexts[i : i + 32], rows[i : i + 32])
            found.append(out.double().cpu().numpy())
    return np.concatenate(found)


def _head_of(network: _Network) -> dict[str, Any]:
    parts = {
        "hidden_weight": network.hidden.weight,
        "hidden_bias": network.hidden.bias,
        "head_weight": network.head.weight,
        "head_bias": network.head.bias,
    }
    arrays = {name: part.detach().cpu().numpy() for name, part in parts.items()}
    context = np.array([network.context_tokens])
    return {**arrays, "centre": network.centre, "spread": network.spread, "context": context}


def _files_of(network: _Network) -> dict[str, bytes]:
    """The fine-tuned base as files: configuration, tokenizer, weights as safetensors."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network.base.save_pretrained(folder)
        network.tokenizer.save_pretrained(folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {f"{_BACKBONE}{p.relative_to(folder).as_posix()}": p.read_bytes() for p in paths}


@contextmanager
def _unpacked(files: Mapping[str, bytes], label: Path) -> Iterator[Path]:
    """Write a model's files into a temporary folder, or none if a path would leave it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        targets = {name: (folder / name.removeprefix(_BACKBONE)).resolve() for name in files}
        for name, target in targets.items():
            if leaves_folder(name) or not target.is_relative_to(folder):
                raise PredictError(no_path(label, name))
        for name, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[name])
        yield folder


def _loaded(torch: Any, artefact: Artefact, label: Path) -> _Network:
    arrays, nn = artefact.arrays, torch.nn
    lacking = [name for name in (*_HEAD, "context", "shifts") if name not in arrays]
    if lacking:
        raise PredictError(f"{label}: damaged: it holds no array {lacking[0]!r}")
    with _unpacked(artefact.files, label) as folder:
        model, tokenizer = _opened(folder, str(label))
    columns = len(artefact.header.features)
    width, levels = arrays["hidden_weight"].shape[0], len(artefact.header.levels)
    shapes = {
        "hidden_weight": (width, model.config.hidden_size + columns),
        "hidden_bias": (width,),
        "head_weight": (levels, width),
        "head_bias": (levels,),
        "centre": (columns,),
        "spread": (columns,),
        "shifts": (levels,),
    }
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise PredictError(f"{label}: damaged: {name} has shape {arrays[name].shape}")
    hidden, head = nn.Linear(shapes["hidden_weight"][1], width), nn.Linear(width, levels)
    with torch.no_grad():
        for part, name in ((hidden, "hidden"), (head, "head")):
            part.weight.copy_(torch.from_numpy(arrays[f"{name}_weight"]))
            part.bias.copy_(torch.from_numpy(arrays[f"{name}_bias"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _Network(
        torch=torch,
        base=model.to(device),
        tokenizer=tokenizer,
        hidden=hidden.to(device),
        head=head.to(device),
        centre=arrays["centre"],
        spread=arrays["spread"],
        context_tokens=int(arrays["context"][0]),
    )
