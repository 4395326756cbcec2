"""One acceptance run against one endpoint: sends everything, keeps what the checks share.

Each batch of requests is sent once and serves several checks. Everything sent is booked, so that the
server's own counters can be held against it; every `checkpoint` is taken while nothing of ours runs.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from toolkit.acceptance.endpoint import Endpoint, Way
from toolkit.acceptance.estimates import Estimate, ratio
from toolkit.acceptance.exchange import Ask, EndpointError, Generation, Identity, Prompt
from toolkit.acceptance.metrics import COUNTERS, GAUGES, parse_metrics, pick
from toolkit.acceptance.probing import Isolation, Output, PlainDecoder
from toolkit.acceptance.prompts import prompts_hash
from toolkit.acceptance.settings import Settings

ALONE = 8
BATCH = 16

_SETTLE = 1.5
_POLL = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that were sent together, and their answers in the same order.

    Attributes:
        asks: the requests.
        answers: one an ask.
        seconds: from the first request sent to the last answer.
        counted: how far the server's counters moved meanwhile; empty where it has none.
    """

    asks: tuple[Ask, ...]
    answers: tuple[Generation, ...]
    seconds: float
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def outputs(self) -> list[Output] | None:
        """Prompts with their output tokens; None where the server tells no token ids."""
        found = [
            Output(ask.prompt, answer.output_ids)
            for ask, answer in zip(self.asks, self.answers, strict=True)
            if not isinstance(ask.prompt, str) and answer.output_ids
        ]
        return found if len(found) == len(self.asks) else None

    @property
    def steps(self) -> list[tuple[float, float]] | None:
        """Tokens from verify steps and verify steps, by request; None where the server does not tell."""
        pairs = [
            (float(answer.completion_tokens - 1), float(answer.verify_steps))
            for answer in self.answers
            if answer.completion_tokens and answer.verify_steps
        ]
        return pairs if len(pairs) == len(self.answers) else None

    @property
    def acceptance_lengths(self) -> list[float] | None:
        """Acceptance length of each request; None where the server does not tell."""
        return None if self.steps is None else [tokens / steps for tokens, steps in self.steps]

    @property
    def acceptance_length(self) -> Estimate | None:
        """Acceptance length of the whole run: per request, else from the server's counters."""
        if self.steps is not None:
            return ratio(self.steps)
        drafts, matched = self.counted.get("verify_steps"), self.counted.get("matched_drafts")
        return Estimate(1 + matched / drafts, None) if drafts and matched is not None else None

    @property
    def tokens(self) -> int:
        """Generated tokens of all requests that tell how many."""
        return sum(answer.completion_tokens or 0 for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The server's counters at a moment at which nothing of ours ran.

    Attributes:
        sent: what we had sent by then.
        untold: figures that some answer since the checkpoint before did not tell.
        counted: the server's counters.
        busy: requests that the server says were running or waiting.
    """

    sent: dict[str, float]
    untold: frozenset[str]
    counted: dict[str, float]
    busy: float


class Session:
    """Sends the acceptance's requests and keeps their answers.

    Args:
        endpoint: the server; `detect` has been called.
        settings: what to do.
        prompts: prompt texts, at least 16.
    """

    def __init__(self, endpoint: Endpoint, settings: Settings, prompts: Sequence[str]) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self.texts = list(prompts)
        self.salt = secrets.token_hex(8)
        self.answered = 0
        self.highest_load: float | None = None
        self.checkpoints: list[Checkpoint] = []
        self._sent = {"requests": 0.0} | dict.fromkeys(
            ("prompt_tokens", "completion_tokens", "cached_tokens", "verify_steps"), 0.0
        )
        self._untold: set[str] = set()
        self._has_metrics = True
        self._settle = self._calm = _SETTLE

    @property
    def identity(self) -> Identity:
        """What the server is."""
        return self.endpoint.identity

    @property
    def algorithm(self) -> str | None:
        """Speculative algorithm that the server says it runs, else the one it should run; None if unknown."""
        return self.identity.algorithm or self.settings.algorithm

    @property
    def dtype(self) -> str | None:
        """Number format of the model, None where unknown."""
        return self.settings.dtype or self.identity.dtype

    @property
    def block_size(self) -> int | None:
        """Drafted slots, bonus token included; None where unknown."""
        return self.identity.block_size or self.settings.block_size

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts as token ids where the server tells and takes them, else as text."""
        ids = self._tokenized() if self.endpoint.token_ids else None
        return list(self.texts) if ids is None else list(ids)

    def _tokenized(self) -> list[tuple[int, ...]] | None:
        """Token ids of all prompts: from `/tokenize`, else told by the completions endpoint."""
        first = self.endpoint.tokenize(self.texts[0])
        if first is not None:
            found = [first, *(self.endpoint.tokenize(text) or () for text in self.texts[1:])]
        elif self.identity.kind in ("embedded", "vllm"):
            asks = [Ask(text, 1) for text in self.texts]
            found = [a.prompt_ids or () for a in self.send(asks, concurrency=BATCH, way="completions")]
        else:
            return None
        return found if all(found) else None

    @property
    def prompts_hash(self) -> str:
        """SHA-256 of the prompt texts."""
        return prompts_hash(self.texts)

    @property
    def has_token_ids(self) -> bool:
        """Whether token ids go both ways for the prompts."""
        return not isinstance(self.prompts[0], str)

    def greedy(self, count: int, **options: object) -> list[Ask]:
        """Greedy requests for the first `count` prompts."""
        return [
            Ask(prompt, self.settings.max_new_tokens, **options)  # type: ignore[arg-type]
            for prompt in self.prompts[:count]
        ]

    @cached_property
    def alone(self) -> Run:
        """8 prompts, one at a time."""
        return self.run(self.greedy(ALONE), concurrency=1)

    @cached_property
    def batch(self) -> Run:
        """16 prompts at once; the first 8 are those of `alone`."""
        return self.run(self.greedy(BATCH), concurrency=BATCH)

    @cached_property
    def chain(self) -> Run:
        """The prompts of `batch` at once, each limited to the drafter's greedy chain."""
        if self.block_size is None:
            raise EndpointError("the block size is unknown", status=400)
        limits = {"budget": self.block_size - 1, "topk_cap": 1, "expansion": "chain"}
        return self.run(self.greedy(BATCH, tree=limits), concurrency=BATCH)

    @cached_property
    def loaded(self) -> Run:
        """The prompts in turn, as many requests and as many at once as the settings say."""
        count = self.settings.requests
        asks = [Ask(self.prompts[i % len(self.prompts)], self.settings.load_tokens) for i in range(count)]
        with self._watch_load():
            return self.run(asks, concurrency=self.settings.concurrency)

    @cached_property
    def isolation(self) -> Isolation:
        """How probes are kept from K/V of the generations: a cache salt, else a flush, else not at all.

        A salt counts only if a first request under it finds nothing cached although the same tokens
        were just generated.
        """
        outputs = self.alone.outputs
        if self.endpoint.salt_field is not None and outputs:
            tokens = outputs[0].prompt + outputs[0].tokens[:-1]
            canary = Ask(tokens, 1, salt=f"{self.salt}-canary")
            if not self.send([canary], concurrency=1)[0].cached_tokens:
                return "salt"
        return "flush" if self.endpoint.flush_cache() else "none"

    @cached_property
    def decoder(self) -> PlainDecoder:
        """Plain greedy decoding of the same model, learnt by probing."""
        return PlainDecoder(
            ask=self._probe,
            isolation=self.isolation,
            salt=self.salt,
            flush=self.endpoint.flush_cache,
        )

    def _probe(self, asks: Sequence[Ask]) -> list[Generation]:
        """Send probes in order; where the server takes lists, 16 to a request, which is much cheaper."""
        if not self.endpoint.native:
            return self.send(asks, concurrency=BATCH)
        answers: list[Generation] = []
        for i in range(0, len(asks), BATCH):
            together = self.endpoint.generate_together(asks[i : i + BATCH])
            for answer in together:
                self._book(answer)
            answers += together
        return answers

    def run(self, asks: Sequence[Ask], *, concurrency: int, way: Way = "whole") -> Run:
        """Send requests between two checkpoints.

        Raises:
            EndpointError: one was not answered, or refused.
            TimeUpError: the time limit is reached.
        """
        before = self.checkpoint()
        start = time.monotonic()
        answers = self.send(asks, concurrency=concurrency, way=way)
        seconds = time.monotonic() - start
        after = self.checkpoint()
        counted = {}
        if before and after:
            counted = {name: after.counted[name] - before.counted.get(name, 0.0) for name in after.counted}
        return Run(tuple(asks), tuple(answers), seconds, counted)

    def send(self, asks: Sequence[Ask], *, concurrency: int, way: Way = "whole") -> list[Generation]:
        """Send requests, at most `concurrency` at once, and book them. Raises as `run` does."""
        with ThreadPoolExecutor(max_workers=min(concurrency, len(asks))) as pool:
            futures = [pool.submit(self.endpoint.generate, ask, way) for ask in asks]
            _, pending = wait(futures, return_when=FIRST_EXCEPTION)
            for future in pending:
                future.cancel()
        for future in futures:
            if not future.cancelled() and future.exception() is None:
                self._book(future.result())
        for future in futures:
            if not future.cancelled():
                future.result()
        return [future.result() for future in futures]

    def _book(self, answer: Generation) -> None:
        self.answered += 1
        self._sent["requests"] += 1
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "verify_steps"):
            value = getattr(answer, name)
            if value is None and not (name == "verify_steps" and answer.completion_tokens == 1):
                self._untold.add(name)
            self._sent[name] += value or 0

    def checkpoint(self) -> Checkpoint | None:
        """Read the server's counters once they have caught up with what was sent.

        Waits 1.5 s at most, and no more once they have failed to catch up. Gauges are given as long: SGLang's
        hold the last batch until its scheduler has found nothing to do.
        """
        if not self._has_metrics:
            return None
        start = self.checkpoints[0] if self.checkpoints else None
        begin = time.monotonic()
        while True:
            text = self.endpoint.metrics_text()
            values = parse_metrics(text) if text is not None else {}
            counted, gauges = pick(values, COUNTERS), pick(values, GAUGES)
            if not counted and not gauges:
                self._has_metrics = False
                return None
            whole, quiet = start is None or self._caught_up(start, counted), not any(gauges.values())
            waited = time.monotonic() - begin
            if whole and quiet:
                break
            if waited > min(self._calm if whole else self._settle, self.endpoint.remaining):
                self._settle, self._calm = (self._settle, 0.0) if whole else (0.0, self._calm)
                break
            time.sleep(_POLL)
        checkpoint = Checkpoint(dict(self._sent), frozenset(self._untold), counted, sum(gauges.values()))
        self.checkpoints.append(checkpoint)
        self._untold.clear()
        return checkpoint

    def _caught_up(self, start: Checkpoint, counted: dict[str, float]) -> bool:
        return all(
            counted[name] - start.counted.get(name, 0.0) >= self._sent[name] - start.sent[name]
            for name in counted.keys() & self._sent.keys()
        )

    @contextmanager
    def _watch_load(self) -> Iterator[None]:
        """Keep the highest number of requests that the server reports, twice in a row, while ours run.

        Once may be a moment at which one gauge tells of the batch before and the other of the next.
        """
        stop = threading.Event()

        def watch() -> None:
            before = 0.0
            while not stop.wait(0.25):
                try:
                    text = self.endpoint.metrics_text()
                except Exception:
                    return
                if text is None:
                    return
                busy = sum(pick(parse_metrics(text), GAUGES).values())
                self.highest_load = max(self.highest_load or 0.0, min(before, busy))
                before = busy

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
