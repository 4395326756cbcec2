"""A small server with faults to order: it speaks SGLang's, vLLM's or plain OpenAI's HTTP over a toy model.

The toy model's next token is a hash of the last four tokens; a second token follows at a small gap, so
that the near-tie rule has something to decide. Speculation is pretended: only its counters are given.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Ask = dict[str, Any]
VOCABULARY = 509
BLOCK = 8
_MEET = 4.0  # seconds in which the requests of a batch meet; less than the clients wait for an answer


def encode(text: str) -> list[int]:
    return [ord(character) % VOCABULARY for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(f"{token} é " for token in tokens)


def next_token(prefix: list[int]) -> tuple[int, int, float]:
    """Best token, second token, and by how much the first one's logit is larger."""
    mixed = 38
    for token in prefix[-4:]:
        mixed = (mixed * 1_000_003 + token * 7919 + 12345) % (1 << 61)
    best = mixed % VOCABULARY
    second = (best + 1 + (mixed >> 20) % (VOCABULARY - 1)) % VOCABULARY
    gap = 0.0005 if (mixed >> 30) % 200 == 0 else 0.5 + ((mixed >> 33) % 100) / 50
    return best, second, gap


@dataclass
class Faults:
    """What is wrong with the server."""

    dialect: str = "sglang"  # sglang, vllm, openai
    algorithm: str = "DDTREE"
    silent_after: int | None = None  # requests answered before the server answers 503
    hang_after: int | None = None  # requests answered before the server keeps silent
    repeat_every: int | None = None  # a token committed twice
    wrong_in_batch: bool = False
    patience: float = 0.02  # seconds in which a request waits for others, where nobody told how many come
    near_ties_flip: bool = False
    ties_flip_in_batch: bool = False
    ignore_salt: bool = False
    no_flush: bool = False
    no_bias: bool = False
    no_tokenize: bool = False
    refuse_limits: bool = False
    drop_in_stream: bool = False
    cut_stream: bool = False
    short_usage_in_stream: bool = False
    count_twice: bool = False
    forget_counts: bool = False
    foreign_requests: int = 0  # requests of others, counted with each scrape
    foreign_running: int = 0
    gauge_lags: float = 0.0  # seconds for which the gauge still tells the last requests
    takes: float = 0.0  # seconds of each request
    gauge_jumps: bool = False  # now and then it tells the requests of two batches at once
    greedy_always: bool = False
    new_seed_always: bool = False
    wrong_chain: bool = False
    tree_accepts: int = 3
    chain_accepts: int = 2
    batch_accepts: int | None = None
    echo_probes: bool = False  # one-token requests repeat what the server generated before
    empty: bool = False
    constant: bool = False
    hang_up: bool = False  # close kept connections without saying so
    short_lists: bool = False
    failing_self_check: bool = False
    api_key: str | None = None


@dataclass
class State:
    faults: Faults
    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: int = 0
    running: int = 0
    together: int | None = None  # how many requests the client sends at once, where it has told
    met: bool | None = None  # whether so many ran at once; None until that is known
    last_running: tuple[float, int] = (0.0, 0)
    scrapes: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    memory: dict[tuple[Any, ...], int] = field(default_factory=dict)
    flushes: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def expect(self, together: int) -> None:
        """The requests from now on come `together` at once: the first of them wait for each other."""
        self.together, self.met = together, None


class Stub:
    """The server, on a free port of the loopback, from construction until `close`."""

    def __init__(self, faults: Faults | None = None, **changes: Any) -> None:
        self.state = State(faults or Faults(**changes))
        handler = type("Handler", (_Handler,), {"state": self.state})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.state.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that hang up are no news


