"""Ten minutes of mixed traffic on DDTREE in SGLang's own HTTP server, on one GPU.

    python benchmarks/sglang_soak.py --logs logs --out benchmarks/sglang_h200_soak.json

Between 16 and 64 requests at a time, changing every half minute: prompts and answers of mixed lengths, in
part over shared prefixes; greedy, drawn, penalised and bound to a JSON schema; trees of the server's and of
own limits; stop strings; answers whole and streamed; clients that hang up in the middle, and requests aborted
by their id. It fails where an answer is not what was asked for, where SGLang's own check finds a lost K/V row
or slot, where the idle server does not hold as many free rows as before, where the acceptance length of any
minute is more than 5% off their median, and where greedy tokens at the end are not plain decoding's
(sglang_judge.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.sglang_client import Client, Reply
from benchmarks.sglang_engines import CPU_ARGUMENTS, ROOT, install, pair_parser, parsed, settings
from benchmarks.sglang_judge import Judge
from benchmarks.sglang_modes import levels, machine, read_prompts

SHIFT, SAMPLE = 30.0, 10.0  # seconds between levels, and between looks at the server
SPREAD = 0.05  # of the acceptance length, minute by minute
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["alpha", "beta"]}, "count": {"type": "integer", "maximum": 999}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "schema": {"temperature": 0.7, "json_schema": SCHEMA},
}
LIMITS: list[dict[str, Any]] = [
    {},
    {"budget": 7, "topk_cap": 1, "expansion": "chain"},
    {"budget": 12, "topk_cap": 3},
]
DELIVERY = ("whole", "streamed", "streamed", "hung up", "aborted")


class Soak:
    """Traffic of many threads, and what became of it.

    Args:
        client: of the server.
        texts: token ids that prompts are cut from.
        levels: requests at a time, taken in turn.
        longest: tokens of the longest prompt and the longest answer.
    """

    def __init__(
        self, client: Client, texts: list[list[int]], levels: list[int], longest: tuple[int, int]
    ) -> None:
        self._client, self._texts, self._levels, self._longest = client, texts, levels, longest
        self._begin = 0.0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []
        self.seconds = 0.0
        self.minutes: dict[int, Counter[str]] = defaultdict(Counter)

    def run(self, seconds: float, looked: Any) -> None:
        """Send traffic for so long; `looked` is called every ten seconds with the seconds since the start."""
        self._begin = time.monotonic()
        threads = [
            threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(max(self._levels))
        ]
        for thread in threads:
            thread.start()
        while (since := time.monotonic() - self._begin) < seconds:
            time.sleep(min(SAMPLE, seconds - since))
            self.seconds = time.monotonic() - self._begin
            looked(self.seconds, self.level())
        self._ended.set()
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                self.faults.append("a request did not end within 120 s of the last one's start")

    def level(self) -> int:
        """How many requests there are at a time now."""
        return self._levels[int((time.monotonic() - self._begin) / SHIFT) % len(self._levels)]

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        count = 0
        while not self._ended.is_set():
            if number >= self.level():
                time.sleep(0.05)
                continue
            count += 1
            try:
                self._one(chance, f"soak-{number}-{count}")
            except Exception as error:  # whatever it is, it belongs into the record
                with self._lock:
                    self.faults.append(f"soak-{number}-{count}: {type(error).__name__}: {error}"[:400])

    def _one(self, chance: random.Random, rid: str) -> None:
        """One request, from its making to its place in the record."""
        kind, delivery = chance.choice([*SAMPLING, "greedy"]), chance.choice(DELIVERY)
        limits, most = chance.choice(LIMITS), round(self._longest[1] ** chance.uniform(0.3, 1))
        sampling = SAMPLING[kind] | {"max_new_tokens": most, "ignore_eos": kind != "schema"}
        if limits:
            sampling["custom_params"] = {"ddtree": limits}
        if kind != "schema" and chance.random() < 0.1:
            sampling["stop"] = ["\n\n"]
        body = {"rid": rid, "input_ids": self._prompt(chance), "sampling_params": sampling}
        if delivery == "whole":
            reply = self._client.whole(body)
        else:
            leave = chance.randint(1, 8) if delivery in ("hung up", "aborted") else None
            reply = self._client.streamed(body, leave_after=leave, aborting=delivery == "aborted")
        self._record(kind, delivery, limits, most, reply)

    def _prompt(self, chance: random.Random) -> list[int]:
        """A piece of a text; of every third its beginning, which others share."""
        text, length = chance.choice(self._texts), round(self._longest[0] ** chance.uniform(0.3, 1))
        first = 0 if chance.random() < 0.33 else chance.randrange(max(1, len(text) - length))
        return text[first : first + length]

    def _record(self, kind: str, delivery: str, limits: dict[str, Any], most: int, reply: Reply) -> None:
        fault = reply.fault(most, as_json=kind == "schema")
        with self._lock:
            self.ends[f"{delivery}: {reply.end}"] += 1
            if fault:
                self.faults.append(f"{kind}, {delivery}: {fault}"[:400])
            minute = self.minutes[int((time.monotonic() - self._begin) / 60)]
            minute["requests"] += 1
            minute["tokens"] += reply.tokens
            if kind == "greedy" and not limits and reply.steps and reply.end in ("stop", "length"):
                minute["greedy_tokens"] += reply.tokens - 1  # the first is the prefill's
                minute["greedy_steps"] += reply.steps


class Server:
    """`python -m sglang.launch_server` with DDTREE, and what can be seen of it from outside."""

    def __init__(self, args: argparse.Namespace, folder: Path, port: int) -> None:
        args.logs.mkdir(parents=True, exist_ok=True)
        self.log = args.logs / "soak_server.log"
        install(folder / "site", ("ddtree",))
        paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(folder / "site")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SGLANG_PLUGINS": "ddtree",
        }
        most = max(args.levels)
        flags: dict[str, Any] = {
            "model-path": args.target, "speculative-draft-model-path": args.drafter,
            "speculative-algorithm": "DDTREE",
            "speculative-ddtree-budget": 32, "speculative-ddtree-topk-cap": 8,
            "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "xgrammar",
            "cuda-graph-backend-prefill": "disabled", "max-running-requests": most, "max-total-tokens": 65536,
            "mem-fraction-static": 0.8, "context-length": 2048, "chunked-prefill-size": 256,
            "host": "127.0.0.1", "port": port, "log-level": "warning", "random-seed": 1,
        }  # fmt: skip
        if args.cpu:
            program = [str(ROOT / "tests/sglang/on_cpu.py")]
            flags |= {key.replace("_", "-"): value for key, value in CPU_ARGUMENTS.items()}
            flags |= {"dtype": "float32", "max-total-tokens": 8192, "context-length": 512}
        else:
            program = ["-m", "sglang.launch_server"]
            flags |= {"dtype": "bfloat16", "cuda-graph-max-bs-decode": most}
        flags |= {key.replace("_", "-"): value for key, value in settings(args.set).items()}
        switches = ["constrained-json-disable-any-whitespace", "enable-metrics"]
        switches += [key for key, value in flags.items() if value is True]
        words = [
            word for key, value in flags.items() if value is not True for word in (f"--{key}", str(value))
        ]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, *words, *(f"--{switch}" for switch in switches)],
                env=environment, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def wait(self, client: Client, seconds: float) -> None:
        """Until it decodes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if client.healthy():
                return
            time.sleep(1)
        raise SystemExit(f"the server did not start\n{self.log.read_text(errors='replace')[-3000:]}")

    def resident(self) -> int:
        """MiB of memory that its processes hold."""
        total = 0
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                if os.getsid(int(status.parent.name)) == self.process.pid:
                    lines = status.read_text().splitlines()
                    total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
            except OSError:
                continue
        return total // 1024

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, 9)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        port = 29_900
        client, server = Client(port), Server(args, Path(scratch), port)
        try:
            server.wait(client, 500)
            result = soaked(args, client, server)
        finally:
            server.stop()
    keep(args, result)
    print(json.dumps({key: value for key, value in result.items() if key != "looks"}))
    if result["faults"]:
        raise SystemExit(f"{len(result['faults'])} faults; the first: {result['faults'][0]}")


