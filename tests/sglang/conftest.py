"""SGLang servers on this CPU, in the environment of scripts/sglang_env.sh."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "toolkit/ddtree/bundled"
READY_SECONDS = 500
CONTEXT = 512
_ALL = os.environ.get("DDTOOLKIT_ALL_TESTS") == "1"
SLOW = pytest.mark.skipif(not _ALL, reason="minutes in Triton's interpreter; DDTOOLKIT_ALL_TESTS=1 runs it")
PYTHON = Path(os.environ.get("DDTOOLKIT_SGLANG_VENV", ROOT / ".venv-sglang")) / "bin/python"

FLAGS = shlex.split(
    f"--model-path {BUNDLED}/target --device cpu --dtype float32 --attention-backend triton"
    " --sampling-backend pytorch --grammar-backend xgrammar --cuda-graph-backend-decode disabled"
    " --cuda-graph-backend-prefill disabled --disable-overlap-schedule"
    " --constrained-json-disable-any-whitespace"
    " --skip-server-warmup --host 127.0.0.1 --max-total-tokens 8192 --max-running-requests 8"
    f" --context-length {CONTEXT}"
    " --mem-fraction-static 0.2 --log-level warning"
)
DRAFT = ["--speculative-draft-model-path", f"{BUNDLED}/drafter"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a program that runs in SGLang's."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def answer_of(python: Path, program: str, cases: Any) -> Any:
    """What a program beside this file answers to cases, both as JSON."""
    run = subprocess.run(
        [python, Path(__file__).with_name(program)],
        input=json.dumps(cases),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    if not PYTHON.exists():
        pytest.skip(reason=f"no SGLang environment at {PYTHON}; scripts/sglang_env.sh makes it")
    return PYTHON


@dataclass
class Server:
    """One server: where it listens, its process and its log."""

    port: int
    process: subprocess.Popen
    log: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=300))

    @classmethod
    def start(cls, python: Path, log: Path, *flags: str, **more: str) -> "Server":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [python, Path(__file__).with_name("on_cpu.py"), *FLAGS, "--port", str(port), *flags]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment(**more), stdout=output, stderr=output, start_new_session=True
            )
        return cls(port, process, log)

    def wait(self) -> "Server":
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.tail()
            try:
                if self.client.get(f"{self.url}/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"not ready after {READY_SECONDS} s:\n{self.tail()}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def post(self, prompt: list[int], tokens: int, **sampling: Any) -> httpx.Response:
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        body = {"input_ids": prompt, "sampling_params": parameters}
        return self.client.post(f"{self.url}/generate", json=body)

    def generate(self, prompt: list[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        answer = self.post(prompt, tokens, **sampling)
        assert answer.status_code == 200, answer.text + self.tail()
        return answer.json()

    def together(self, prompts: list[list[int]], tokens: int, each: list[dict]) -> list[dict[str, Any]]:
        """Generate for all prompts at once, each with sampling parameters of its own."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [
                pool.submit(self.generate, prompt, tokens, **own)
                for prompt, own in zip(prompts, each, strict=True)
            ]
            return [job.result() for job in jobs]

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # what it started shares its session
        self.process.wait()


@pytest.fixture(scope="session")
def leave_moves_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the server moves no K/V rows."""
    return tmp_path_factory.mktemp("switch") / "leave_moves_out"


@pytest.fixture(scope="session")
def server(
    sglang_python: Path, leave_moves_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """DDTREE with budget 16 and cap 8, beside the bundled pair."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    tree = ["--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "16"]
    started = Server.start(sglang_python, log, *DRAFT, *tree, TEST_LEAVE_MOVES_OUT=str(leave_moves_out))
    try:
        yield started.wait()
    finally:
        started.stop()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED / "target/tokenizer.json"))
    lines = (ROOT / "toolkit/acceptance/prompts/python.jsonl").read_text().splitlines()[:4]
    return [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
