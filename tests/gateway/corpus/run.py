"""Asks two servers the same, and says where the second answers otherwise than the first."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.gateway.corpus.answers import Answer, ask_all
from tests.gateway.corpus.compare import Difference, chunks, compare, places, without
from tests.gateway.corpus.request import Request

AT_ONCE: Final = 4
AGAIN: Final = 8
CUTS: Final = (2, 3, 5, 11)
"""Tokens of a chunk; a machine that is busy sends more than one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A request, the first server's answer, and those of the second."""

    request: Request
    expected: Answer
    varying: tuple[str, ...]
    """Fields in which the first server's own answers differ; they are not compared."""
    alone: Answer
    """Of the second server, asked by nobody else."""
    among: Answer
    """Of the second server, asked by others too."""

    @property
    def counts(self) -> bool:
        """Whether a client can expect this answer: the first server neither fails nor varies."""
        return 200 <= self.expected.status < 500 and "status" not in self.varying

    @property
    def of_alone(self) -> list[Difference]:
        """Where the answer differs that came alone."""
        return self._differences(self.alone)

    @property
    def of_among(self) -> list[Difference]:
        """Where the answer differs that came among others."""
        return self._differences(self.among)

    @property
    def equal(self) -> bool:
        """Whether both answers are those of the first server."""
        return not self.of_alone and not self.of_among

    @property
    def chunks(self) -> tuple[int | None, int | None]:
        """Events of the first server's stream, and of the second's, alone."""
        return chunks(self.expected), chunks(self.alone)

    def _differences(self, answer: Answer) -> list[Difference]:
        return without(_compare(self.request, self.expected, answer), self.varying)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All requests of a group."""

    group: str
    compared: tuple[Compared, ...]
    took_s: float

    @property
    def counted(self) -> list[Compared]:
        """Those that the first server did not fail at."""
        return [each for each in self.compared if each.counts]

    @property
    def unequal(self) -> list[Compared]:
        """Those of them that the second server answered otherwise."""
        return [each for each in self.counted if not each.equal]


def compare_servers(
    group: str, requests: Sequence[Request], *, reference: str, other: str
) -> Outcome:
    """Ask both URLs everything: one request at a time, then several at once.

    The reference is asked in both ways, too, so that fields that vary by themselves are known.
    What the other answers otherwise it is asked again, several times at once, and with streams of
    several tokens a chunk: some parsers of vLLM depend on where a busy machine cuts a stream.
    """
    began_s = time.monotonic()
    asyncio.run(_warm_up(reference))
    first = asyncio.run(ask_all(reference, requests))
    own = asyncio.run(_crowd(reference, requests))
    found = list(
        zip(
            asyncio.run(ask_all(other, requests)),
            asyncio.run(_crowd(other, requests)),
            strict=True,
        )
    )
    compared = [
        _compared(request, expected, (again,), answers)
        for request, expected, again, answers in zip(requests, first, own, found, strict=True)
    ]
    for n, each in enumerate(compared):
        if each.counts and not each.equal:
            more = [*[each.request] * AGAIN, *_cut_elsewhere(each)]
            again = asyncio.run(ask_all(reference, more, at_once=AGAIN))
            compared[n] = _compared(each.request, each.expected, (own[n], *again), found[n])
    return Outcome(group=group, compared=tuple(compared), took_s=time.monotonic() - began_s)


def _compared(
    request: Request, expected: Answer, own: Sequence[Answer], found: Sequence[Answer]
) -> Compared:
    """Answers of the first server, `own` its further ones, and two of the second."""
    varying = places(
        difference for answer in own for difference in _compare(request, expected, answer)
    )
    alone, among = found
    return Compared(
        request=request, expected=expected, varying=tuple(varying), alone=alone, among=among
    )


def _cut_elsewhere(each: Compared) -> list[Request]:
    """The same request with chunks of several tokens, if its answer streams."""
    if not each.expected.streams:
        return []
    return [replace(each.request, content=_with_interval(each.request, cut)) for cut in CUTS]


def _with_interval(request: Request, cut: int) -> bytes:
    return json.dumps({**request.body, "stream_interval": cut}).encode()


async def _crowd(url: str, requests: Sequence[Request]) -> list[Answer]:
    """Ask several at once, and then those that are asked alone."""
    order = sorted(range(len(requests)), key=lambda n: requests[n].alone)
    crowd = [n for n in order if not requests[n].alone]
    answers = await ask_all(url, [requests[n] for n in crowd], at_once=AT_ONCE)
    answers += await ask_all(url, [requests[n] for n in order[len(crowd) :]])
    of = dict(zip(order, answers, strict=True))
    return [of[n] for n in range(len(requests))]


def _compare(request: Request, expected: Answer, found: Answer) -> list[Difference]:
    return compare(expected, found, own_id=request.own_id)


async def _warm_up(url: str) -> None:
    """Let a server compile what it compiles for its first log-probs and forms."""
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 1,
        "structured_outputs": {"regex": "a+"},
    }
    await ask_all(url, [Request.of("/v1/completions", body)])
