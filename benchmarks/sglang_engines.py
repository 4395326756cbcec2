"""Engines of stock SGLang in processes of their own, for the programs sglang_*.py beside this one.

`python benchmarks/sglang_engines.py ORDER` is one of them: it starts, says so, and then decodes what each
line of its input asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = "DDTREE_BENCHMARK_ON_CPU"
if os.environ.get(ON_CPU) == "1":  # also in what an engine starts, which imports this file anew
    sys.path.insert(0, str(ROOT / "tests/sglang"))
    import on_cpu  # noqa: F401  stands in for what SGLang lacks on a CPU
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu", "cuda_graph_backend_decode": "disabled", "disable_overlap_schedule": True,
    "mem_fraction_static": 0.2,
}  # fmt: skip
_PLUGINS = {
    "ddtree": "toolkit.ddtree.sglang.plugin:register",
    "ddtree_sync_check": "sglang_sync_check:register",
    "ddtree_rank_trace": "sglang_rank_trace:register",
    "ddtree_forced": "sglang_forced:register",
    "ddtree_oracle": "sglang_oracle:register",
    "float32": "sglang_float32:register",
    "profiled": "sglang_profiled:register",
}
# Nodes that share a GPU: NCCL takes them for hosts, by their names, and lets them talk through sockets.
ALONE = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
# Two programs at a time do not meet: each takes ports of its own below the ephemeral ones.
_ports = count(10_000 + os.getpid() % 70 * 300, 10)


@dataclass(frozen=True)
class Mode:
    """One engine: SGLang's arguments, the tree's, the plugins installed, and its environment beside."""

    arguments: dict[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] | None = None
    plugins: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """One mode's process; it prints one JSON line when it is ready, and one for each order.

    With `nnodes` among its arguments, one process for each of SGLang's nodes, all on the first GPU.

    Args:
        name: the mode's.
        mode: what to run.
        defaults: arguments of every mode.
        prompts: token ids of each prompt.
        scratch: folder for files that end with the run.
        logs: folder for the engine's log.
    """

    def __init__(
        self, name: str, mode: Mode, defaults: dict[str, Any], prompts: list[list[int]],
        scratch: Path, logs: Path,
    ) -> None:  # fmt: skip
        port = next(_ports)
        self.name = name
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{name.replace(' ', '_')}.log"
        self.folder = scratch / str(port)
        install(self.folder, mode.plugins)
        paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", ""), str(self.folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **mode.environment}
        environment["SGLANG_PLUGINS"] = ",".join(mode.plugins) or "none"
        environment["DDTREE_BENCHMARK_FOLDER"] = str(self.folder)
        if mode.tree is not None:
            environment["SGLANG_DDTREE"] = json.dumps(mode.tree)
        self.started = time.monotonic()
        arguments = {"port": port, "nccl_port": port + 1, **defaults, **mode.arguments}
        if (nodes := arguments.get("nnodes", 1)) > 1:
            arguments["dist_init_addr"] = f"127.0.0.1:{port + 2}"
        self.nodes = []
        for rank in range(nodes):
            order = self.folder / f"order{rank}.json"
            own = arguments | ({"node_rank": rank} if nodes > 1 else {})
            order.write_text(json.dumps({"arguments": own, "prompts": prompts}), encoding="utf-8")
            log = self.log.with_suffix(f".{rank}.log" if rank else ".log")
            self.nodes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(order)],
                    env=environment | (ALONE | {"NCCL_HOSTID": f"node{rank}"} if nodes > 1 else {}),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    stderr=log.open("w", encoding="utf-8"),
                )
            )  # fmt: skip
        self.process = self.nodes[0]

    def wait(self, word: str) -> dict[str, Any]:
        """The child's next JSON line of this kind; its log's end is shown if it dies."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"' + word):
                if word == "ready":
                    print(f"{self.name}: ready after {time.monotonic() - self.started:.0f} s", flush=True)
                value: dict[str, Any] = json.loads(line)[word]
                return value
        text = self.log.read_text(encoding="utf-8", errors="replace")
        raise SystemExit(f"{self.name}: died\n{text[-3000:]}")

    def decode(self, **order: Any) -> dict[str, Any]:
        """Let it decode once, and give what it says; see `decode` below."""
        if self.process.poll() is None and self.process.stdin is not None:
            print(json.dumps(order), file=self.process.stdin, flush=True)
        return self.wait("result")


def stop(children: Iterable[Child]) -> None:
    """End them, all at once."""
    nodes = [node for child in children for node in child.nodes]
    for node in nodes:
        if node.poll() is None:
            node.terminate()
    last = time.monotonic() + 15
    for node in nodes:
        try:
            node.wait(max(0.1, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.kill()


def install(folder: Path, plugins: tuple[str, ...]) -> None:
    """Make entry points of SGLang visible to a Python that has `folder` on its path."""
    for name in plugins:
        info = folder / f"{name}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {_PLUGINS[name]}\n")
    folder.mkdir(parents=True, exist_ok=True)


def settings(items: list[str]) -> dict[str, Any]:
    """Engine arguments of a command line, KEY=JSON each."""
    return {key: json.loads(value) for key, _, value in (item.partition("=") for item in items)}


def pair_parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line that is told by a program's first line, and names a pair of models."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    bundled = ROOT / "toolkit/ddtree/bundled"
    parser.add_argument("--target", type=Path, default=bundled / "target")
    parser.add_argument("--drafter", type=Path, default=bundled / "drafter")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with what every program beside this one takes."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="engine argument")
    parser.add_argument("--logs", type=Path, required=True, help="where the engines' logs go")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def decode(
    engine: Any, prompts: list[list[int]], level: int, tokens: int, requests: int, **sampling: float
) -> dict[str, Any]:
    """Decode the first `requests` prompts, `level` at a time."""
    asked = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
    answers: list[dict[str, Any]] = []
    started = time.perf_counter()
    for first in range(0, requests, level):
        answers += engine.generate(
            input_ids=prompts[first : min(first + level, requests)], sampling_params=asked
        )
    seconds = time.perf_counter() - started
    return {
        "outputs": [x["output_ids"] for x in answers],
        "verify_steps": sum(x["meta_info"].get("spec_verify_ct") or 0 for x in answers),
        "seconds": seconds,
    }


def serve(order: Path) -> None:
    """The child: start an engine, then decode as told."""
    from sglang.srt.entrypoints.engine import Engine

    told = json.loads(order.read_text(encoding="utf-8"))
    engine = Engine(**told["arguments"])
    print(json.dumps({"ready": {}}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"result": decode(engine, told["prompts"], **json.loads(line))}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
