"""A client of SGLang's HTTP server that looks closely at what it is given, for sglang_soak.py."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 120.0
BLOCK = 8  # tokens that one step commits at most


@dataclass
class Reply:
    """What came for one request.

    Attributes:
        end: finish reason; "hung up" where the client left, "status N" where none was decoded.
        text: all of it.
        ids: output token ids.
        tokens: how many the server counted.
        steps: verify steps.
        problem: what was wrong with the way it came.
    """

    end: str = "none"
    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    problem: str = ""

    def take(self, value: dict[str, Any]) -> None:
        """One answer, or one event of a stream: each holds all that came before it."""
        if "error" in value:
            self.problem = f"an error in the stream: {value['error']}"
            return
        text, meta = value.get("text", ""), value["meta_info"]
        if not text.startswith(self.text.rstrip("\ufffd")) and not meta["finish_reason"]:
            self.problem = f"a stream took back what it had given: {self.text[-40:]!r}, then {text[-40:]!r}"
        self.text, self.ids, self.tokens = text, value.get("output_ids", []), meta["completion_tokens"]
        self.steps = meta.get("spec_verify_ct") or 0
        if meta["finish_reason"]:
            self.end = meta["finish_reason"]["type"]

    def fault(self, most: int, *, as_json: bool) -> str:
        """Why this is not what was asked for, "" where it is."""
        if self.problem:
            return self.problem
        if self.end not in ("stop", "length", "hung up", "abort"):
            return f"ended with {self.end}: {self.text[:200]}"
        # SGLang does not cut an aborted request's last step to what was asked for.
        most += BLOCK if self.end == "abort" else 0
        if self.tokens > most or (self.end == "length" and self.tokens != most):
            return f"{self.tokens} tokens of {most}, ended with {self.end}"
        if as_json and self.end == "stop":
            try:
                value = json.loads(self.text)
            except ValueError:
                return f"no JSON: {self.text!r}"
            if set(value) != {"name", "count"} or value["name"] not in ("alpha", "beta"):
                return f"not of the schema: {self.text!r}"
        return ""


class Client:
    """Requests to one server on this machine; any number of threads may share it.

    Args:
        port: the server's.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def _open(self, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def _json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection, response = self._open(method, path, body)
        try:
            data = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(data)
        except ValueError:
            return response.status, {"text": data[:300].decode("utf-8", "replace")}

    def whole(self, body: dict[str, Any]) -> Reply:
        """One answer."""
        reply = Reply()
        status, value = self._json("POST", "/generate", body)
        if status == http.client.OK:
            reply.take(value)
        elif status == http.client.BAD_REQUEST and "abort" in json.dumps(value).lower():
            reply.end = "abort"
        else:
            reply.end, reply.text = f"status {status}", json.dumps(value)
        return reply

    def streamed(self, body: dict[str, Any], *, leave_after: int | None, aborting: bool) -> Reply:
        """A stream; after so many events left, or aborted by the request's id and read to its end."""
        reply, events, closed = Reply(), 0, False
        connection, response = self._open("POST", "/generate", body | {"stream": True})
        try:
            if response.status != http.client.OK:
                reply.end, reply.text = (
                    f"status {response.status}",
                    response.read(500).decode("utf-8", "replace"),
                )
                return reply
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    closed = True
                    break
                reply.take(json.loads(line[5:]))
                events += 1
                if events == leave_after and reply.end == "none":
                    if not aborting:
                        reply.end = "hung up"
                        return reply
                    self._json("POST", "/abort_request", {"rid": body["rid"]})
        finally:
            connection.close()
        if not closed and not reply.problem:
            reply.problem = "the stream ended without its last line"
        return reply

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            return self._json("GET", "/health")[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def loads(self) -> dict[str, Any]:
        """What SGLang's scheduler holds now."""
        _, value = self._json("GET", "/v1/loads?include=all")
        own: dict[str, Any] = value["loads"][0]
        return own

    def wait_idle(self, seconds: float) -> None:
        """Until no request runs or waits."""
        deadline = time.monotonic() + seconds
        while (own := self.loads())["num_running_reqs"] or own["num_waiting_reqs"]:
            if time.monotonic() > deadline:
                raise SystemExit(f"not idle after {seconds} s: {own}")
            time.sleep(0.5)

    def flush(self) -> None:
        """Empty the prefix cache; only an idle server does it."""
        status, value = self._json("POST", "/flush_cache?timeout=20")
        if status != http.client.OK:
            raise SystemExit(f"the cache was not flushed: {status} {value}")

    def free_rows(self) -> dict[str, int]:
        """K/V rows in use, by the scheduler's own count."""
        own = self.loads()
        return {key: own[key] for key in ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")}

    def self_check(self) -> dict[str, Any]:
        """What `/ddtree/self_check` answers."""
        status, value = self._json("POST", "/ddtree/self_check", {})
        return {"status": status, **value} if isinstance(value, dict) else {"status": status}

    @staticmethod
    def gpu_memory() -> int | None:
        """MiB in use on the GPU, by whomever."""
        try:
            run = subprocess.run(
                ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            return None
        return int(run.stdout.split()[0])
