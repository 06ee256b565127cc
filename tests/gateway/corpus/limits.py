"""Requests about how long an answer may be, and where it stops."""

from tests.gateway.corpus.request import ABSENT, Requests

CONTEXT: int = 2048
"""Tokens of the engines' context."""
FRAME: int = len("<user>" + "\n" + "<assistant>")
"""Tokens that the model's chat template adds to one message of a user; a byte is a token."""
END_OF_TEXT = 0
SENTENCE = "the quick brown fox jumps over"


def lengths(seed: int, model: str) -> Requests:
    """`max_tokens` and its kin, and prompts at the edge of the context."""
    made = Requests("lengths", seed=seed, model=model)
    for limit in (1, 2, 16, 0, -1, -7, 2.0, 2.5, "7", "seven", True, None, [3], 10**6, 2**70):
        made.both(f"max_tokens {limit!r}", max_tokens=limit)
    for limit in (5, 0, -1, 1.5, None, "4"):
        made.chat(
            f"max_completion_tokens {limit!r}", max_tokens=ABSENT, max_completion_tokens=limit
        )
    made.chat("both limits, the new one shorter", max_tokens=9, max_completion_tokens=4)
    made.chat("both limits, the new one longer", max_tokens=4, max_completion_tokens=9)
    made.chat("both limits, the new one null", max_tokens=4, max_completion_tokens=None)
    made.text("max_completion_tokens in a completion", max_completion_tokens=3)
    made.text("max_tokens absent", max_tokens=ABSENT, stream=False)
    made.text("max_tokens absent, streamed", max_tokens=ABSENT, stream=True)
    made.text("max_tokens absent, ids", prompt=[*range(60, 90)], max_tokens=ABSENT)
    for left in (24, 1, 0, -1, -500):
        content = made.words(1) + "x" * (CONTEXT - FRAME - left)
        content = content[: CONTEXT - FRAME - left]
        messages = [{"role": "user", "content": content}]
        ids = [3 + n % 250 for n in range(CONTEXT - left)]
        made.chat(f"max_tokens absent, {left} tokens left", messages=messages, max_tokens=ABSENT)
        made.text(f"max_tokens absent, {left} tokens left, ids", prompt=ids, max_tokens=ABSENT)
        for asked, how in ((left, "exactly"), (left + 1, "one beyond")):
            if left > 0:
                name = f"{left} tokens left, {how}"
                made.chat(f"{name}, chat", messages=messages, max_tokens=asked, ignore_eos=True)
                made.text(f"{name}, ids", prompt=ids, max_tokens=asked, ignore_eos=True)
    for kept in (-1, 1, 8, 0, CONTEXT, CONTEXT + 1, -2, "8"):
        made.both(f"truncate_prompt_tokens {kept!r}", truncate_prompt_tokens=kept)
    made.text("too long, truncated", prompt=[9] * 3000, truncate_prompt_tokens=64)
    made.text("truncated on the left", truncate_prompt_tokens=9, truncation_side="left")
    made.chat("truncated on the right", truncate_prompt_tokens=9, truncation_side="right")
    made.chat("truncated in the middle", truncate_prompt_tokens=9, truncation_side="middle")
    for least in (0, 5, 12, 13, -1, "3"):
        made.both(f"min_tokens {least!r}", min_tokens=least)
    return made


def stops(seed: int, model: str) -> Requests:
    """Stop strings, stop tokens and the end of text."""
    made = Requests("stops", seed=seed, model=model)
    said = {"structured_outputs": {"choice": [SENTENCE]}, "max_tokens": 60}
    for name, stop in (
        ("string", "brown"),
        ("list of one", ["brown"]),
        ("several, the later one first in the list", ["fox", "quick"]),
        ("over a space", "k b"),
        ("the first character", "t"),
        ("the whole text", SENTENCE),
        ("the last character", "r"),
        ("not matched", "zebra"),
        ("begins like the text's end", "over the"),
        ("empty list", []),
        ("null", None),
    ):
        made.ways(f"stop {name}", stop=stop, **said)
        made.text(f"stop {name}, text", stop=stop, **said)
    for stop in ("", [""], 5, [5], {"a": 1}, ["a", None], ["a"] * 65):
        made.both(f"stop is {str(stop)[:20]!r} of {len(str(stop))}", stop=stop)
    made.both("stop inside a token", stop="used")
    made.both("stop over two tokens", stop="><|")
    made.both("stop over two tokens, whole words", stop=["zebra", "|><|un"], max_tokens=30)
    for stop in ("brown", "n f", ["zebra", "fox"], SENTENCE):
        made.ways(f"stop {stop!r} included", stop=stop, include_stop_str_in_output=True, **said)
        made.text(
            f"stop {stop!r} included, text", stop=stop, include_stop_str_in_output=True, **said
        )
    made.text("stop with log-probs", stop="brown", logprobs=1, **said)
    made.ways("stop with log-probs, chat", stop="brown", logprobs=True, top_logprobs=1, **said)
    made.ways("stop with ids", stop="brown", return_token_ids=True, **said)
    made.text("stop with ids, text", stop="brown", return_token_ids=True, stream=True, **said)
    made.both("stop before min_tokens", stop="the", min_tokens=8, **said)

    always = {"logit_bias": {"300": 100}}
    for name, fields in (
        ("of the only token", {"stop_token_ids": [300]}),
        ("of another token", {"stop_token_ids": [301]}),
        ("of a token and its text", {"stop_token_ids": [300], "include_stop_str_in_output": True}),
        ("after min_tokens", {"stop_token_ids": [300], "min_tokens": 3}),
        ("with ignore_eos", {"stop_token_ids": [300], "ignore_eos": True}),
        ("with ids", {"stop_token_ids": [300], "return_token_ids": True}),
    ):
        made.both(f"stop_token_ids {name}", **always, **fields)
    for ids in ([], None, ["300"], [-1], [10**6], 300, [2.5]):
        made.both(f"stop_token_ids {ids!r}", stop_token_ids=ids, **always)

    at_once = {"logit_bias": {str(END_OF_TEXT): 100}}
    for name, fields in (
        ("at once", {}),
        ("ignored", {"ignore_eos": True}),
        ("ignored and shown", {"ignore_eos": True, "skip_special_tokens": False}),
        ("shown", {"skip_special_tokens": False}),
        ("as stop token, shown", {"stop_token_ids": [END_OF_TEXT], "skip_special_tokens": False}),
        ("included", {"include_stop_str_in_output": True, "skip_special_tokens": False}),
        ("after three", {"min_tokens": 3}),
        ("after three, with log-probs", {"min_tokens": 3, "logprobs": 1}),
        ("with ids", {"min_tokens": 2, "return_token_ids": True}),
        ("in no spaces", {"ignore_eos": True, "spaces_between_special_tokens": False}),
        (
            "shown in no spaces",
            {
                "ignore_eos": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            },
        ),
    ):
        chat = fields | ({"logprobs": True, "top_logprobs": 1} if "logprobs" in fields else {})
        made.chat(f"end of text {name}, chat", **at_once, **chat)
        made.text(f"end of text {name}, text", **at_once, **fields)
    only = {"allowed_token_ids": [END_OF_TEXT, 70]}
    made.both("end of text or a letter", **only)
    made.both("end of text as the only token", allowed_token_ids=[END_OF_TEXT])
    for value in ("yes", 1, None):
        made.both(f"ignore_eos {value!r}", ignore_eos=value, max_tokens=4)
    made.both("skip_special_tokens true", skip_special_tokens=True)
    made.both("the end of a stop string by a special token", stop="<|endof", **at_once)
    return made