class _Handler(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        faults = self.state.faults
        if not self._allowed():
            return
        native = faults.dialect == "sglang"
        if self.path == "/v1/models":
            owner = {"sglang": "sglang", "vllm": "vllm", "openai": "someone"}.get(faults.dialect)
            self._json(200 if owner else 404, {"data": [{"id": "toy", "owned_by": owner}]})
        elif self.path == "/server_info" and native:
            self._json(
                200,
                {
                    "version": "0.5.17",
                    "served_model_name": "toy",
                    "speculative_algorithm": None if faults.algorithm == "NONE" else faults.algorithm,
                    "speculative_dflash_block_size": BLOCK,
                    "speculative_ddtree_budget": 16,
                    "speculative_ddtree_topk_cap": 8,
                    "dtype": "float32",
                },
            )
        elif self.path == "/version" and faults.dialect == "vllm":
            self._json(200, {"version": "0.11.0"})
        elif self.path.rstrip("/") == "/metrics" and faults.dialect != "openai":
            self._metrics()
        else:
            self._json(404, {"error": "not found"})

    def do_POST(self) -> None:
        faults = self.state.faults
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self._allowed():
            return
        if self.path == "/tokenize" and faults.dialect != "openai" and not faults.no_tokenize:
            self._json(200, {"tokens": encode(body["prompt"]), "count": 0})
        elif self.path == "/flush_cache" and faults.dialect == "sglang" and not faults.no_flush:
            self.state.flushes += 1
            self.state.memory.clear()
            self._json(200, {})
        elif self.path == "/ddtree/self_check" and faults.dialect == "sglang":
            item = {"name": "ancestor_mask", "ok": not faults.failing_self_check, "detail": "mask is causal"}
            self._json(200, {"ok": item["ok"], "checks": [item]})
        elif self.path == "/generate" and faults.dialect == "sglang":
            if isinstance(body.get("input_ids", [0])[0], list):
                self._answer_together(body)
            else:
                self._answer(_native(body), native=True)
        elif self.path == "/v1/completions":
            self._answer(_openai(body, faults), native=False)
        else:
            self._json(404, {"error": "not found"})

    def _allowed(self) -> bool:
        key = self.state.faults.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._json(401, {"error": "no key"})
        return False

    def _answer(self, ask: Ask, *, native: bool) -> None:
        state, faults = self.state, self.state.faults
        with state.lock:
            state.requests.append(ask)
            if faults.silent_after is not None and state.answered >= faults.silent_after:
                self._json(503, {"error": "gone"})
                return
            state.running += 1
        if faults.hang_after is not None and state.answered >= faults.hang_after:
            state.closing.wait(30)
            return
        try:
            if ask["tree"] is not None and faults.refuse_limits:
                self._json(400, {"error": "custom_params.ddtree.budget is above the server's own"})
                return
            if ask["bias"] and faults.no_bias:
                self._json(400, {"error": "logit_bias is not supported"})
                return
            many = ask["count"] > 1 and self._wait_for_company(ask)
            time.sleep(faults.takes)
            tokens = _generate(ask, faults, state, many=many)
            record = self._record(ask, tokens, many=many)
            if ask["stream"]:
                self._stream(ask, tokens, record, native=native)
            else:
                self._json(200, _whole(tokens, ask, record, faults, native=native))
        finally:
            with state.lock:
                state.last_running = (time.monotonic(), state.running)
                state.running -= 1

    def _answer_together(self, body: dict[str, Any]) -> None:
        """A list of prompts, each with its own sampling parameters and salt."""
        faults, state = self.state.faults, self.state
        keys = ("input_ids", "sampling_params", "extra_key")
        lists = [body.get(key) or [None] * len(body["input_ids"]) for key in keys]
        asks = [_native(dict(zip(keys, one, strict=True))) for one in zip(*lists, strict=True)]
        state.requests.extend(asks)
        if faults.silent_after is not None and state.answered >= faults.silent_after:
            self._json(503, {"error": "gone"})
            return
        if faults.no_bias and any(ask["bias"] for ask in asks):
            self._json(400, {"error": "logit_bias is not supported"})
            return
        answers = []
        for ask in asks:
            tokens = _generate(ask, faults, state, many=False)
            answers.append(_whole(tokens, ask, self._record(ask, tokens, many=False), faults, native=True))
        self._json(200, answers[: -1 if faults.short_lists else None])

    def _wait_for_company(self, ask: Ask) -> bool:
        """Whether this request runs beside others (waits a moment for them to arrive)."""
        faults = self.state.faults
        if not (faults.wrong_in_batch or faults.ties_flip_in_batch or faults.batch_accepts):
            return False
        state = self.state
        if state.together == 1:
            return False
        wanted = state.together or 2
        end = time.monotonic() + (faults.patience if state.together is None else _MEET)
        while state.met is None and state.running < wanted and time.monotonic() < end:
            time.sleep(0.004)
        if state.together is None:
            return state.running > 1
        if state.met is None:
            state.met = state.running >= wanted
        return state.met

    def _record(self, ask: Ask, tokens: list[int], *, many: bool) -> dict[str, int]:
        faults, state = self.state.faults, self.state
        accepts = faults.chain_accepts if ask["tree"] is not None else faults.tree_accepts
        if many and faults.batch_accepts is not None:
            accepts = faults.batch_accepts
        steps = 0 if faults.algorithm == "NONE" else math.ceil((len(tokens) - 1) / accepts)
        cached = len(ask["prompt"]) - 1 if faults.ignore_salt else 0
        record = {
            "requests": 1,
            "prompt": len(ask["prompt"]),
            "completion": len(tokens),
            "cached": cached,
            "steps": steps,
        }
        with state.lock:
            state.answered += 1
            times = 0 if faults.forget_counts else 2 if faults.count_twice else 1
            for name, value in record.items():
                state.counters[name] = state.counters.get(name, 0) + times * value
        return record

    def _metrics(self) -> None:
        faults, state = self.state.faults, self.state
        with state.lock:
            if faults.foreign_requests:
                state.counters["requests"] = state.counters.get("requests", 0) + faults.foreign_requests
                state.counters["completion"] = state.counters.get("completion", 0) + 7
            counters = dict(state.counters)
            running = state.running + faults.foreign_running
            state.scrapes += 1
            if running:
                state.last_running = (time.monotonic(), running)
            elif time.monotonic() - state.last_running[0] < faults.gauge_lags:
                running = state.last_running[1]
            if faults.gauge_jumps and running and state.scrapes % 2:
                running = 99
        if faults.dialect == "sglang":
            names = {
                "requests": "sglang:num_requests_total",
                "prompt": "sglang:prompt_tokens_total",
                "completion": "sglang:generation_tokens_total",
                "steps": "sglang:spec_verify_calls_total",
            }
            gauge = "sglang:num_running_reqs"
        else:
            names = {
                "requests": "vllm:request_success_total",
                "prompt": "vllm:prompt_tokens_total",
                "completion": "vllm:generation_tokens_total",
                "steps": "vllm:spec_decode_num_drafts_total",
            }
            gauge = "vllm:num_requests_running"
            matched = counters.get("completion", 0) - counters.get("requests", 0) - counters.get("steps", 0)
            counters["matched"] = max(0, matched)
            names["matched"] = "vllm:spec_decode_num_accepted_tokens_total"
        lines = ["# HELP about", "# TYPE about counter", f'{gauge}{{model_name="toy"}} {running}']
        for name, value in counters.items():
            if name in names:
                lines.append(f'{names[name]}{{model_name="toy",mode="a"}} {value / 2}')
                lines.append(f'{names[name]}{{model_name="toy",mode="b"}} {value / 2}')
        self._send(200, ("\n".join(lines) + "\n").encode(), "text/plain")

    def _stream(self, ask: Ask, tokens: list[int], record: dict[str, int], *, native: bool) -> None:
        faults = self.state.faults
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = 0
        while sent < len(tokens):
            count = min(len(tokens), sent + 3)
            if faults.cut_stream and count > 9:
                return
            last = count == len(tokens)
            shown = tokens[:5] + tokens[6:count] if faults.drop_in_stream and count > 6 else tokens[:count]
            if native:
                part = dict(record, completion=len(shown) - faults.short_usage_in_stream)
                piece = _whole(shown, ask, part, faults, native=True, done=last)
            else:
                piece = {
                    "choices": [
                        {
                            "text": decode(tokens[sent + faults.drop_in_stream : count]),
                            "finish_reason": "length" if last else None,
                        }
                    ]
                }
            self._event(piece)
            sent = count
        if not native:
            tokens_reported = record["completion"] - faults.short_usage_in_stream
            usage = {"prompt_tokens": record["prompt"], "completion_tokens": tokens_reported}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, piece: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")

    def _json(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.close_connection or self.state.faults.hang_up


def _native(body: dict[str, Any]) -> dict[str, Any]:
    sampling = body.get("sampling_params", {})
    return {
        "prompt": body["input_ids"] if "input_ids" in body else encode(body["text"]),
        "count": sampling.get("max_new_tokens", 16),
        "temperature": sampling.get("temperature", 1.0),
        "seed": sampling.get("sampling_seed"),
        "bias": {int(token): bias for token, bias in sampling.get("logit_bias", {}).items()},
        "tree": (sampling.get("custom_params") or {}).get("ddtree"),
        "salt": body.get("extra_key"),
        "stream": body.get("stream", False),
    }


def _openai(body: dict[str, Any], faults: Faults) -> dict[str, Any]:
    prompt = body["prompt"]
    return {
        "prompt": encode(prompt) if isinstance(prompt, str) else prompt,
        "count": body.get("max_tokens", 16),
        "temperature": body.get("temperature", 1.0),
        "seed": body.get("seed"),
        "bias": {int(token): bias for token, bias in body.get("logit_bias", {}).items()},
        "tree": None,
        "salt": body.get("cache_salt"),
        "stream": body.get("stream", False),
        "ids": body.get("return_token_ids", False) and faults.dialect == "vllm",
    }


def _generate(ask: Ask, faults: Faults, state: State, *, many: bool) -> list[int]:
    if faults.empty or faults.constant:
        return [3] * ask["count"] if faults.constant else []
    prefix, out = list(ask["prompt"]), []
    seed = 0 if faults.greedy_always else random.random() if faults.new_seed_always else ask["seed"]
    draw = random.Random(seed)
    for _ in range(ask["count"]):
        best, second, gap = next_token(prefix)
        token = second if ask["bias"].get(second, 0.0) >= gap else best
        if ask["temperature"] > 0 and not faults.greedy_always and draw.random() < 0.4:
            token = second
        if ask["count"] > 1:
            token = _spoil(ask, faults, token, second, gap, out, many=many)
        if faults.echo_probes:
            token = _remember(ask, faults, state, prefix, token)
        prefix.append(token)
        out.append(token)
    return out


def _spoil(
    ask: Ask, faults: Faults, token: int, second: int, gap: float, out: list[int], *, many: bool
) -> int:
    """What a faulty speculative decoder commits instead of `token`."""
    i = len(out)
    if gap < 0.001 and (faults.near_ties_flip or (faults.ties_flip_in_batch and many)):
        return second
    if faults.repeat_every and i and i % faults.repeat_every == 0:
        return out[-1]
    if faults.wrong_in_batch and many and i == 7:
        return second
    if faults.wrong_chain and ask["tree"] is not None and i == 5:
        return second
    return token


def _remember(ask: Ask, faults: Faults, state: State, prefix: list[int], token: int) -> int:
    """A cache that hands a probe what was generated after the same prefix under the same salt."""
    key = (None if faults.ignore_salt else ask["salt"], *prefix)
    with state.lock:
        if ask["count"] == 1:
            return state.memory.get(key, token)
        state.memory[key] = token
    return token


def _whole(
    tokens: list[int], ask: Ask, record: dict[str, int], faults: Faults, *, native: bool, done: bool = True
) -> dict[str, Any]:
    if native:
        meta: dict[str, Any] = {
            "id": "x",
            "finish_reason": {"type": "length", "length": len(tokens)} if done else None,
            "prompt_tokens": record["prompt"],
            "completion_tokens": record["completion"],
            "cached_tokens": record["cached"],
        }
        if faults.algorithm != "NONE":
            meta["spec_verify_ct"] = record["steps"]
            meta["spec_correct_drafts_histogram"] = [1, 2, record["steps"]]
        return {"text": decode(tokens), "output_ids": tokens, "meta_info": meta}
    choice: dict[str, Any] = {"text": decode(tokens), "finish_reason": "length"}
    if ask["ids"]:
        choice["token_ids"], choice["prompt_token_ids"] = tokens, ask["prompt"]
    usage = {"prompt_tokens": record["prompt"], "completion_tokens": record["completion"]}
    return {"choices": [choice], "usage": usage}
