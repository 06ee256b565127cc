"""Groups of requests, each for engines of one set-up."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from heddle_runtime.tiny_model import CHAT_TEMPLATE, SIZES, make_tiny_model
from tests.gateway.corpus import (
    bodies,
    details,
    interfaces,
    limits,
    reasoning,
    sampling,
    structured,
    tools,
)
from tests.gateway.corpus.request import Request

MODEL: Final = "tiny"
"""Name that the engines serve."""
_OF_MISTRAL: Final = ("mistral_common", "pydantic_extra_types", "pycountry")
"""vLLM's newer parsers import that of Mistral, and what it imports; its CPU set-up has none."""
_DETAILS: Final = "--enable-prompt-tokens-details"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Engines of one set-up, and what is asked of them."""

    name: str
    engines: int = 1
    options: tuple[str, ...] = ()
    """Of `vllm serve`, after those of all groups."""
    tokens: tuple[str, ...] = ()
    """Markers that are one token each."""
    template: str = ""
    """Follows the model's own chat template."""
    packages: tuple[str, ...] = ()
    """What vLLM's parser imports and its CPU wheel's set-up may lack."""
    ask: Callable[["Group", int], list[Request]]

    @property
    def lacks(self) -> str:
        """The first package that is missing; "" if none is."""
        return next((name for name in self.packages if find_spec(name) is None), "")

    @property
    def token_ids(self) -> Mapping[str, int]:
        """The markers' tokens: the vocabulary's last ones, which have no meaning of their own."""
        last = SIZES["small"].vocabulary
        return {marker: last - 1 - n for n, marker in enumerate(self.tokens)}

    def requests(self, seed: int = 0) -> list[Request]:
        """Return its requests; their names are unique."""
        return self.ask(self, seed)

    def make_model(self, folder: Path) -> Path:
        """Write the model; return its folder."""
        model = make_tiny_model(folder / "model", seed=1)
        if self.tokens:
            path = model / "tokenizer.json"
            path.write_text(json.dumps(_marked(json.loads(path.read_text()), self.token_ids)))
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE + self.template)
        return model


def part(requests: list[Request], share: float, *, seed: int) -> list[Request]:
    """Return a share of the requests, in their order."""
    chosen = random.Random(seed).sample(range(len(requests)), round(share * len(requests)))
    return [requests[n] for n in sorted(chosen)]


def _marked(tokenizer: dict, token_ids: Mapping[str, int]) -> dict:
    """Give tokens without a meaning the text of a marker, which is then never split."""
    vocabulary = tokenizer["model"]["vocab"]
    by_id = {token: text for text, token in vocabulary.items()}
    for marker, token in token_ids.items():
        del vocabulary[by_id[token]]
        vocabulary[marker] = token
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token, "content": marker, **flags})
    return tokenizer


def _main(group: Group, seed: int) -> list[Request]:
    lists = (
        limits.lengths(seed, MODEL),
        limits.stops(seed, MODEL),
        sampling.fields(seed, MODEL),
        details.logprobs(seed, MODEL),
        details.shown(seed, MODEL),
        structured.structured(seed, MODEL),
        bodies.unicode(seed, MODEL),
        bodies.messages(seed, MODEL),
        bodies.wrong(seed, MODEL),
        tools.unparsed(seed),
        interfaces.several(seed, MODEL),
        interfaces.others(seed, MODEL),
    )
    return [request for each in lists for request in each]


def _calls(group: Group, seed: int) -> list[Request]:
    made = tools.calls(seed, group.name, token_ids=group.token_ids)
    return [*made, *tools.choices(seed)]


def _parsed(name: str, *, options: tuple[str, ...] = (), packages: tuple[str, ...] = ()) -> Group:
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", name)
    return Group(
        name=name,
        options=(*parser, *options),
        tokens=tools.MARKUPS[name].tokens,
        packages=packages,
        ask=_calls,
    )


def _reasons(name: str, parser: str, *, tools_parser: str, packages: tuple[str, ...] = ()) -> Group:
    def ask(group: Group, seed: int) -> list[Request]:
        return list(reasoning.reasoning(seed, tools_parser, token_ids=group.token_ids))

    return Group(
        name=name,
        options=(
            *("--reasoning-parser", parser, _DETAILS),
            *("--enable-auto-tool-choice", "--tool-call-parser", tools_parser),
        ),
        tokens=tuple(dict.fromkeys((*reasoning.THINKING, *tools.MARKUPS[tools_parser].tokens))),
        template=reasoning.NO_THINKING,
        packages=packages,
        ask=ask,
    )


GROUPS: Final[Mapping[str, Group]] = {
    group.name: group
    for group in (
        Group(name="main", engines=2, options=(_DETAILS,), ask=_main),
        _parsed("hermes", options=(_DETAILS,)),
        _parsed("llama3_json"),
        _parsed("pythonic"),
        _parsed("granite4"),
        _parsed("deepseek_v31"),
        _reasons("reasoning", "deepseek_r1", tools_parser="hermes"),
        _parsed("qwen3_coder", packages=_OF_MISTRAL),
        _reasons("qwen3", "qwen3", tools_parser="qwen3_coder", packages=_OF_MISTRAL),
    )
}
