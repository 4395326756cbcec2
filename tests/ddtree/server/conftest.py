"""Real servers on free ports, each a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

# Runs the server after `sys.argv[1]`, Python that may break something in it, as faults of the engine do.
_LAUNCHER = (
    "import sys; exec(sys.argv.pop(1)); from toolkit.ddtree.server.__main__ import main; sys.exit(main())"
)


class Server:
    """One server process, and a client for it."""

    def __init__(self, arguments, *, sabotage="", env=()):
        command = (
            [sys.executable, "-c", _LAUNCHER, sabotage]
            if sabotage
            else [sys.executable, "-m", "toolkit.ddtree.server"]
        )
        self.process = subprocess.Popen(
            [*command, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **dict(env)},
        )
        self._errors = []
        self._reader = threading.Thread(target=lambda: self._errors.extend(self.process.stderr), daemon=True)
        self._reader.start()
        self.ready_line = self.process.stdout.readline()
        found = re.match(r"ready: (http://\S+) ", self.ready_line)
        if not found:
            self.process.wait(10)
            self._close()
            raise RuntimeError(f"no ready line but {self.ready_line!r}; {self.log}")
        self.url = found[1]
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def log(self):
        return "".join(self._errors)

    def generate(self, prompt, *, headers=None, **body):
        """POST /generate; the sampling parameters are greedy and ignore the end of text unless given."""
        sampling = {
            "temperature": 0,
            "max_new_tokens": 16,
            "ignore_eos": True,
            **body.pop("sampling_params", {}),
        }
        name = "text" if isinstance(prompt, str) else "input_ids"
        response = self.client.post(
            "/generate", json={name: prompt, "sampling_params": sampling, **body}, headers=headers
        )
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path, body):
        """POST a streaming request; returns the objects of its events, the last of which must be [DONE]."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise AssertionError(response.read())
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    @staticmethod
    def wait_until(condition, seconds=10):
        """Poll until `condition()` is true; fails the test otherwise."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.02)

    def metric(self, name, **labels):
        """Sum of a metric over the label sets that match."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            found = re.match(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    def stop(self, number=signal.SIGTERM, timeout=30):
        """Send a signal; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout)
        self.client.close()
        self._close()
        return code

    def _close(self):
        self._reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture(scope="session")
def pair_arguments(tiny_pair):
    return [
        "--speculative-draft-model-path", str(tiny_pair.drafter),
        "--speculative-algorithm", "DDTREE",
        "--served-model-name", "tiny",
        "--cpu-threads", "1",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def tree_arguments(tiny_pair, pair_arguments):
    return ["--model-path", str(tiny_pair.target), *pair_arguments, "--speculative-ddtree-budget", "16"]


@pytest.fixture(scope="session")
def start_server():
    """Starts a server; use it as a context manager."""

    @contextlib.contextmanager
    def start(*arguments, **options):
        server = Server(arguments, **options)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
            server.stop()

    return start


@pytest.fixture(scope="session")
def server(start_server, tree_arguments, tmp_path_factory):
    """The server that most tests share."""
    debug = tmp_path_factory.mktemp("debug") / "debug.jsonl"
    flags = ("--speculative-ddtree-debug-metrics", "--speculative-ddtree-debug-file", str(debug))
    with start_server(*tree_arguments, *flags) as running:
        running.debug_file = debug
        yield running
        assert running.process.poll() is None, f"the server died during the tests:\n{running.log}"
        assert running.stop() == 0
        assert "Traceback" not in running.log
