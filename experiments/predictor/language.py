"""A causal language model with a regression head, as in the Heddle paper (arXiv 2603.28101).

The paper fine-tunes a model of 0.6 billion parameters on (context, remaining length) pairs. Here
any folder of a causal language model can be the base. The inputs of the head are the model's last
state and the row of features of the other models, so siblings count here too. Its outputs are
increasing quantiles. The context holds the texts of a trajectory where they are given; otherwise it
states sizes and tools in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from experiments.predictor.contexts import Texts, context_of, read_texts
from experiments.predictor.recurrent import FARTHEST
from experiments.predictor.sequence import shifted
from heddle_predict.corpus import Source, check_groups, vocabulary_of
from heddle_predict.errors import PredictError
from heddle_predict.examples import Examples, examples
from heddle_predict.model import Floats, Vocabulary
from heddle_predict.play import Pace
from heddle_predict.quantiles import LEVELS
from heddle_trace.schema import TrajectoryScript


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

    base: Any
    tokenizer: Any
    hidden: Any
    head: Any
    centre: Floats
    spread: Floats
    context_tokens: int

    def outputs(self, contexts: Sequence[str], rows: Floats) -> Any:
        """Rising quantiles, (contexts, levels)."""
        device = self.base.device
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A fine-tuned language model with its head."""

    vocabulary: Vocabulary
    network: _Network
    shifts: Floats
    error: float
    """Weighted root mean squared error of the logarithm, on groups left out."""

    def answer(
        self, source: Source, pace: Pace, texts: Sequence[Path] = ()
    ) -> tuple[Examples, Floats]:
        """Play a source; return its questions with quantiles of the remaining tokens."""
        questions = examples(source.scripts, self.vocabulary, pace)
        contexts = _contexts(questions, source.scripts, read_texts(texts))
        found = _answers(self.network, contexts, questions.rows) + self.shifts
        logs = np.clip(found, -12.0, 12.0) + questions.survival[:, None]
        return questions, np.maximum(np.exp(logs), 1.0)


def fit_language(
    sources: Sequence[Source],
    *,
    base: Path,
    texts: Sequence[Path],
    seed: int,
    settings: LanguageFit | None = None,
) -> LanguageModel:
    """Fine-tune the language model in the folder `base` on traces.

    Raises:
        PredictError: the folder holds no causal language model with safe weights, or the traces
            have too few groups.
    """
    settings = settings or LanguageFit()
    check_groups(sources)
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
            base,
            settings,
            centre=seen.rows[~held].mean(axis=0),
            spread=np.where(spread > 1e-6, spread, 1.0),
        )
        _train(network, seen, contexts, np.flatnonzero(~held), rng, settings)
    checking = np.flatnonzero(held)
    found = _answers(network, [contexts[i] for i in checking], seen.rows[checking])
    shifts, error = shifted(seen.targets[checking], found, seen.weights[checking])
    return LanguageModel(vocabulary=vocabulary, network=network, shifts=shifts, error=error)


def _contexts(questions: Examples, scripts: Sequence[TrajectoryScript], texts: Texts) -> list[str]:
    return [
        context_of(scripts[script], int(step), bool(queued), texts)
        for script, step, queued in zip(
            questions.script, questions.step, questions.queued, strict=True
        )
    ]


def _begun(base: Path, settings: LanguageFit, centre: Floats, spread: Floats) -> _Network:
    model, tokenizer = _opened(base)
    nn, width = torch.nn, model.config.hidden_size
    hidden = nn.Linear(width + len(centre), settings.hidden)
    head = nn.Linear(settings.hidden, len(LEVELS))
    with torch.no_grad():  # begins at survival's estimate with quantiles a little apart
        head.weight.mul_(0.1)
        head.bias.copy_(torch.tensor([-1.5, *[-0.7] * (len(LEVELS) - 1)]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limit = getattr(model.config, "max_position_embeddings", settings.context_tokens)
    return _Network(
        base=model.to(device),
        tokenizer=tokenizer,
        hidden=hidden.to(device),
        head=head.to(device),
        centre=centre,
        spread=spread,
        context_tokens=min(settings.context_tokens, limit),
    )


def _opened(folder: Path) -> tuple[Any, Any]:
    """Open a folder of a model: only its own files, weights without code, no download."""
    if not (folder / "config.json").is_file():
        raise PredictError(
            f"{folder}: not a folder of a language model (it has no config.json); give one that "
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
        raise PredictError(f"{folder}: transformers cannot load it: {said}") from None
    return model, tokenizer


def _train(
    network: _Network,
    seen: Examples,
    contexts: Sequence[str],
    lines: Any,
    rng: np.random.Generator,
    settings: LanguageFit,
) -> None:
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
    with torch.no_grad():
        for i in range(0, len(contexts), 32):
            out = network.outputs(contexts[i : i + 32], rows[i : i + 32])
            found.append(out.double().cpu().numpy())
    return np.concatenate(found)