def soaked(args: argparse.Namespace, client: Client, server: Server) -> dict[str, Any]:
    """The whole run: before, traffic, after."""
    prompts = read_prompts(args)
    text = [token for prompt in prompts for token in prompt]
    texts = [text[n * 97 % len(text) :] + text for n in range(24)]
    soak = Soak(client, texts, args.levels, args.longest)
    client.whole({"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 8}})
    client.flush()
    before, memory = client.free_rows(), client.gpu_memory()
    result: dict[str, Any] = {
        "machine": machine(),
        "levels": args.levels,
        "seconds": 0,
        "faults": [],
        "looks": [],
    }

    def looked(since: float, level: int) -> None:
        result["seconds"] = round(since, 1)
        look = {"second": round(since), "level": level, "requests": sum(soak.ends.values())}
        result["looks"].append(look | {"server_mib": server.resident(), "gpu_mib": client.gpu_memory()})
        keep(args, result | record(soak))  # should the run be cut
        if server.process.poll() is not None:
            raise SystemExit(f"the server ended\n{server.log.read_text(errors='replace')[-3000:]}")

    soak.run(args.seconds, looked)
    result |= record(soak)
    client.wait_idle(60)
    time.sleep(5)  # SGLang's check of an idle server
    told = client.self_check()
    client.flush()
    after = client.free_rows()
    result |= {
        "free_rows": {"before": before, "after": after},
        "gpu_mib": {"before": memory, "after": client.gpu_memory()},
    }
    result["self_check"] = told
    answers = [
        client.whole(
            {
                "input_ids": ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
            }
        )
        for ids in prompts
    ]
    judge, outputs = Judge(args.target), [answer.ids for answer in answers]
    result["judged_at_the_end"] = judge.verdict(prompts, outputs)
    result["judge_fails_one_replaced_token"] = judge.fails_one_replaced_token(prompts[0], outputs[0])
    result["faults"] += found(result, server)
    return result


def record(soak: Soak) -> dict[str, Any]:
    """What the traffic came to so far."""
    minutes = [
        {
            "requests": own["requests"],
            "tokens": own["tokens"],
            "acceptance_length": round(own["greedy_tokens"] / own["greedy_steps"], 3)
            if own["greedy_steps"]
            else None,
        }
        for minute, own in sorted(soak.minutes.items())
        if (minute + 1) * 60 <= soak.seconds  # requests that end after the last minute are long ones
    ]
    return {"ends": dict(sorted(soak.ends.items())), "minutes": minutes, "faults": list(soak.faults)}


def found(result: dict[str, Any], server: Server) -> list[str]:
    """What is wrong, beside single answers."""
    rows, faults = result["free_rows"], []
    if rows["before"] != rows["after"]:
        faults.append(f"free rows and slots were {rows['before']} before and are {rows['after']} after")
    if server.process.poll() is not None or "leak" in server.log.read_text(errors="replace"):
        faults.append("the server ended, or its log tells of a leak")
    lengths = [own["acceptance_length"] for own in result["minutes"] if own["acceptance_length"]]
    middle = statistics.median(lengths) if lengths else 0
    faults += [
        f"acceptance length {x} in a minute, {middle} in most"
        for x in lengths
        if abs(x / middle - 1) > SPREAD
    ]
    if not result["judged_at_the_end"]["lossless"] or not result["judge_fails_one_replaced_token"]:
        faults.append("greedy tokens at the end are not plain decoding's, or the judge sees nothing")
    if not result["self_check"].get("ok"):
        faults.append(f"the self-check fails: {result['self_check']}")
    return faults


def keep(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--levels", type=levels, default=[16, 32, 64, 48], help="requests at a time, in turn")
    parser.add_argument("--longest", type=levels, default=[900, 400], help="tokens of prompts and answers")
    parser.add_argument("--cpu", action="store_true", help="in the environment of scripts/sglang_env.sh")
    return parsed(parser)


if __name__ == "__main__":
    main()
