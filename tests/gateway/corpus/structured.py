"""Requests whose answers have to have a form, and such that no answer can have."""

from typing import Any

from tests.gateway.corpus.request import Requests, token_of

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Zoë"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DENSE = {str(token_of(byte)): -100 for byte in b" \t\n\r"}
"""A bias against white space, of which a random model never ends."""
_LIST: dict[str, Any] = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
_EBNF = 'root ::= "yes " ("please" | "now")'
_LARK = 'start: "go " ("left" | "right")'
_FORMS: tuple[tuple[str, Any], ...] = (
    ("json", PERSON),
    ("json", '{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}'),
    ("json", _LIST),
    ("json", {"const": "fixed"}),
    ("json_object", True),
    ("regex", r"[a-f]{3}-\d{2}"),
    ("regex", "(left|right) (up|down)"),
    ("regex", "é+🙂"),
    ("regex", ""),
    ("choice", ["red", "green", "blue"]),
    ("choice", ["one"]),
    ("choice", ["a", "ab", "abc"]),
    ("choice", ["né", "日本語", "🙂"]),
    ("grammar", _EBNF),
    ("grammar", _LARK),
)
_WRONG: tuple[tuple[str, Any], ...] = (
    ("regex", "("),
    ("regex", "[z-a]"),
    ("regex", 5),
    ("json", {"type": "nonsense"}),
    ("json", "{not json"),
    ("json", 5),
    ("json", {"type": "object", "properties": 5}),
    ("choice", []),
    ("choice", "red"),
    ("choice", [1, 2]),
    ("grammar", "root ::= ("),
    ("grammar", "nothing"),
    ("grammar", ""),
    ("structural_tag", "{}"),
    ("structural_tag", ""),
    ("unknown", "x"),
)
_FORMATS: tuple[Any, ...] = (
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    {"type": "json_schema", "json_schema": {"name": "list", "schema": _LIST}},
    {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nonsense"}}},
    {"type": "json_schema", "json_schema": {"schema": PERSON}},
    {"type": "json_schema", "json_schema": {"name": "none"}},
    {"type": "json_schema"},
    {"type": "structural_tag", "format": {"type": "const_string", "value": "tagged"}},
    {"type": "structural_tag", "format": {"type": "nonsense"}},
    {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": _LIST, "end": "</a>"}],
        "triggers": ["<a>"],
    },
    {"type": "nonsense"},
    {},
    "json_object",
    None,
)


def structured(seed: int, model: str) -> Requests:
    """`structured_outputs` and `response_format`, right and wrong."""
    made = Requests("structured", seed=seed, model=model)
    long = {"max_tokens": 40}
    dense = long | {"logit_bias": DENSE}
    for n, (kind, form) in enumerate(_FORMS):
        made.ways(f"{n}: {kind}", structured_outputs={kind: form}, **dense)
        made.text(f"{n}: {kind}, text", structured_outputs={kind: form}, **long)
    for n, (kind, form) in enumerate(_WRONG):
        made.ways(f"wrong {n}: {kind}", structured_outputs={kind: form}, **long)
        made.text(f"wrong {n}: {kind}, text", structured_outputs={kind: form}, **long)
    for n, form in enumerate(_FORMATS):
        made.ways(f"response_format {n}", response_format=form, **dense)
        made.text(f"response_format {n}, text", response_format=form, **long)
    several = {"regex": "a+", "choice": ["a"]}
    made.both("regex and choice", structured_outputs=several)
    made.both("regex and grammar", structured_outputs={"regex": "a+", "grammar": _EBNF})
    made.both("json and json_object", structured_outputs={"json": PERSON, "json_object": True})
    made.both("no form", structured_outputs={})
    made.both("null form", structured_outputs=None)
    made.both(
        "the same in both fields",
        structured_outputs={"json": PERSON},
        response_format=_FORMATS[2],
        **long,
    )
    made.both(
        "cut inside", structured_outputs={"json": PERSON}, max_tokens=9, return_token_ids=True
    )
    made.both(
        "with log-probs",
        structured_outputs={"regex": "[a-c]{4}"},
        logprobs=1,
        top_logprobs=1,
    )
    made.both("of a draw", structured_outputs={"regex": "[a-z]{9}"}, temperature=1.0, seed=5)
    made.both("before min_tokens", structured_outputs={"choice": ["ab"]}, min_tokens=5)
    made.both("with ignore_eos", structured_outputs={"choice": ["ab"]}, ignore_eos=True)
    made.both(
        "whitespace", structured_outputs={"json": PERSON, "disable_any_whitespace": True}, **long
    )
    return made
