"""Plain greedy decoding read off a speculative server, and outputs held against it.

A request with `prompt + output[:i]` and one new token is answered from the prefill: no draft, no verify
step, no K/V move is involved. So probing every prefix of an output gives what plain decoding of the same
model would have put at every position, teacher-forced on that output.

Two tokens are a near-tie when both are within `delta` of the plain model's top logit `z`: 1e-3 in float32,
2^(floor(log2 |z|) - 5) in bfloat16, twice that with an fp8 K/V cache. That the output's token is within
delta is shown by a second probe that adds delta to its logit: if it then wins, it was.
`z` itself cannot be read over HTTP (log-probabilities are relative to the normaliser). In bfloat16 it is
taken from the settings, else as 8, a size that language models' top logits exceed: too small a `z` can
only make the rule stricter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.acceptance.exchange import Ask, EndpointError, Generation

Isolation = Literal["salt", "flush", "none"]

FLOAT32_DELTA = 1e-3
ASSUMED_TOP_LOGIT = 8.0
NEAR_TIE_SHARE = 0.01

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """A prompt and the tokens that were generated for it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A position at which an output and plain decoding do not agree.

    Attributes:
        output: index of the output.
        position: index of the token in it.
        token: what was generated.
        plain: what plain decoding gives there.
        near_tie: whether the near-tie rule excuses it; None where the server takes no logit bias.
    """

    output: int
    position: int
    token: int
    plain: int
    near_tie: bool | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outputs held against plain decoding.

    Attributes:
        positions: tokens compared.
        differences: where they do not agree, near-ties included.
    """

    positions: int
    differences: tuple[Difference, ...]

    @property
    def near_ties(self) -> int:
        """Differences that are shown to be near-ties."""
        return sum(difference.near_tie is True for difference in self.differences)

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """Differences that are no near-ties."""
        return tuple(difference for difference in self.differences if difference.near_tie is False)

    @property
    def open(self) -> int:
        """Differences of which it could not be shown whether they are near-ties."""
        return sum(difference.near_tie is None for difference in self.differences)

    @property
    def too_many(self) -> bool:
        """Whether more positions differ than near-ties can explain (1%)."""
        return len(self.differences) > NEAR_TIE_SHARE * self.positions

    @property
    def equal(self) -> bool:
        """Whether the outputs equal plain decoding by the near-tie rule."""
        return not self.wrong and not self.open and not self.too_many


def near_tie_delta(dtype: str | None, *, top_logit: float | None = None, fp8_kv_cache: bool = False) -> float:
    """The rule's delta; an unknown number format is held to float32's, the strictest."""
    delta = FLOAT32_DELTA
    if dtype in ("bfloat16", "float16"):
        delta = 2.0 ** (math.floor(math.log2(top_logit or ASSUMED_TOP_LOGIT)) - 5)
    return 2 * delta if fp8_kv_cache else delta


class PlainDecoder:
    """The plain model's greedy choice after any prefix; every prefix is probed once.

    Args:
        ask: sends requests and gives the answers back in order.
        isolation: how probes are kept from the generations' K/V.
        salt: salt of this run's probes.
        flush: empties the prefix cache, for isolation "flush".
    """

    def __init__(
        self,
        *,
        ask: Callable[[Sequence[Ask]], list[Generation]],
        isolation: Isolation,
        salt: str,
        flush: Callable[[], bool],
    ) -> None:
        self._ask = ask
        self._salt = f"{salt}-probe" if isolation == "salt" else None
        self._flush = flush if isolation == "flush" else None
        self._known: dict[Prefix, int] = {}

    def learn(self, outputs: Iterable[Output], *, start: int = 1) -> None:
        """Probe every prefix `prompt + tokens[:i]`, i >= start, that is not known yet.

        Prefixes go out shortest first, so that each finds the K/V of the one before it cached, which came
        from a prefill too.
        """
        depths: dict[int, dict[Prefix, None]] = {}
        for output in outputs:
            for i in range(start, len(output.tokens)):
                prefix = output.prompt + output.tokens[:i]
                if prefix not in self._known:
                    depths.setdefault(i, {})[prefix] = None
        prefixes = [prefix for i in sorted(depths) for prefix in depths[i]]
        if not prefixes:
            return
        self._isolate()
        answers = self._ask([Ask(prefix, 1, salt=self._salt) for prefix in prefixes])
        for prefix, answer in zip(prefixes, answers, strict=True):
            self._known[prefix] = _only_token(answer)

    def judge(self, outputs: Sequence[Output], *, delta: float, start: int = 1) -> Judgement:
        """Hold outputs against plain decoding, from token `start` on."""
        self.learn(outputs, start=start)
        differing: list[tuple[int, int, Prefix]] = []
        positions = 0
        for number, output in enumerate(outputs):
            for i in range(start, len(output.tokens)):
                prefix = output.prompt + output.tokens[:i]
                positions += 1
                if self._known[prefix] != output.tokens[i]:
                    differing.append((number, i, prefix))
        # Beyond 1% the rule fails anyway; a few of the first ones are then enough to name.
        shown = differing[: max(8, int(NEAR_TIE_SHARE * positions) + 1)]
        differences = [
            Difference(number, i, outputs[number].tokens[i], self._known[prefix], near_tie)
            for (number, i, prefix), near_tie in zip(
                shown, self._near_ties([(p, outputs[n].tokens[i]) for n, i, p in shown], delta), strict=True
            )
        ]
        rest = [
            Difference(number, i, outputs[number].tokens[i], self._known[prefix], None)
            for number, i, prefix in differing[len(shown) :]
        ]
        return Judgement(positions, (*differences, *rest))

    def _near_ties(self, cases: Sequence[tuple[Prefix, int]], delta: float) -> list[bool | None]:
        if not cases:
            return []
        self._isolate()
        asks = [Ask(prefix, 1, salt=self._salt, logit_bias={token: delta}) for prefix, token in cases]
        try:
            answers = self._ask(asks)
        except EndpointError as error:
            if not error.refused:
                raise
            return [None] * len(cases)
        return [_only_token(answer) == token for answer, (_, token) in zip(answers, cases, strict=True)]

    def _isolate(self) -> None:
        if self._flush is not None and not self._flush():
            raise EndpointError(
                "the prefix cache could not be flushed between generation and probes", status=400
            )


def _only_token(answer: Generation) -> int:
    if not answer.output_ids:
        raise EndpointError("a probe for one token came back without one", status=200)
    return answer.output_ids[0]


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ (or one ends); None if they are equal."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return None if len(first) == len(second) else min(len(first), len(second))
